"""dtlayout: which parallel layout trains this Llama fastest on these GPUs, and a trainer that runs it.

Public names load on first use, so that `import dtlayout` and its values need no torch. Last come the modules that the
environment variable DTLAYOUT_PLUGINS names, which register what is not shipped (docs/project/adding.md).
"""

import os
from importlib import import_module
from typing import Any

from dtlayout.base.version import VERSION

__version__ = VERSION

# Torch 2.15 asks for it when it is imported: its new "nccl" puts all messages of a pipeline rank on one stream.
os.environ.setdefault("TORCH_DIST_USE_NCCL2", "0")

_PUBLIC = {
    "api.pieces": ["pipeline", "train_step"], "ops.adapters": ["add_adapters"], "spec.adapter": ["Adapter"],
    "api.answers": ["DryRunRanks", "ExplainedLayout", "PredictedLayout", "RecommendedLayouts"],
    "api.questions": ["dry_run", "explain", "predict", "recommend"],
    "spec.batch": ["Batch"], "spec.kernels": ["Kernels"], "spec.layout": ["Layout"],
    "spec.model_shape": ["ModelShape"], "spec.precision": ["Precision"], "spec.recompute": ["Recompute"],
    "spec.optimizers": ["Optimizer", "RoleOptimizer", "register_optimizer"], "models.presets": ["find_preset"],
    "models.families": ["Family", "register_family"], "config.loading": ["load_config"],
    "spec.kernel_records": [
        "AttentionKernel", "ExpertsKernel", "LossKernel", "NormKernel", "RopeKernel", "SwigluKernel",
    ],
    "spec.kernel_table": ["register_kernel"],
    "schedules.actions": ["Action", "Kind"], "spec.cluster": ["register_gpu"],
    "costmodel.engine": ["register_engine"], "plans.plan": ["Plan", "make_plan"],
    "pipelining.schedule": ["make_schedule"], "schedules.schedules": ["PipelineSchedule", "register_schedule"],
    "schedules.schedule_file": ["write_schedule"], "pipelining.partition": ["layer_costs", "partition"],
    "models.llama": ["Llama"], "mesh.build": ["build_mesh"], "plans.apply": ["apply_plan"],
    "plans.context": ["apply_context"], "ops.attention": ["causal_attention"], "mesh.axes": ["own_positions"],
    "base.errors": ["DtlayoutError", "InvalidConfig", "InvalidLayout"],
    "plans.fsdp": ["share_context"], "plans.init": ["initialize"],
    "pipelining.stage": ["Boundary", "build_stage", "stage_boundary"], "pipelining.runtime": ["build_runtime"],
    "spec.trackers": ["Tracker", "register_tracker"], "training.step": ["TrainStep"],
    "training.observer": ["Observer", "register_observer"], "tracing.trace": ["describe_module"],
}  # fmt: skip
"""Module → what it makes public."""
_HOMES = {name: f"dtlayout.{module}" for module, names in _PUBLIC.items() for name in names}

__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'dtlayout' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return __all__


for _plugin in filter(None, map(str.strip, os.environ.get("DTLAYOUT_PLUGINS", "").split(","))):
    try:
        import_module(_plugin)
    except ImportError as error:
        advice = "install it, put its folder into PYTHONPATH, or unset the variable"
        raise ImportError(f"DTLAYOUT_PLUGINS names {_plugin!r}: {error}; {advice}") from error
