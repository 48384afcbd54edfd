"""Fields of Megatron-Core's configs, as options of Megatron-LM: TransformerConfig, ModelParallelConfig and the provider
of a GPT model, which trees of NeMo and of Megatron-Bridge hold. Names are those of Megatron-Core 0.16.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from dtlayout.base.errors import InvalidConfig
from dtlayout.programs.megatron.layout import read_stages
from dtlayout.programs.megatron.own_names import Assumed, Naming, Options, choice, flag, listed, opposite, same

_SAME: Mapping[str, str] = {
    "num_layers": "--num-layers", "hidden_size": "--hidden-size", "ffn_hidden_size": "--ffn-hidden-size",
    "num_attention_heads": "--num-attention-heads", "kv_channels": "--kv-channels",
    "normalization": "--normalization", "layernorm_epsilon": "--norm-epsilon", "rotary_base": "--rotary-base",
    "rope_scaling_factor": "--rope-scaling-factor", "position_embedding_type": "--position-embedding-type",
    "make_vocab_size_divisible_by": "--make-vocab-size-divisible-by", "transformer_impl": "--transformer-impl",
    "tensor_model_parallel_size": "--tensor-model-parallel-size",
    "pipeline_model_parallel_size": "--pipeline-model-parallel-size",
    "virtual_pipeline_model_parallel_size": "--num-virtual-stages-per-pipeline-rank",
    "context_parallel_size": "--context-parallel-size", "expert_model_parallel_size": "--expert-model-parallel-size",
    "expert_tensor_parallel_size": "--expert-tensor-parallel-size",
    "num_layers_in_first_pipeline_stage": "--decoder-first-pipeline-num-layers",
    "num_layers_in_last_pipeline_stage": "--decoder-last-pipeline-num-layers",
    "cp_comm_type": "--cp-comm-type", "recompute_granularity": "--recompute-granularity",
    "recompute_method": "--recompute-method", "recompute_num_layers": "--recompute-num-layers",
    "cross_entropy_fusion_impl": "--cross-entropy-fusion-impl", "fp8": "--fp8-format", "fp8_recipe": "--fp8-recipe",
    "fp4": "--fp4-format", "fp4_recipe": "--fp4-recipe", "cuda_graph_impl": "--cuda-graph-impl",
    "cuda_graph_scope": "--cuda-graph-scope", "num_moe_experts": "--num-experts",
    "moe_router_topk": "--moe-router-topk", "moe_ffn_hidden_size": "--moe-ffn-hidden-size",
    "moe_shared_expert_intermediate_size": "--moe-shared-expert-intermediate-size",
    "moe_router_score_function": "--moe-router-score-function", "moe_router_num_groups": "--moe-router-num-groups",
    "moe_router_group_topk": "--moe-router-group-topk",
    "moe_router_topk_scaling_factor": "--moe-router-topk-scaling-factor",
    "moe_router_bias_update_rate": "--moe-router-bias-update-rate", "moe_z_loss_coeff": "--moe-z-loss-coeff",
    "moe_aux_loss_coeff": "--moe-aux-loss-coeff",
    "moe_router_load_balancing_type": "--moe-router-load-balancing-type",
    "moe_token_dispatcher_type": "--moe-token-dispatcher-type",
    "moe_flex_dispatcher_backend": "--moe-flex-dispatcher-backend", "q_lora_rank": "--q-lora-rank",
    "kv_lora_rank": "--kv-lora-rank", "qk_head_dim": "--qk-head-dim", "v_head_dim": "--v-head-dim",
    "qk_pos_emb_head_dim": "--qk-pos-emb-head-dim",
}  # fmt: skip
"""Field → option with the same word."""
_FLAGS: Mapping[str, str] = {
    "sequence_parallel": "--sequence-parallel", "tp_comm_overlap": "--tp-comm-overlap",
    "add_qkv_bias": "--add-qkv-bias", "qk_layernorm": "--qk-layernorm", "gated_linear_unit": "--swiglu",
    "rope_scaling": "--use-rope-scaling", "enable_cuda_graph": "--enable-cuda-graph",
    "external_cuda_graph": "--external-cuda-graph",
    "moe_enable_deepep": "--moe-enable-deepep", "moe_router_pre_softmax": "--moe-router-pre-softmax",
    "moe_router_enable_expert_bias": "--moe-router-enable-expert-bias",
    "multi_latent_attention": "--multi-latent-attention", "moe_layer_recompute": "--moe-layer-recompute",
    "overlap_moe_expert_parallel_comm": "--overlap-moe-expert-parallel-comm",
    "account_for_embedding_in_pipeline_split": "--account-for-embedding-in-pipeline-split",
    "account_for_loss_in_pipeline_split": "--account-for-loss-in-pipeline-split",
    "cross_entropy_loss_fusion": "--cross-entropy-loss-fusion",
}  # fmt: skip
"""Field that is true where an option is there → the option."""
_OPPOSITES: Mapping[str, str] = {
    "add_bias_linear": "--disable-bias-linear",
    "share_embeddings_and_output_weights": "--untie-embeddings-and-output-weights",
}
"""Field that is false where an option is there → the option."""
_LAYERS = {"embedding": "E", "decoder": "t", "loss": "L", "mtp": "m"}
"""Layer of a stage → its letter in --pipeline-model-parallel-layout."""
_BACKENDS = ("flash", "fused", "unfused", "local", "auto")
"""Kernels of attention, in the order of their numbers from 1."""
IGNORED: Mapping[str, str] = {
    "initial values and chance": r".*init_method.*|seed|use_cpu_initialization|init_model_with_meta_device"
    r"|te_rng_tracker|perform_initialization|use_te_rng_tracker|deterministic_mode|inference_rng_tracker|inference_sampling_seed",
    "dropout": r"(attention|hidden|ffn)_dropout",
    "what its blocks do alike": r"activation_func(\..*)?|transformer_layer_spec(\..*)?|rotary_(percent|interleaved)"
    r"|attention_softmax_in_fp32|apply_query_key_layer_scaling|layernorm_zero_centered_gamma|moe_grouped_gemm"
    r"|moe_permute_fusion|moe_router_(fusion|dtype|padding_for_fp8|padding_for_quantization|force_.*)"
    r"|moe_per_layer_logging|moe_input_jitter_eps|calculate_per_token_loss|fp8_(margin|interval|amax_.*)|softmax_scale"
    r"|seq_len_interpolation_factor|rotary_scaling_factor|parallel_output|clone_scatter_output_in_embedding"
    r"|scatter_embedding_sequence_parallel|max_position_embeddings|moe_apply_probs_on_input|moe_.*_num_sms"
    r"|cuda_graph_warmup_steps|mscale.*|beta_(fast|slow)|original_max_position_embeddings|rope_type|yarn_.*"
    r"|moe_token_drop_policy|should_pad_vocab|moe_use_legacy_grouped_gemm|use_arbitrary_attention_mask|mlp_chunks_for_prefill",
    "logs and evaluation": r"barrier_with_L1_time|timers|config_logger_dir|log_max_attention_logit"
    r"|moe_enable_routing_.*",
    "how ranks meet": r"batch_p2p_(comm|sync)|tp_comm_(bulk|split|atomic|overlap_(ag|rs|rs_dgrad|cfg|disable).*|boot).*"
    r"|deallocate_pipeline_outputs|use_ring_exchange_p2p|pipeline_model_parallel_comm_backend|variable_seq_lengths"
    r"|(params|pipeline|autocast)_dtype(\..*)?|enable_autocast|(grad|param|no)_sync_func|finalize_model_grads_func"
    r"|grad_scale_func|async_tensor_model_parallel_allreduce|nccl_all_reduce_for_prefill|symmetric_ar_type"
    r"|microbatch_group_size_per_vp_stage|mtp_(loss_scaling_factor|standalone|use_repeated_layer|hybrid_.*)"
    r"|min_offloaded_tensor_size|cpu_offloading_(activations|weights|double_buffering|retain_.*|num_layers)",
    "what is not used in training": r"flash_decode|generation_config(\..*)?"
    r"|cache_mla_latents|inference_.*|use_inference_.*|batch_invariant_mode"
    r"|restore_modelopt_state|.*_quantizer_factory|quant_recipe",
    "other models": r"mamba_.*|use_mamba_.*|linear_(conv|key|value|num)_.*|dsa_.*|mrope_section|mup_.*"
    r"|kitchen_attention_backend|hetereogenous_dist_checkpoint|qk_clip_(alpha|threshold)|glu_linear_offset",
}  # fmt: skip
"""Subject of fields that change no prediction here → a pattern of their names."""
OTHERWISE = (
    r".*_fusion|persist_layer_norm|memory_efficient_layer_norm|delay_wgrad_compute|fp8_(wgrad|param)"
    r"|defer_embedding_wgrad_compute|wgrad_deferral_limit|num_layers_at_(start|end)_in_bf16|first_last_layers_bf16"
    r"|use_transformer_engine_.*|use_te_.*|disable_parameter_transpose_cache|cuda_graph_(use|retain)_.*|tp_only_amax_red"
    r"|fused_.*|use_fused_.*|mla_down_proj_fusion|moe_shared_expert_overlap|overlap_p2p_comm_warmup_flush"
    r"|ep_overlap_.*|activation_func_(fp8_input_store|clamp_value)|disable_bf16_reduced_.*|fp16_lm_cross_entropy|qk_clip"
)
"""Fields that change a little of time or memory, which is predicted as if they were not there."""
NEUTRAL: Mapping[str, Sequence[Any]] = {
    **dict.fromkeys((
        "cpu_offloading", "fine_grained_activation_offloading", "is_hybrid_model",
        "moe_token_dropping", "moe_pad_expert_input_to_capacity", "moe_shared_expert_gate",
        "fp8_dot_product_attention",
        "fp8_multi_head_attention", "hybrid_context_parallel", "apply_residual_connection_post_layernorm",
        "attention_output_gate", "qk_l2_norm", "use_mup", "fp32_residual_connection",
        "distribute_saved_activations", "test_mode", "heterogeneous_block_specs", "use_kitchen",
        "use_kitchen_attention", "mtp_enabled", "fp4_param", "moe_extended_tp",
        "dsa_indexer_use_sparse_loss", "moe_pad_experts_for_cuda_graph_inference",
    ), (False, None)),
    **dict.fromkeys((
        "mtp_num_layers", "window_size", "window_attn_skip_freq", "moe_expert_capacity_factor", "moe_latent_size",
        "hierarchical_context_parallel_sizes", "num_microbatches_with_partial_activation_checkpoints",
        "experimental_attention_variant", "linear_attention_freq", "no_rope_freq", "offload_modules",
        "max_seqlen_per_dp_cp_rank", "moe_router_topk_limited_devices",
    ), (None, 0, [])),
    "softmax_type": ("vanilla",),
}  # fmt: skip
"""Field → values that leave everything as it is predicted; others are refused."""


def list_fields(at: Callable[[str], str], left_out: Sequence[str] = ()) -> list[Naming]:
    """Rules of Megatron-Core's fields, whose dotted names `at` says; without those of some names."""
    rules = [same(at(name), option) for name, option in _SAME.items() if name not in left_out]
    rules += [flag(at(name), option) for name, option in _FLAGS.items() if name not in left_out]
    rules += [opposite(at(name), option) for name, option in _OPPOSITES.items() if name not in left_out]
    own: Mapping[str, Callable[[str], Naming]] = {
        "num_query_groups": _name_groups, "overlap_p2p_comm": lambda name: name_overlap(name, at),
        "moe_layer_freq": _name_dense, "pipeline_model_parallel_layout": _name_stages,
        "attention_backend": _name_attention, "recompute_modules": lambda name: listed(name, "--recompute-modules"),
    }  # fmt: skip
    rules += [make(at(name)) for name, make in own.items() if name not in left_out]
    if "attention_backend" not in left_out:
        rules.append(_name_backend_number(at("attention_backend")))
    return [*rules, _name_long(at)]


def below(prefix: str, patterns: Mapping[str, str]) -> dict[str, str]:
    """Patterns of names that lie below a prefix."""
    return {what: rf"{prefix}({names})" for what, names in patterns.items()}


def _name_groups(name: str) -> Naming:
    grouping, number = "--group-query-attention", "--num-query-groups"

    def to(values: Mapping[str, Any]) -> Options:
        return {grouping: [], number: [str(values[name])]}

    def back(options: Options) -> Mapping[str, Any]:
        words = options.get(number)
        return {name: int(words[0]) if words and words[0].isdigit() else None}

    return Naming((name,), (grouping, number), to, back)


def name_overlap(name: str, at: Callable[[str], str], default: bool = False) -> Naming:
    """The name of what overlaps in a pipeline, whose default differs from Megatron-LM's; it has no effect without
    virtual stages."""
    option, virtual = "--no-overlap-p2p-communication", at("virtual_pipeline_model_parallel_size")
    ranks, layout = at("pipeline_model_parallel_size"), at("pipeline_model_parallel_layout")

    def is_interleaved(values: Mapping[str, Any]) -> bool:
        stages = values.get(layout)
        if stages is not None and str(values.get(ranks)).isdigit():
            options = _name_stages(layout).to({layout: stages})
            words = options["--pipeline-model-parallel-layout"] or [""]
            return len(read_stages(words[0], layout)) > int(values[ranks])
        return str(values.get(virtual, 1)) not in ("0", "1")

    def to(values: Mapping[str, Any]) -> Options:
        if not is_interleaved(values):
            return {}
        if name in values:
            return opposite(name, option).to(values)
        return {} if default else {option: Assumed([], f"{name} is false by default")}

    def idle(values: Mapping[str, Any]) -> Mapping[str, str]:
        return {name: f"without {virtual}"} if name in values and not is_interleaved(values) else {}

    back = opposite(name, option).back
    return Naming((name, virtual, ranks, layout), (option,), to, back, idle=idle, shown=(name,))


def _name_long(at: Callable[[str], str]) -> Naming:
    """The classes of Llama 3.1 always stretch rotary positions; fields say how much."""
    factor, *others = (at(name) for name in ("scale_factor", "low_freq_factor", "high_freq_factor", "old_context_len"))
    scaled, number = "--use-rope-scaling", "--rope-scaling-factor"

    def to(values: Mapping[str, Any]) -> Options:
        return {scaled: [], number: [str(values[factor])]} if factor in values else {}

    def back(options: Options) -> Mapping[str, Any]:
        words = options.get(number)
        return {factor: float(words[0]) if words else None}

    return Naming((factor, *others), (scaled, number), to, back, homes={number: factor})


def _name_dense(name: str) -> Naming:
    """Blocks with experts: a number, a pattern, or a list with 0 or 1 for each block."""
    option = "--moe-layer-freq"

    def to(values: Mapping[str, Any]) -> Options:
        return {option: ["".join(str(values[name]).split())]}

    def back(options: Options) -> Mapping[str, Any]:
        words = options[option]
        return {name: words[0].strip("'\"") if words else None}

    return Naming((name,), (option,), to, back)


def _name_stages(name: str) -> Naming:
    """Layers of each stage: a string as that of the option, or a list of lists."""
    option = "--pipeline-model-parallel-layout"

    def to(values: Mapping[str, Any]) -> Options:
        value = values[name]
        if not isinstance(value, list):
            return {option: [str(value)]}
        stages = [stage if isinstance(stage, list) else [stage] for stage in value]
        unknown = [layer for stage in stages for layer in stage if layer not in _LAYERS]
        if unknown:
            raise InvalidConfig(f"{name} has {unknown[0]}, which is not understood here; {' or '.join(_LAYERS)} is")
        return {option: ["|".join("".join(_LAYERS[layer] for layer in stage) for stage in stages)]}

    def back(options: Options) -> Mapping[str, Any]:
        words = options[option]
        return {name: words[0].strip("'\"") if words else None}

    return Naming((name,), (option,), to, back)


def _name_attention(name: str) -> Naming:
    words = {word: {"--attention-backend": [each]} for each in _BACKENDS for word in (each, f"AttnBackend.{each}")}
    return choice(name, words)


def _name_backend_number(name: str) -> Naming:
    """The number of a kernel of attention, as a saved config has it: a call of its class, with a list of one."""
    own, option = f"{name}._args_", "--attention-backend"

    def to(values: Mapping[str, Any]) -> Options:
        value = values[own]
        if not isinstance(value, list) or len(value) != 1 or value[0] not in range(1, len(_BACKENDS) + 1):
            raise InvalidConfig(f"{own}={value} is nothing that is known here; use [1] to [{len(_BACKENDS)}]")
        return {option: [_BACKENDS[value[0] - 1]]}

    def back(options: Options) -> Mapping[str, Any]:
        words = options[option] or ["auto"]
        return {own: [_BACKENDS.index(words[0]) + 1]}

    return Naming((own,), (option,), to, back)
