"""dtlayout explain: a layout's memory and time by component, what binds it, and what would make it fit or faster."""

import argparse
from dataclasses import asdict, replace

from dtlayout.commands.arguments import add_config, choose_gpu, show
from dtlayout.config import Config, check_layout, load_config
from dtlayout.costmodel.engine import OWN_ENGINE, find_engine_on
from dtlayout.costmodel.estimate import Estimate
from dtlayout.costmodel.scenario import Scenario, engine_kernels, find_lacks
from dtlayout.errors import InvalidLayout
from dtlayout.layout import Layout
from dtlayout.planner.explain import Change, Explanation, explain
from dtlayout.planner.intervals import find_intervals
from dtlayout.planner.prediction import own_scenario, predicted_kernels
from dtlayout.text import GIB, align, choose_unit, plural

EXAMPLE = "dtlayout explain configs/debug.toml --gpu cpu --gpus 8"

_BAR_WIDTH = 60


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The config, the GPUs and the engine."""
    add_config(parser)
    parser.add_argument("--gpu", metavar="NAME", help="GPU type; that of [cluster] by default")
    parser.add_argument(
        "--gpus", "--world", type=int, dest="world", metavar="N", help="the fewest that the layout needs by default"
    )
    parser.add_argument("--engine", default=OWN_ENGINE, metavar="NAME", help="training program; %(default)s by default")


def run(options: argparse.Namespace) -> int:
    """Print the explanation of a legal layout, or refuse it."""
    config = load_config(options.config, options.overrides)
    gpu = choose_gpu(config, options.gpu)
    engine = find_engine_on(options.engine, gpu)
    world_size = config.layout.smallest_world_size if options.world is None else options.world
    scenario = replace(own_scenario(config, world_size, gpu), engine=engine)
    layout = _check(config, scenario)
    is_own = engine.name == OWN_ENGINE
    kernels = predicted_kernels(config, layout, gpu) if is_own else engine_kernels(scenario, config.kernels, layout)
    explanation = explain(scenario, layout, kernels)
    return show(options, _to_document(scenario, explanation), _describe(scenario, explanation))


def _check(config: Config, scenario: Scenario) -> Layout:
    """The layout on so many ranks; what only our trainer lacks is no problem of another engine."""
    if scenario.engine.name == OWN_ENGINE:
        return check_layout(config, scenario.cluster.num_gpus, scenario.device)
    layout = config.layout.resolve(scenario.cluster.num_gpus)
    layout.check(config.model, config.batch)
    if problems := find_lacks(scenario, layout):
        raise InvalidLayout(problems)
    return layout


def _describe(scenario: Scenario, explanation: Explanation) -> list[str]:
    now, limit = explanation.estimate, explanation.limit
    gpu, engine = scenario.cluster.gpu, scenario.engine
    peak, capacity = now.peak_bytes / GIB, now.capacity_bytes / GIB
    state = "calibrated" if engine.is_calibrated else "uncalibrated"
    where = f"pipeline rank {now.busiest_rank}"
    if limit.kind == "memory":
        bound = f"memory: {limit.component}, {limit.share:.1%} of the peak on {where}"
    elif limit.component == "host":
        bound = f"host: the GPUs wait for it, {limit.share:.1%} of the step"
    else:
        bound = f"{limit.component}: {limit.share:.1%} of the step"
    mfu = f"{now.mfu:.1%}" if gpu.has_mfu else "n/a"
    of_step, of_peak = find_intervals(scenario)
    least_s, most_s = of_step.around(now.step_time_s)
    least, most = (bound / GIB for bound in of_peak.around(now.peak_bytes))
    facts = [
        ("layout", f"{now.layout} on {now.layout.world_size} x {gpu.name}"),
        ("engine", f"{engine.name}, {state}"),
        ("fits", f"{'yes' if now.fits else 'no'}: {peak:.2f} of {capacity:.2f} GiB on {where}"),
        ("step", f"{now.step_time_s:.3f} s, MFU {mfu}{'' if now.fits else ', if it did fit'}"),
        ("bound by", bound),
        ("ranges", f"step {least_s:.3f} to {most_s:.3f} s, for {of_step.basis}"),
        ("", f"peak {least:.2f} to {most:.2f} GiB, for {of_peak.basis}"),
    ]
    memory, time, changes = _format_memory(now), _format_time(now), _format_changes(explanation)
    return [*align(facts, ("<12", "<")), "", *memory, "", *time, "", *changes]


def _format_memory(estimate: Estimate) -> list[str]:
    names = list(estimate.memory[0].as_dict())
    unit, size = choose_unit(estimate.peak_bytes)
    header = ["memory, " + unit, *names, "total"]
    rows = [
        [f"rank {rank}", *(f"{value / size:.2f}" for value in (*memory.as_dict().values(), memory.total))]
        for rank, memory in enumerate(estimate.memory)
    ]
    fullest = estimate.busiest_rank
    return [*align([header, *rows]), "", f"rank {fullest}  {_draw_bar(estimate)}"]


def _draw_bar(estimate: Estimate) -> str:
    """The fullest rank's components, by their first letters, against the capacity, where `|` stands."""
    memory = estimate.memory[estimate.busiest_rank]
    scale = _BAR_WIDTH / max(memory.total, estimate.capacity_bytes)
    bar, end_bytes = "", 0.0
    for name, size in memory.as_dict().items():
        end_bytes += size
        bar += name[0] * (round(end_bytes * scale) - len(bar))
    end = round(estimate.capacity_bytes * scale)
    bar = bar.ljust(end, ".")
    share = memory.total / estimate.capacity_bytes
    return f"{bar[:end]}|{bar[end:]} {share:.0%} of {estimate.capacity_bytes / GIB:.2f} GiB"


def _format_time(estimate: Estimate) -> list[str]:
    parts = {**estimate.time.as_dict(), "total": estimate.step_time_s}
    rows = [[name, f"{seconds:.4f}", f"{seconds / estimate.step_time_s:.1%}"] for name, seconds in parts.items()]
    return align([["step", "seconds", "share"], *rows])


def _format_changes(explanation: Explanation) -> list[str]:
    now, growth = explanation.estimate, explanation.growth
    if explanation.changes:
        return align([["change", "step, s", "faster", "peak, GiB"], *(_row(c, now) for c in explanation.changes)])
    if now.fits:
        return ["no single change is predicted to be faster"]
    component = explanation.limit.component
    size = now.memory[now.busiest_rank].as_dict()[component] / GIB
    lines = [f"no single change fits; the largest component is {component}, {size:.1f} GiB"]
    if growth is None:
        return [*lines, "no number of GPUs that was tried fits either; take a smaller micro-batch, sequence or model"]
    text = f"{plural(growth.estimate.layout.world_size, 'GPU')} would do, as {growth.estimate.layout}:"
    return [*lines, text, *align([["change", "step, s", "faster", "peak, GiB"], _row(growth, now)])]


def _row(change: Change, now: Estimate) -> list[str]:
    after = change.estimate
    faster, peak = f"{(now.step_time_s - after.step_time_s) / now.step_time_s:+.1%}", f"{after.peak_bytes / GIB:.2f}"
    return [" ".join(change.overrides), f"{after.step_time_s:.3f}", faster, peak]


def _to_document(scenario: Scenario, explanation: Explanation) -> dict[str, object]:
    now, gpu, growth = explanation.estimate, scenario.cluster.gpu, explanation.growth
    intervals = find_intervals(scenario)

    def list_numbers(estimate: Estimate) -> dict[str, object]:
        return {
            "gpus": estimate.layout.world_size, "layout": asdict(estimate.layout), "kernels": asdict(estimate.kernels),
            "fits": estimate.fits, "step_time_s": estimate.step_time_s, "mfu": estimate.mfu if gpu.has_mfu else None,
            "peak_memory_bytes": estimate.peak_bytes,
        }  # fmt: skip

    def describe(change: Change) -> dict[str, object]:
        after, what = change.estimate, {"knob": change.knob, "overrides": list(change.overrides)}
        saved = {"saved_s": now.step_time_s - after.step_time_s, "saved_bytes": now.peak_bytes - after.peak_bytes}
        return {**what, **list_numbers(after), **saved}

    return {
        "ok": True, "gpu": gpu.name, "engine": scenario.engine.name, "calibrated": scenario.engine.is_calibrated,
        **list_numbers(now),
        "step_time_range_s": intervals.step_time.around(now.step_time_s),
        "peak_memory_range_bytes": intervals.peak_memory.around(now.peak_bytes),
        "intervals": intervals.to_dict(),
        "memory_bytes": [{**memory.as_dict(), "total": memory.total} for memory in now.memory],
        "capacity_bytes": now.capacity_bytes, "time_s": now.time.as_dict(), "limit": asdict(explanation.limit),
        "changes": [describe(change) for change in explanation.changes],
        "growth": None if growth is None else describe(growth),
    }  # fmt: skip
