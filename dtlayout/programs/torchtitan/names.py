"""Names of torchtitan: configs that a command of 0.3 names, options that other releases call otherwise, and options
that change no prediction."""

import re
from collections.abc import Mapping
from typing import Any

_COLUMNS = ("model.name", "model.flavor", "optimizer.lr", "training.local_batch_size", "training.seq_len",
            "activation_checkpoint.mode")  # fmt: skip
_CONFIGS: Mapping[str, tuple[Any, ...]] = {
    "llama3_debugmodel": ("llama3", "debugmodel", 8e-4, 8, 2048, "selective"),
    "llama3_8b": ("llama3", "8B", 3e-4, 1, 8192, "selective"),
    "llama3_70b": ("llama3", "70B", 1.5e-4, 8, 8192, "full"),
    "llama3_405b": ("llama3", "405B", 8e-5, 2, 8192, "full"),
    "sft_debugmodel": ("llama3", "debugmodel", 8e-4, 8, 2048, "selective"),
    "qwen3_debugmodel": ("qwen3", "debugmodel", 8e-4, 8, 2048, "selective"),
    "qwen3_0_6b": ("qwen3", "0.6B", 3e-4, 4, 4096, "selective"),
    "qwen3_1_7b": ("qwen3", "1.7B", 8e-4, 4, 4096, "selective"),
    "qwen3_14b": ("qwen3", "14B", 8e-4, 4, 4096, "full"),
    "qwen3_32b": ("qwen3", "32B", 8e-4, 2, 4096, "full"),
    "qwen3_30b_a3b": ("qwen3", "30B-A3B", 8e-4, 2, 4096, "full"),
    "qwen3_moe_debug": ("qwen3", "debugmodel_moe", 3e-4, 4, 4096, "selective"),
    "qwen3_moe_deepep": ("qwen3", "debugmodel_moe", 3e-4, 2, 512, "selective"),
    "sft_qwen3_8b_math": ("qwen3", "8B", 2e-5, 1, 2048, "selective"),
    "deepseek_v3_debugmodel": ("deepseek_v3", "debugmodel", 8e-4, 8, 2048, "selective"),
    "deepseek_v3_16b": ("deepseek_v3", "16B", 2.2e-4, 4, 4096, "selective"),
    "deepseek_v3_671b": ("deepseek_v3", "671B", 2.2e-4, 4, 4096, "selective"),
    "gpt_oss_debugmodel": ("gpt_oss", "debugmodel", 8e-4, 8, 2048, "none"),
    "gpt_oss_20b": ("gpt_oss", "20b", 8e-4, 1, 8192, "full"),
    "gpt_oss_120b": ("gpt_oss", "120b", 8e-4, 1, 8192, "full"),
}
"""Config of 0.3 → its values of _COLUMNS."""
_SAME = {
    "llama3_debugmodel_varlen_attn": "llama3_debugmodel", "llama3_debugmodel_dist_gemm": "llama3_debugmodel",
    "llama3_debugmodel_ce_loss": "llama3_debugmodel", "llama3_debugmodel_float8": "llama3_debugmodel",
    "llama3_8b_mxfp8": "llama3_8b", "qwen3_debugmodel_flex_flash": "qwen3_debugmodel",
    "qwen3_debugmodel_non_fused_qkv": "qwen3_debugmodel",
}  # fmt: skip
"""Config → another one with the same values of _COLUMNS."""
_INTERLEAVED = {"parallelism.pipeline_parallel_schedule": "Interleaved1F1B"}
_LOSS = {"compile.enable": True, "compile.components": ["loss"]}
_NO_GRAPHS = {"training.disable_cuda_graphs": True}
_FP8 = {"model.converters": ["quantize.linear.float8"], "quantize.linear.float8.recipe_name": "rowwise"}
_MORE: Mapping[str, Mapping[str, Any]] = {
    "llama3_debugmodel": _INTERLEAVED, "llama3_debugmodel_varlen_attn": _INTERLEAVED | _NO_GRAPHS,
    "llama3_debugmodel_dist_gemm": _INTERLEAVED, "llama3_debugmodel_ce_loss": _INTERLEAVED,
    "llama3_debugmodel_float8": _INTERLEAVED | _FP8,
    "llama3_8b_mxfp8": {
        "compile.enable": True, "compile.components": ["model"], "model.converters": ["quantize.linear.mx"],
        "quantize.linear.mx.filter_fqns": [],
    },
    "llama3_70b": {"parallelism.tensor_parallel_degree": 8},
    "llama3_405b": {
        "parallelism.tensor_parallel_degree": 8, "parallelism.enable_async_tensor_parallel": True,
        "compile.enable": True, **_FP8, "quantize.linear.float8.filter_fqns": ["output"],
    },
    "qwen3_moe_deepep": {
        "parallelism.expert_parallel_degree": 4, "parallelism.expert_parallel_comm_backend": "deepep", **_NO_GRAPHS,
    },
    "deepseek_v3_16b": {"parallelism.expert_parallel_degree": 8, **_NO_GRAPHS, **_INTERLEAVED, **_LOSS},
    "deepseek_v3_671b": {"parallelism.expert_parallel_degree": 2, **_NO_GRAPHS, **_INTERLEAVED, **_LOSS},
}  # fmt: skip
"""Config of 0.3 → what else it says, by the names of 0.2.2."""
NAMED: Mapping[str, Mapping[str, Any]] = {
    name: dict(zip(_COLUMNS, _CONFIGS[_SAME.get(name, name)], strict=True), **_MORE.get(name, {}))
    for name in (*_CONFIGS, *_SAME)
}
"""Config that a command of 0.3 names → what it says, by the names of 0.2.2."""
_EARLIEST = (
    (r"training\.data_parallel_degree", "parallelism.data_parallel_shard_degree"),
    (r"training\.enable_(float8|fp8)_linear", "quantize.linear.float8.enable_float8_linear"),
    (r"(training|experimental)\.((data|tensor|context|pipeline|expert)_parallel_.*|fsdp_reshard_after_forward"
     r"|enable_async_tensor_parallel|enable_compiled_autograd|enable_loss_parallel)", r"parallelism.\2"),
)  # fmt: skip
"""Pattern of names that only releases before 0.1 have → the name in 0.2.2."""
_EARLIER = (
    (r"training\.compile", "compile.enable"),
    (r"training\.batch_size", "training.local_batch_size"),
    (r"(float8|mx)\.(.*)", r"quantize.linear.\1.\2"),
    (r"quantize\.dense\.(.*)", r"quantize.linear.\1"),
    (r"quantize\.moe\.(.*)", r"quantize.grouped_mm.\1"),
    (r"activation_checkpoint\.selective_ac_type", "activation_checkpoint.selective_ac_option"),
)  # fmt: skip
"""Pattern of names that only releases before 0.2 have → the name in 0.2.2."""
_LATER = (
    (r"compile\.enable_async_tensor_parallel", "parallelism.enable_async_tensor_parallel"),
    (r"parallelism\.pipeline_parallel_module_fqns_per_model_part", "parallelism.module_fqns_per_model_part"),
    (r"optimizer\.param_groups\.0\.(?:optimizer_kwargs\.|optimizer_)?(.*)", r"optimizer.\1"),
)
"""Pattern of names of 0.3 → the name in 0.2.2."""
IGNORED: Mapping[str, str] = {
    "what a run is called, and where it writes": r"job\..*|dump_folder",
    "the program's own code": r"experimental\.custom_.*|memory_estimation\..*",
    "data and tokens": r"training\.(dataset.*|steps|deterministic|seed|gc_.*|dataloader\..*|data_parallel_type)"
    r"|dataloader\..*|model\.(hf_assets_path|tokenizer_.*|print_after_conversion)|hf_assets_path|tokenizer\..*",
    "logs and evaluation": r"(profiling|profiler|metrics|validation|validator)\..*",
    "chance and checks": r"debug\..*",
    "checkpoints": r"checkpoint\..*",
    "the course of the learning rate": r"lr_scheduler\..*|training\.warmup_steps",
    "how ranks meet": r"comm\..*|parallelism\.data_parallel_type",
    "weights that decay": r"optimizer\.pattern",
    "the casts of fp8": r"quantize\.linear\.(float8|mx)\.(precompute.*|force_recompute.*|mxfp8_.*|use_fp8_dim1_.*)",
    "the compiler": r"compile\.(backend|model_backend_override)",
}
"""Subject of options that change no prediction here → a pattern of their names."""
OTHERWISE = (
    r"activation_checkpoint\.(per_op_.*|force_recompute_.*|early_stop|preserve_rng_state|determinism_check"
    r"|visualize_.*|debug)|quantize\.grouped_mm\..*|model\.(norm_type|.*attn.*)|training\.disable_cuda_graphs"
    r"|parallelism\.(.*loss_parallel|enable_compiled_autograd|context_parallel_(load_balancer|ptrr_mask_key)"
    r"|pipeline_parallel_expert_parallel_overlap|spmd_backend|full_dtensor|enable_fsdp_symm_mem)|override\..*|loss\..*"
    r"|fault_tolerance\..*|optimizer\.implementation"
)
"""Pattern of options that change a little of time or memory, which is predicted as if they were not there."""
PREDICTED: Mapping[str, Any] = {
    "optimizer.early_step_in_backward": False, "optimizer.implementation": "fused",
    "quantize.linear.float8.emulate": False, "parallelism.enable_sequence_parallel": True,
    "parallelism.disable_loss_parallel": False, "parallelism.enable_loss_parallel": True,
    "parallelism.enable_compiled_autograd": False, "parallelism.context_parallel_load_balancer": "headtail",
    "training.disable_cuda_graphs": True, "fault_tolerance.enable": False, "debug.moe_force_load_balance": True,
}  # fmt: skip
"""Option → its value that is predicted."""


def to_newest(name: str) -> tuple[str, str]:
    """The name in 0.2.2 of an option, and the release that has it by its own: 0.0, 0.1 or 0.3; nothing for 0.2.2.

    >>> to_newest("training.batch_size")
    ('training.local_batch_size', '0.1')
    """
    for release, patterns in (("0.0", _EARLIEST), ("0.1", _EARLIER), ("0.3", _LATER)):
        for pattern, newest in patterns:
            if match := re.fullmatch(pattern, name):
                return match.expand(newest), release
    return name, ""
