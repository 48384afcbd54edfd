"""Rules of Megatron-Bridge's configs, and of NeMo 2's, whose parts are the same under other names.

A config has parts: model, train, optimizer, ddp, dist, dataset, tokenizer, mixed_precision, comm_overlap. Before a run,
mixed_precision takes the place of formats in model, optimizer and ddp, and comm_overlap that of what overlaps. Names
and defaults are those of Megatron-Bridge 0.3 and 0.4.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from dtlayout.programs.megatron.core_fields import IGNORED as CORE_IGNORED
from dtlayout.programs.megatron.core_fields import NEUTRAL, OTHERWISE, list_fields, name_overlap
from dtlayout.programs.megatron.own_names import (
    Assumed,
    Naming,
    Options,
    alike,
    choice,
    choose_value,
    flag,
    opposite,
    renamed,
    same,
    show_value,
)

At = Callable[[str, str], str]
"""Function from a part of a config and a field to the dotted name; an empty field is the part itself."""
_FORMATS = ("--bf16", "--fp16", "--fp8-format", "--fp8-recipe", "--fp4-format", "--fp4-recipe")
_TORCH = {"torch.float32": "fp32", "torch.bfloat16": "bf16", "torch.float16": "fp16", "torch.half": "fp16"}
_OPTIMIZER: Mapping[str, str] = {
    "lr": "--lr", "weight_decay": "--weight-decay", "clip_grad": "--clip-grad", "adam_beta1": "--adam-beta1",
    "adam_beta2": "--adam-beta2", "adam_eps": "--adam-eps", "sgd_momentum": "--sgd-momentum",
}  # fmt: skip
"""Field of the optimizer → option."""
IGNORED: Mapping[str, Mapping[str, str]] = {
    "model": {**CORE_IGNORED, "data": r"hf_model_id|tokenizer(\..*)?"},
    "train": {
        "the length of the run": r"train_(iters|samples)|exit_.*|iterations_to_skip|check_.*|decrease_.*|skip_.*",
        "logs and evaluation": r"eval_.*", "how ranks meet": r"manual_gc.*|empty_unused_.*|train_sync_interval",
    },
    "optimizer": {
        "the course of the learning rate": r"min_lr|decoupled_.*|lr_mult|apply_wd_.*",
        "initial values and chance": r"(initial_|min_)?loss_scale.*|hysteresis",
        "the optimizer's own kernels": r"(muon|lion)_.*|.*pin_cpu_.*|use_torch_.*|store_param_remainders",
        "logs and evaluation": r"log_.*|timers|barrier_with_L1_time|config_logger_dir",
        "what ddp says too": r"overlap_param_gather.*|bf16|fp16|fp8_recipe|params_dtype(\..*)?|reuse_grad_buf.*",
    },
    "ddp": {
        "how gradients meet": r"average_in_collective|check_for_.*|bucket_size|pad_buckets.*|reduce_scatter_.*|nccl_ub"
        r"|gradient_reduce_.*|gradient_as_bucket_view|suggested_.*|disable_symmetric_.*|param_name_patterns_.*"
        r"|align_param_gather|fsdp_.*|keep_fp8_.*|megatron_fsdp_.*|preserve_fp32_weights|(bf16|fp8|fp4)_param_gather",
    },
    "dist": {"how ranks meet": r"(?!use_megatron_fsdp|use_torch_fsdp2).*"}, "dataset": {"data": r".*"},
    "tokenizer": {"data": r".*"},
    "mixed_precision": {
        "initial values and chance": r"(initial_|min_)?loss_scale.*|hysteresis",
        "what its blocks do alike": r"(params|pipeline|autocast)_dtype(\..*)?|autocast_.*|fp32|precision"
        r"|fp8_(margin|amax_.*)",
    },
    "comm_overlap": {
        "how ranks meet": r"tp_comm_(overlap_cfg.*|bootstrap_.*)|batch_p2p_comm|bucket_size|align_param_gather"
        r"|data_parallel_size|overlap_param_gather_with_.*",
    },
}  # fmt: skip
"""Part → subject of fields that change no prediction here → a pattern of their names."""
OTHERWISE_BY_PART: Mapping[str, str] = {
    "model": OTHERWISE, "ddp": r"delay_wgrad_compute|reuse_grad_buf.*|overlap_param_gather_with_.*",
    "optimizer": r"decoupled_weight_decay",
    "mixed_precision": r"first_last_layers_bf16|num_layers_at_.*|fp8_(wgrad|param.*)|fp4_param.*|reuse_grad_buf.*",
    "comm_overlap": r"defer_embedding_.*|wgrad_deferral_limit|delay_wgrad_compute",
}  # fmt: skip
"""Part → fields that are predicted as if they were not there."""
NEUTRAL_BY_PART: Mapping[str, Mapping[str, Sequence[Any]]] = {
    "model": NEUTRAL, "dist": {"use_torch_fsdp2": (False,)}, "ddp": {"outer_dp_sharding_strategy": ("no_shard",)},
    "optimizer": {
        "optimizer_cpu_offload": (False,), "optimizer_offload_fraction": (0.0, 1.0),
        "overlap_cpu_optimizer_d2h_h2d": (False,),
    },
    "mixed_precision": {"fp8_dot_product_attention": (False,), "fp8_multi_head_attention": (False,)},
}  # fmt: skip
"""Part → field → values that leave everything as it is predicted."""


def list_rules(at: At, has: Callable[[str], bool]) -> list[Naming]:
    """Rules of a config whose dotted names `at` says; `has` is true of a part that the file has as a table."""
    reduces = "--grad-reduce-in-bf16"
    overlaps, has_overlaps = _list_overlaps(at, has("comm_overlap")), has("comm_overlap")
    return [
        *(overlaps if has_overlaps else []), *_list_formats(at),
        same(at("dataset", "seq_length"), "--seq-length"), same(at("dataset", "sequence_length"), "--seq-length"),
        same(at("model", "seq_length"), "--seq-length"),
        same(at("train", "micro_batch_size"), "--micro-batch-size"),
        same(at("train", "global_batch_size"), "--global-batch-size"),
        same(at("train", "rampup_batch_size"), "--rampup-batch-size"),
        _name_vocabulary(at), *list_fields(lambda field: at("model", field), ("cross_entropy_loss_fusion",)),
        flag(at("model", "cross_entropy_loss_fusion"), "--cross-entropy-loss-fusion", default=True),
        flag(at("model", "bf16"), "--bf16"), flag(at("model", "fp16"), "--fp16"),
        _name_either((at("ddp", "use_distributed_optimizer"), at("optimizer", "use_distributed_optimizer")),
                     "--use-distributed-optimizer"),
        _name_either((at("ddp", "use_megatron_fsdp"), at("dist", "use_megatron_fsdp")), "--use-megatron-fsdp"),
        flag(at("ddp", "use_custom_fsdp"), "--use-custom-fsdp"),
        same(at("ddp", "data_parallel_sharding_strategy"), "--data-parallel-sharding-strategy"),
        same(at("ddp", "num_distributed_optimizer_instances"), "--num-distributed-optimizer-instances"),
        flag(at("ddp", "overlap_grad_reduce"), "--overlap-grad-reduce"),
        flag(at("ddp", "overlap_param_gather"), "--overlap-param-gather"),
        opposite(at("ddp", "grad_reduce_in_fp32"), reduces),
        same(at("optimizer", "optimizer"), "--optimizer"),
        *(same(at("optimizer", name), option) for name, option in _OPTIMIZER.items()),
        flag(at("optimizer", "use_precision_aware_optimizer"), "--use-precision-aware-optimizer"),
        *(renamed(f"{at('optimizer', name)}._target_", f"--{name.replace('_', '-')}", _TORCH)
          for name in ("main_grads_dtype", "main_params_dtype", "exp_avg_dtype", "exp_avg_sq_dtype")),
        *([] if has_overlaps else overlaps),
    ]  # fmt: skip


def _list_overlaps(at: At, is_table: bool) -> list[Naming]:
    """comm_overlap: where it is there, what it does not say is its own default, whatever model and ddp say."""
    part = "comm_overlap"
    shares = (at("ddp", "use_distributed_optimizer"), at("optimizer", "use_distributed_optimizer"))
    trigger = at("model", "tensor_model_parallel_size"), at("train", "micro_batch_size"), f"{at(part, '')}._target_"

    def by_default(rule: Naming, default: Callable[[Mapping[str, Any]], bool | None], beside: Sequence[str]) -> Naming:
        own = rule.names[0]

        def to(values: Mapping[str, Any]) -> Options:
            if own in values:
                return rule.to(values)
            if not is_table or (value := default(values)) is None:
                return {}
            note = f"the default of {at(part, '')}"
            said = rule.to({**values, own: value})
            return {option: None if words is None else Assumed(words, note) for option, words in said.items()}

        names = tuple(dict.fromkeys((own, *rule.names[1:], *beside, *trigger)))
        return rule._replace(names=names, to=to, shown=(own,))

    def is_shared(values: Mapping[str, Any]) -> bool | None:
        return True if any(str(values.get(name)).lower() == "true" for name in shares) else None

    overlap = name_overlap(at(part, "overlap_p2p_comm"), lambda name: at("model", name), default=True)
    return [
        by_default(flag(at(part, "tp_comm_overlap"), "--tp-comm-overlap"), lambda values: False, ()),
        by_default(flag(at(part, "overlap_moe_expert_parallel_comm"), "--overlap-moe-expert-parallel-comm"),
                   lambda values: False, ()),
        by_default(overlap, lambda values: True, ()),
        by_default(flag(at(part, "overlap_grad_reduce"), "--overlap-grad-reduce"), is_shared, shares),
        by_default(flag(at(part, "overlap_param_gather"), "--overlap-param-gather"), is_shared, shares),
    ]  # fmt: skip


def _list_formats(at: At) -> list[Naming]:
    """mixed_precision: a table of fields, of which those that are null are none, or the name of such a table."""
    part, reduces = "mixed_precision", "--grad-reduce-in-bf16"
    target = f"{at(part, '')}._target_"

    def or_none(rule: Naming) -> Naming:
        own = rule.names[0]

        def to(values: Mapping[str, Any]) -> Options:
            return rule.to(values) if own in values else dict.fromkeys(rule.options)

        return rule._replace(names=(own, target), to=to, shown=(own,), passes=False)

    recipe = same(at(part, "fp8_recipe"), "--fp8-recipe")
    return [
        or_none(flag(at(part, "bf16"), "--bf16")), or_none(flag(at(part, "fp16"), "--fp16")),
        or_none(same(at(part, "fp8"), "--fp8-format")), recipe, or_none(same(at(part, "fp4"), "--fp4-format")),
        same(at(part, "fp4_recipe"), "--fp4-recipe"), opposite(at(part, "grad_reduce_in_fp32"), reduces),
        choice(at(part, ""), _list_names()),
    ]  # fmt: skip


def _list_names() -> dict[str, Options]:
    """Names of mixed precisions, with underscores or with dashes → options."""
    found: dict[str, Options] = {}
    scalings = {
        "fp8_delayed_scaling": ("hybrid", "delayed"), "fp8_current_scaling": ("hybrid", "tensorwise"),
        "mxfp8": ("e4m3", "mxfp8"), "fp8_subchannel_scaling": ("hybrid", "blockwise"),
    }  # fmt: skip
    for compute in ("bf16", "fp16"):
        plain: dict[str, Sequence[str] | None] = dict.fromkeys(_FORMATS)
        plain |= {f"--{compute}": [], "--grad-reduce-in-bf16": None}
        named: dict[str, Options] = {f"{compute}_mixed": plain}
        for scaling, (kind, recipe) in scalings.items():
            named[f"{compute}_with_{scaling}_mixed"] = {**plain, "--fp8-format": [kind], "--fp8-recipe": [recipe]}
        named[f"{compute}_with_nvfp4_mixed"] = {**plain, "--fp4-format": ["e2m1"], "--fp4-recipe": ["nvfp4"]}
        for name, options in named.items():
            found |= alike((name, name.replace("_", "-")), options)
    return found


def _name_either(names: tuple[str, ...], option: str) -> Naming:
    """Two names of which either has the option there, and which say it together."""

    def to(values: Mapping[str, Any]) -> Options:
        said = [choose_value(name, values[name], (True, False), is_truth=True) for name in names if name in values]
        return {option: [] if any(said) else None}

    def back(options: Options) -> Mapping[str, Any]:
        return dict.fromkeys(names, options[option] is not None)

    return Naming(names, (option,), to, back)


def _name_vocabulary(at: At) -> Naming:
    """Rows of the model's vocabulary, or those of its tokenizer, which are added up to a multiple."""
    own, other, pads = at("model", "vocab_size"), at("tokenizer", "vocab_size"), at("model", "should_pad_vocab")
    padded, size = "--padded-vocab-size", "--vocab-size"

    def to(values: Mapping[str, Any]) -> Options:
        if own not in values:
            return {size: [show_value(values[other])]} if other in values else {}
        is_padded = str(values.get(pads)).lower() == "true"
        return {size if is_padded else padded: [show_value(values[own])]}

    def idle(values: Mapping[str, Any]) -> Mapping[str, str]:
        return {other: f"{own} says it"} if own in values and other in values else {}

    def back(options: Options) -> Mapping[str, Any]:
        words = options.get(padded) or options.get(size)
        return {own: int(words[0]) if words else None}

    return Naming((own, other, pads), (padded, size), to, back, idle=idle, shown=(own, other))
