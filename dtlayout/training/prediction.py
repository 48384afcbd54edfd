"""What is predicted of a run before its first step, by the constants of our own engine. No torch.

Everything follows from the config, the layout and the GPU type, so all ranks come to the same prediction, and to the
same refusal, without a word between them.
"""

import json
from dataclasses import asdict
from typing import Any

from dtlayout.cluster import Cluster, Gpu
from dtlayout.config import Config
from dtlayout.costmodel.engine import OWN_ENGINE, Engine, find_engine_on
from dtlayout.costmodel.estimate import HOPELESS_SHARE, Estimate, estimate
from dtlayout.costmodel.scenario import Scenario
from dtlayout.device import device_of
from dtlayout.errors import InvalidLayout
from dtlayout.kernels import Kernels
from dtlayout.layout import Layout
from dtlayout.planner.explain import Change, explain, largest_component
from dtlayout.training.metrics import Predicted

_GIB = 2**30


def make_scenario(config: Config, gpu: Gpu, num_gpus: int, engine: Engine) -> Scenario:
    """What a config trains, on so many GPUs of a type."""
    per_node = gpu.gpus_per_node if gpu.device_type == "cpu" else config.cluster.ranks_per_node
    cluster = Cluster(gpu=gpu, num_gpus=num_gpus, gpus_per_node=per_node)
    return Scenario(
        model=config.model,
        batch=config.batch,
        cluster=cluster,
        engine=engine,
        precision=config.precision,
        optimizer=config.optimizer,
        document_mask=config.data.document_mask,
    )


def own_scenario(config: Config, num_gpus: int, gpu: Gpu) -> Scenario:
    """What a config trains with this trainer, on so many GPUs of a type."""
    return make_scenario(config, gpu, num_gpus, find_engine_on(OWN_ENGINE, gpu))


def predict(config: Config, layout: Layout, gpu: Gpu | None) -> Estimate | None:
    """The estimate of this trainer with a legal layout on a GPU type; None where no numbers of the GPU are known."""
    return (
        None
        if gpu is None
        else estimate(own_scenario(config, layout.world_size, gpu), layout, predicted_kernels(config, gpu))
    )


def predicted_kernels(config: Config, gpu: Gpu) -> Kernels:
    """A config's kernels on a GPU type as the cost model knows them, without an auto."""
    return config.kernels.resolve(config.precision, device_of(gpu))[0]


def describe_run(config: Config, layout: Layout, kernels: Kernels) -> dict[str, Any]:
    """What the memory of a run depends on, section.key → value as JSON gives it back; `kernels` without auto."""
    sections: dict[str, Any] = {
        "model": config.model, "batch": config.batch, "layout": layout, "kernels": kernels,
        "precision": config.precision,
    }  # fmt: skip
    values = {f"{section}.{key}": entry for section, value in sections.items() for key, entry in asdict(value).items()}
    optimizer = {"optimizer.name": config.optimizer.name, "optimizer.state": config.optimizer.state}
    values |= {"data.document_mask": config.data.document_mask, **optimizer}
    found: dict[str, Any] = json.loads(json.dumps(values))
    return found


def refuse_hopeless(config: Config, layout: Layout, gpu: Gpu | None) -> None:
    """InvalidLayout, with what would work, if a GPU's memory is far too small; `train.force` lets all pass."""
    predicted = predict(config, layout, gpu)
    if predicted is None or gpu is None or gpu.device_type == "cpu" or config.train.force:
        return
    if predicted.peak_bytes <= HOPELESS_SHARE * predicted.capacity_bytes:
        return
    explanation = explain(own_scenario(config, layout.world_size, gpu), layout, predicted_kernels(config, gpu))
    largest = largest_component(predicted.memory[predicted.busiest_rank])
    ways = [_describe_change(change) for change in explanation.changes[:3]]
    if explanation.growth is not None:
        growth = explanation.growth
        ways = [f"{growth.estimate.layout.world_size} GPUs with {_describe_change(growth)}"]
    raise InvalidLayout(
        f"layout {layout} is predicted to need {predicted.peak_bytes / _GIB:.1f} GiB on pipeline rank "
        f"{predicted.busiest_rank} of the {predicted.capacity_bytes / _GIB:.1f} GiB of {gpu.name}, most of it "
        f"{largest}; use {' or '.join(ways) or 'a smaller model or sequence'}, or --train.force=true to try it anyway"
    )


def to_predicted(estimate: Estimate | None, gpu: Gpu | None) -> Predicted | None:
    """The estimate as summary.json holds it; the CPU has no MFU."""
    if estimate is None or gpu is None:
        return None
    return Predicted(
        step_time_s=estimate.step_time_s,
        mfu=estimate.mfu if gpu.has_mfu else None,
        peak_memory_bytes=[round(memory.total) for memory in estimate.memory],
        gpu=gpu.name,
        calibrated=find_engine_on(OWN_ENGINE, gpu).is_calibrated,
    )


def describe(predicted: Estimate | None, gpu: Gpu | None) -> str:
    """The one line that a run starts with."""
    if predicted is None or gpu is None:
        return "predicted: n/a, for the GPU type is not known; name one with cluster.gpu"
    step, rank = f"predicted: step {predicted.step_time_s:.3g} s", predicted.busiest_rank
    engine = find_engine_on(OWN_ENGINE, gpu)
    if not gpu.has_mfu:
        peak = f"{predicted.peak_bytes / 2**20:.1f} MiB"
        state = (
            f"± {engine.error:.0%} (calibrated)" if engine.is_calibrated else "(uncalibrated: an order of magnitude)"
        )
        return f"{step} {state}, peak {peak} on pipeline rank {rank}"
    state = "calibrated" if engine.is_calibrated else "uncalibrated"
    peak, capacity = f"{predicted.peak_bytes / _GIB:.1f} GiB", f"{predicted.capacity_bytes / _GIB:.1f}"
    return (
        f"{step} ± {engine.error:.0%} ({state}), MFU {predicted.mfu:.1%}, peak {peak} on pipeline rank "
        f"{rank} of {capacity}{'' if predicted.fits else ': it may not fit'}"
    )


def _describe_change(change: Change) -> str:
    return f"{' '.join(change.overrides)} ({change.estimate.peak_bytes / _GIB:.1f} GiB)"
