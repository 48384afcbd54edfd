"""dtlayout: which parallel layout trains this Llama fastest on these GPUs, and a trainer that runs it.

Public names load on first use, so that `import dtlayout` and its values need no torch. Last come the modules that the
environment variable DTLAYOUT_PLUGINS names, which register what is not shipped (docs/adding.md).
"""

import os
from importlib import import_module
from typing import Any

_HOMES = {
    "Batch": "dtlayout.batch",
    "Kernels": "dtlayout.kernels",
    "Layout": "dtlayout.layout",
    "ModelShape": "dtlayout.model_shape",
    "Precision": "dtlayout.precision",
    "Recompute": "dtlayout.recompute",
    "Optimizer": "dtlayout.optimizers",
    "register_optimizer": "dtlayout.optimizers",
    "find_preset": "dtlayout.models.presets",
    "load_config": "dtlayout.config",
    "Family": "dtlayout.models.families",
    "register_family": "dtlayout.models.families",
    "register_kernel": "dtlayout.kernel",
    "register_gpu": "dtlayout.cluster",
    "register_engine": "dtlayout.costmodel.engine",
    "Plan": "dtlayout.plans.plan",
    "make_plan": "dtlayout.plans.plan",
    "make_schedule": "dtlayout.pipelining.schedule",
    "PipelineSchedule": "dtlayout.pipelining.schedules",
    "register_schedule": "dtlayout.pipelining.schedules",
    "layer_costs": "dtlayout.pipelining.partition",
    "partition": "dtlayout.pipelining.partition",
    "Llama": "dtlayout.models.llama",
    "build_mesh": "dtlayout.mesh.build",
    "apply_plan": "dtlayout.plans.apply",
    "initialize": "dtlayout.plans.init",
    "Boundary": "dtlayout.pipelining.stage",
    "build_stage": "dtlayout.pipelining.stage",
    "stage_boundary": "dtlayout.pipelining.stage",
    "build_runtime": "dtlayout.pipelining.runtime",
    "TrainStep": "dtlayout.training.step",
}

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
