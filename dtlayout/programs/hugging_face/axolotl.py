"""axolotl: the words of its YAML file."""

from collections.abc import Mapping
from typing import Any

from dtlayout.programs.hugging_face import trainer
from dtlayout.programs.hugging_face.trainer import LIGER, PLAIN, Dialect
from dtlayout.programs.program import Job

LIGER_PLUGIN = "axolotl.integrations.liger.LigerPlugin"
"""Entry of `plugins` without which Liger's options have no effect."""
LIGER_OPTIONS: Mapping[str, tuple[str, str]] = {
    "liger_rope": ("rope", "liger"), "liger_rms_norm": ("norm", "liger"), "liger_glu_activation": ("swiglu", "liger"),
    "liger_swiglu": ("swiglu", "liger"), "liger_fused_linear_cross_entropy": ("loss", "linear"),
    "liger_cross_entropy": ("loss", "chunked"),
}  # fmt: skip
"""Option of Liger's plugin → kernel; of several for one of ours, the first is written."""
ATTENTION: Mapping[str, tuple[str, Any]] = {
    "flash-attn": ("flash_attention", True), "sdpa-flash": ("sdp_attention", True), "torch": ("eager_attention", True),
    "fa3": ("attn_implementation", "flash_attention_3"),
}  # fmt: skip
"""kernels.attention → option and its value."""
RINGS: Mapping[str, str] = {
    "varlen_llama3": "gather", "batch_ring": "ring", "batch_zigzag": "ring", "batch_stripe": "ring",
}  # fmt: skip
"""ring_attn_func → layout.cp_method; of several for one of ours, the first is written."""
_FSDP = ("sharding_strategy", "reshard_after_forward", "offload_params", "activation_checkpointing", "auto_wrap_policy")
AXOLOTL = Dialect(
    title="axolotl",
    names={
        "per_device_train_batch_size": ("micro_batch_size",), "max_length": ("sequence_len",),
        "model_name_or_path": ("base_model",), "optim": ("optimizer",), "use_peft": ("adapter",),
        "use_dora": ("peft_use_dora",), "use_rslora": ("peft_use_rslora",),
        "fsdp.version": ("fsdp_version", "fsdp_config.fsdp_version", "fsdp_config.version"),
        **{f"fsdp.{key}": (f"fsdp_config.{key}", f"fsdp_config.fsdp_{key}") for key in _FSDP},
    },
    defaults={"per_device_train_batch_size": 1, "max_length": 512, "lora_r": 8, "lora_alpha": 8},
    ignored={
        "where a run writes, and its logs": r"(wandb|mlflow|comet|trackio|otel)_.*|use_(wandb|mlflow|comet|tensorboard"
        r"|trackio|otel_metrics)|loss_watchdog_.*|profiler_.*|show_progress",
        "evaluation": r"val_set_size|evals_per_epoch|test_datasets|do_(bench|causal_lm)_eval|bench_.*",
        "checkpoints": r"saves_per_epoch|auto_resume_from_checkpoints|fsdp_final_state_dict_type|hf_use_auth_token",
        "the number of steps, and chance": r"num_epochs|gc_steps",
        "the course of the learning rate": r"lr_scheduler|lr_.*|cosine_.*|embedding_lr.*|loraplus_.*",
        "data": r"datasets|pretraining_dataset(\..*)?|special_tokens(\..*)?|tokens|added_tokens_overrides(\..*)?"
        r"|shuffle_.*|skip_prepare_dataset|push_dataset_to_hub|default_system_message|train_on_.*|roles_to_train"
        r"|sample_packing_.*|eval_sample_packing|pad_to_sequence_len|multipack_real_batches|curriculum_sampling"
        r"|excess_length_strategy|min_sample_len|group_by_length|conversation_.*|is_preprocess|pretrain_.*|streaming_.*"
        r"|field_.*|chat_template_jinja|resize_token_embeddings_to_32x|shrink_embeddings|eot_tokens",
        "where weights come from": r"model_type|tokenizer_(type|config|use_.*|legacy|save_.*)"
        r"|is_(llama|mistral|qwen|falcon)_.*|strict|revision_of_model|base_model_(config|ignore_patterns)|lora_model_dir|processor_type|cls_model_config"
        r"|qlora_sharded_model_loading|lora_on_cpu|low_cpu_mem_usage|experimental_skip_move_to_device",
        "how ranks meet": r"world_size|use_ray|ray_.*|device|device_map|dist_.*|heads_k_stride",
        "noise, and the loss's weights": r"noisy_embedding_alpha|sequence_len_overflow_handling",
    },
    otherwise=r"lora_(mlp|qkv|o|embedding)_kernel|unsloth_.*|flash_attn_(rms_norm|fuse_qkv|fuse_mlp)|gpu_memory_limit"
    r"|max_memory(\..*)?|embeddings_skip_upcast|bnb_config_kwargs(\..*)?|torch_compile_(backend|mode)|fp8_.*"
    r"|liger_(layer_norm|rms_norm_gated|use_token_scaling)|chunked_cross_entropy_num_chunks|flex_attn_compile_kwargs.*"
    r"|eval_batch_size|peft_(init_lora_weights|autocast_adapter_dtype|ensure_weight_tying)|xformers_attention|flash_optimum",
    has_fsdp_words=False,
    degrees={
        "tp": "tensor_parallel_size", "cp": "context_parallel_size", "dp_replicate": "dp_replicate_size",
        "dp_shard": "dp_shard_size",
    },
)  # fmt: skip
"""Words of axolotl's schema."""


def choose_options(job: Job) -> tuple[dict[str, Any], list[str]]:
    """Options of the YAML that layout, batch, kernels and formats decide, and gaps; None for one that is left out."""
    options, gaps = trainer.choose_options(job, AXOLOTL)
    kernels, precision, layout = job.estimate.kernels, job.scenario.precision, job.layout
    gaps = [gap for gap in gaps if not gap.startswith("kernels.")]
    for name in ("use_liger_kernel", "attn_implementation", "dtype"):
        options.pop(name)
    chosen = ATTENTION.get(kernels.attention)
    if chosen is None:
        gaps.append(f"kernels.attention={kernels.attention} is nothing that it has: sdp_attention is written instead")
        chosen = ATTENTION["sdpa-flash"]
    if job.scenario.document_mask and kernels.attention == "fa3":
        gaps.append("kernels.attention=fa3 is no flag beside sample_packing, which flash_attention is")
    options |= {name: value if (name, value) == chosen else None for name, value in ATTENTION.values()}
    own = {ours: getattr(kernels, ours) for ours in LIGER}
    ligers = {
        name: own[ours] == value or None for name, (ours, value) in LIGER_OPTIONS.items() if name != "liger_swiglu"
    }
    options |= {"plugins": [LIGER_PLUGIN] if any(ligers.values()) else None, **ligers}
    gaps += [
        f"kernels.{ours}={value} is nothing that it has: {PLAIN[ours]} is used"
        for ours, value in own.items()
        if value != PLAIN[ours] and (ours, value) not in LIGER_OPTIONS.values()
    ]
    if layout.offloads_activations:
        options["gradient_checkpointing"] = "offload"
    functions = {ours: theirs for theirs, ours in reversed([*RINGS.items()])}
    options["ring_attn_func"] = functions.get(layout.cp_method) if layout.cp > 1 else None
    loads_masters = job.model.adapter is None and job.scenario.engine.name == "accelerate"
    if loads_masters and options["fsdp_version"] is None and precision.params != precision.compute:
        gaps.append(f"precision.params={precision.params} is not written: weights are loaded in {precision.compute}")
    options["fsdp"] = None
    return options, gaps
