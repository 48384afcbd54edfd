"""Prediction: step time and memory of a config before its first step, by the constants of our own engine.

A prediction follows from the config, the layout and the GPU type. So all ranks come to the same prediction, and to the
same refusal, without communication.
"""

from dtlayout.base.errors import InvalidLayout
from dtlayout.base.formatting import GIB, choose_unit, format_bytes, plural, three_digits
from dtlayout.base.mapped_file import find_free_bytes
from dtlayout.config.config import Config
from dtlayout.costmodel.engine import OWN_ENGINE, find_engine_on
from dtlayout.costmodel.estimate import HOPELESS_SHARE, Estimate, Estimator, estimate
from dtlayout.costmodel.scenario import NO_TIME, Scenario, fullest_share
from dtlayout.planner.explain import Change, explain
from dtlayout.records.intervals import find_intervals
from dtlayout.records.run import Predicted
from dtlayout.spec.cluster import Cluster, Gpu, is_slice, why_unknown
from dtlayout.spec.device import device_of
from dtlayout.spec.kernels import Kernels
from dtlayout.spec.layout import Layout
from dtlayout.spec.optimizers import STATE_FORMAT


def own_scenario(config: Config, num_gpus: int, gpu: Gpu) -> Scenario:
    """The scenario of training a config with this trainer, on `num_gpus` GPUs of a type."""
    per_node = gpu.gpus_per_node if gpu.device_type == "cpu" else config.cluster.ranks_per_node
    cluster = Cluster(gpu=gpu, num_gpus=num_gpus, gpus_per_node=per_node)
    return Scenario(
        model=config.model, batch=config.batch, cluster=cluster, engine=find_engine_on(OWN_ENGINE, gpu),
        precision=config.precision, optimizer=config.optimizer, document_mask=config.data.document_mask,
    )  # fmt: skip


def predict(config: Config, layout: Layout, gpu: Gpu | None) -> Estimate | None:
    """The estimate of this trainer with a legal layout on a GPU type; None if the GPU is not known."""
    if gpu is None:
        return None
    return estimate(own_scenario(config, layout.world_size, gpu), layout, predicted_kernels(config, layout, gpu))


def predicted_kernels(config: Config, layout: Layout, gpu: Gpu) -> Kernels:
    """Kernels that this trainer chooses for a layout, as far as the GPU type tells."""
    return config.choose_kernels(device_of(gpu), layout).kernels


def refuse_hopeless(config: Config, layout: Layout, gpu: Gpu | None) -> None:
    """InvalidLayout, with layouts that would work, if a GPU's or its host's memory is far too small.

    Nothing is refused with `train.force`, on a CPU, or on a GPU that is not known.
    """
    predicted = predict(config, layout, gpu)
    if predicted is None or gpu is None or gpu.device_type == "cpu" or config.train.force:
        return
    if not predicted.fits_host:
        raise InvalidLayout(
            f"layout {layout} is predicted to need {max(predicted.host_bytes) / GIB:.1f} GiB of the host's memory for "
            f"each GPU, of {predicted.host_capacity_bytes / GIB:.1f} GiB that {gpu.name} has there; use "
            f"layout.offload=none, more GPUs, or --train.force=true to try it anyway"
        )
    if predicted.peak_bytes <= HOPELESS_SHARE * predicted.capacity_bytes:
        return
    explanation = explain(own_scenario(config, layout.world_size, gpu), layout, predicted_kernels(config, layout, gpu))
    ways = [_describe_change(change) for change in explanation.changes[:3]]
    if growth := explanation.growth:
        ways = [f"{plural(growth.estimate.layout.world_size, 'GPU')} with {_describe_change(growth)}"]
    raise InvalidLayout(
        f"layout {layout} is predicted to need {predicted.peak_bytes / GIB:.1f} GiB on pipeline rank "
        f"{predicted.busiest_rank} of the {predicted.capacity_bytes / GIB:.1f} GiB of {gpu.name}, most of it "
        f"{explanation.limit.component}; use {' or '.join(ways) or 'a smaller model or sequence'}, "
        f"or --train.force=true to try it anyway"
    )


def refuse_beyond_host(config: Config, layout: Layout, gpu: Gpu | None, num_ranks: int, host_bytes: int) -> None:
    """InvalidLayout if `num_ranks` ranks of one host need more than its memory; `train.force` lets all pass.

    A rank needs what its layout keeps there, and the copy of its state from which checkpoints are written; on a CPU
    also what a GPU would have in its own memory.
    """
    predicted = predict(config, layout, gpu)
    if predicted is None or gpu is None or config.train.force:
        return
    needed_bytes, ways = max(predicted.host_bytes, default=0.0), ["more hosts"]
    if gpu.device_type == "cpu":
        needed_bytes, ways = needed_bytes + predicted.peak_bytes, ["a smaller model or batch or more hosts"]
    if config.checkpoint.is_in_background:
        copies = Estimator(own_scenario(config, layout.world_size, gpu)).copied_state_bytes(layout)
        needed_bytes, ways = needed_bytes + max(copies), [*ways, "--checkpoint.background=false"]
    if num_ranks * needed_bytes <= host_bytes:
        return
    raise InvalidLayout(
        f"layout {layout} is predicted to need {needed_bytes / GIB:,.1f} GiB of its host's memory for a rank, "
        f"{num_ranks} of which share the {host_bytes / GIB:,.1f} GiB of this host; use {' or '.join(ways)}, or "
        f"--train.force=true to try it anyway"
    )


def refuse_full_disk(config: Config, layout: Layout, gpu: Gpu | None, num_ranks: int) -> None:
    """InvalidLayout if `num_ranks` ranks of this host need more than its disk has free in `layout.offload_folder`;
    `train.force` lets all pass. InvalidConfig if there is no such folder."""
    if not layout.has_state_on_disk:
        return
    folder = layout.offload_folder
    free_bytes = find_free_bytes(folder, "layout.offload_folder")
    predicted = predict(config, layout, gpu)
    if predicted is None or config.train.force:
        return
    needed_bytes = num_ranks * round(max(predicted.disk_bytes))
    if needed_bytes <= free_bytes:
        return
    raise InvalidLayout(
        f"layout {layout} is predicted to need {needed_bytes / GIB:,.1f} GiB on disk for {plural(num_ranks, 'rank')}, "
        f"and layout.offload_folder={folder} has {free_bytes / GIB:,.1f} GiB free: {needed_bytes - free_bytes} bytes "
        f"are missing; free them, name a folder on a larger disk, or use --train.force=true to try it anyway"
    )


def to_predicted(estimate: Estimate | None, scenario: Scenario) -> Predicted | None:
    """The estimate as a run's record holds it, with the expected ranges; None if there is no estimate.

    On a CPU the MFU is None. On a CPU that is not calibrated, all that is made of seconds is None too.
    """
    if estimate is None:
        return None
    is_timed = scenario.knows_time
    intervals = find_intervals(scenario)
    return Predicted(
        step_time_s=estimate.step_time_s if is_timed else None,
        tokens_per_s=scenario.batch.num_tokens / estimate.step_time_s if is_timed else None,
        mfu=None if scenario.is_on_host else estimate.mfu,
        peak_memory_bytes=tuple(round(memory.total) for memory in estimate.memory),
        peak_reserved_bytes=Estimator(scenario).peak_reserved_bytes(estimate.layout, estimate.kernels),
        time=estimate.time if is_timed else None,
        memory=tuple(estimate.memory),
        expert_imbalance=fullest_share(scenario, estimate.layout) if scenario.model.experts else None,
        calibrated=scenario.engine.is_calibrated,
        step_time_interval=intervals.step_time if is_timed else None,
        peak_memory_interval=intervals.peak_memory,
    )


def describe(predicted: Estimate | None, scenario: Scenario) -> str:
    """The line that a run starts with: predicted step time, speed and peak, or why there is no prediction."""
    if predicted is None:
        name = scenario.cluster.gpu.name
        advice = "give it a peak_bf16 in a cluster file" if is_slice(name) else "name its type with cluster.gpu"
        return f"predicted: n/a, for {why_unknown(name)}; {advice}"
    calibrated = "calibrated" if scenario.engine.is_calibrated else "uncalibrated"
    of_step, _ = find_intervals(scenario)
    low, high = of_step.around(predicted.step_time_s)
    step = f"step {predicted.step_time_s:.3g} s ({low:.3g} to {high:.3g}, {calibrated}: {of_step.basis})"
    peak = describe_peak(predicted, scenario)
    if not scenario.is_on_host:
        speed = scenario.batch.tokens_per_s_per_gpu(predicted.step_time_s, predicted.layout.world_size)
        fast = f"MFU {predicted.mfu:.1%}, {three_digits(speed)} tokens/s/GPU"
        return f"predicted: {step}, {fast}, {peak}"
    if not scenario.knows_time:
        return f"predicted: {peak} ({NO_TIME})"
    return f"predicted: {step}, {peak}"


def describe_peak(predicted: Estimate, scenario: Scenario) -> str:
    """The fullest rank's peak as text; on GPUs with its range, the capacity, and whether it may not fit."""
    unit, size = choose_unit(predicted.peak_bytes)
    peak, where = predicted.peak_bytes / size, f"on pipeline rank {predicted.busiest_rank}"
    if scenario.is_on_host:  # ranks share the host's memory, and its allocator adds nothing
        return f"peak {peak:.1f} {unit} {where}"
    low, high = find_intervals(scenario).peak_memory.around(peak)
    capacity, surely = format_bytes(predicted.capacity_bytes, 1), low * size > predicted.capacity_bytes
    fits = "" if predicted.fits else f": it {'does' if surely else 'may'} not fit"
    return f"peak {peak:.1f} {unit} ({low:.1f} to {high:.1f}) {where} of {capacity}{fits}"


def _describe_change(change: Change) -> str:
    numbers = ", which changes the numbers" * (change.knob == STATE_FORMAT)
    return f"{' '.join(change.overrides)} ({change.estimate.peak_bytes / GIB:.1f} GiB{numbers})"
