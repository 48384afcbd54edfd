"""dtlayout dryrun: build and step the trainer as some ranks of a cluster that is not there, and show what they held."""

import argparse
import json
import re
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict

from dtlayout.cluster import Gpu
from dtlayout.commands.arguments import add_config, choose_gpu
from dtlayout.commands.text import align
from dtlayout.config import Config, check_layout, load_config
from dtlayout.costmodel.estimate import Estimate
from dtlayout.costmodel.memory import MemoryEstimate
from dtlayout.dryrun.choose import choose_kernels, default_ranks
from dtlayout.dryrun.ranks import dry_run_ranks
from dtlayout.dryrun.report import RankReport
from dtlayout.errors import InvalidConfig
from dtlayout.kernels import Kernels
from dtlayout.layout import Layout
from dtlayout.mesh.axes import axis_sizes
from dtlayout.training.prediction import predict

EXAMPLE = "dtlayout dryrun configs/debug.toml --world 4 --gpu cpu --layout.tp=2 --compare"

MARK_ABOVE = 0.05
"""Difference between prediction and dry run from which on it is marked."""
_GIB = 2**30
_MIB = 2**20
_PARTS = {
    "parameter": "parameters", "gradient": "gradients", "optimizer": "optimizer", "activation": "activations",
    "gathered": "gathered", "communication": "messages", "other": "temporary",
}  # fmt: skip
"""Categories of the tracker → what they are called here."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The config, the world and the ranks."""
    add_config(parser)
    parser.add_argument("--world", type=int, metavar="N", help="ranks; the fewest that the layout needs by default")
    parser.add_argument("--gpu", metavar="NAME", help="GPU type; that of [cluster] by default")
    parser.add_argument(
        "--ranks", metavar="R,R,…", help="all, or some; the first, the last and the predicted busiest by default"
    )
    parser.add_argument("--steps", type=int, default=0, metavar="N", help="the first N steps instead of a later one")
    parser.add_argument("--whole", action="store_true", help="run all microbatches, also those that repeat others")
    parser.add_argument("--compare", action="store_true", help="show the predicted memory beside")


def run(options: argparse.Namespace) -> int:
    """Print what the ranks held, sent and computed."""
    if options.steps < 0:
        raise InvalidConfig(f"--steps={options.steps} must not be negative")
    config = load_config(options.config, options.overrides)
    gpu = choose_gpu(config, options.gpu)
    layout = check_layout(config, config.layout.smallest_world_size if options.world is None else options.world)
    kernels, notes = choose_kernels(config, layout, gpu)
    estimate = predict(config, layout, gpu)
    assert estimate is not None, "the GPU type is known"
    ranks = _choose_ranks(options.ranks, layout, estimate)
    reports = dict(sorted((report.rank, report) for report in _watch(config, layout, kernels, gpu, ranks, options)))
    if options.json:
        print(json.dumps(_to_document(layout, gpu, notes, reports, estimate), indent=2, ensure_ascii=False))
        return 0
    print(f"layout  {layout} on {layout.world_size} x {gpu.name}, dry")
    for note in notes:
        print(f"note: {note}")
    for report in reports.values():
        print("\n".join(["", *_describe(report, layout)]))
        if options.compare:
            print("\n".join(["", *align(list(_compare(report, estimate.memory[report.coordinate["pp"]])))]))
    return 0


def _choose_ranks(text: str | None, layout: Layout, estimate: Estimate) -> list[int]:
    world = layout.world_size
    if text is None:
        return default_ranks(layout, estimate)
    if text == "all":
        return list(range(world))
    try:
        ranks = sorted({int(part) for part in text.split(",")})
    except ValueError:
        raise InvalidConfig(f"--ranks={text} is no list of ranks; use all, or numbers such as 0,{world - 1}") from None
    if wrong := [rank for rank in ranks if not 0 <= rank < world]:
        raise InvalidConfig(f"--ranks={text} has {', '.join(map(str, wrong))}, and the ranks are 0 to {world - 1}")
    return ranks


def _watch(
    config: Config, layout: Layout, kernels: Kernels, gpu: Gpu, ranks: list[int], options: argparse.Namespace
) -> Iterator[RankReport]:
    """The reports as they come, with progress on stderr."""
    start = time.monotonic()
    print(f"dry run of {_count(len(ranks), 'rank')}: {', '.join(map(str, ranks[:8]))}", file=sys.stderr, flush=True)
    found = dry_run_ranks(
        config, layout, kernels, ranks,
        device_type=gpu.device_type, gpus_per_node=config.cluster.gpus_per_node,
        num_steps=options.steps, folds=not options.whole,
    )  # fmt: skip
    for number, report in enumerate(found, start=1):
        seconds = time.monotonic() - start
        print(f"rank {report.rank} done, {number} of {len(ranks)}, {seconds:.0f} s", file=sys.stderr, flush=True)
        yield report


def _describe(report: RankReport, layout: Layout) -> list[str]:
    unit, size = _choose_unit(report)
    degrees = axis_sizes(layout)
    place = ", ".join(f"{axis} {i} of {degrees[axis]}" for axis, i in report.coordinate.items() if degrees[axis] > 1)
    at = f"{report.module or 'no module'}, {report.action or 'before the first action'}"
    parts = asdict(report.parts)
    cells = [
        [name, f"{parts[key] / size:.3f}", f"{parts[key] / report.peak_bytes:.1%}"] for key, name in _PARTS.items()
    ]
    run, whole = report.num_microbatches_run, report.num_microbatches
    folded = f"{_count(whole, 'microbatch')}" if run == whole else f"{run} of {whole} microbatches, the rest repeats"
    return [
        f"rank {report.rank}  {place}",
        f"peak    {report.peak_bytes / size:.3f} {unit} in {at}",
        f"run     {folded}",
        "",
        *align([["at the peak", unit, "share"], *cells]),
        "",
        *align([["message", "axis", "bytes", "a step", "crosses nodes"], *_rows(report)]),
        "",
        *align([["FLOPs", "TFLOP a step"], *_flop_rows(report)]),
    ]


def _choose_unit(report: RankReport) -> tuple[str, int]:
    return ("GiB", _GIB) if report.peak_bytes >= _GIB else ("MiB", _MIB)


def _rows(report: RankReport) -> list[list[str]]:
    return [
        [row.name, row.axis, f"{row.nbytes:,}", str(row.count), "yes" if row.crosses_node else "no"]
        for row in report.traffic
    ]


def _flop_rows(report: RankReport) -> list[list[str]]:
    """By module, those of all blocks together."""
    flops: Counter[str] = Counter()
    for module, count in report.flops.items():
        flops[re.sub(r"\.\d+\b", ".*", module)] += count
    return [[module, f"{count / 1e12:.4f}"] for module, count in flops.most_common()]


def _compare(report: RankReport, predicted: MemoryEstimate) -> Iterator[list[str]]:
    """Components as far as both tell them apart; the last column marks where they differ much."""
    unit, size = _choose_unit(report)
    yield [f"at the peak, {unit}", "dry run", "predicted", "difference", ""]
    for name, (dry, formula) in _components(report, predicted).items():
        difference = formula / dry - 1 if dry else float(formula > 0)
        mark = "<" if abs(difference) > MARK_ABOVE else ""
        yield [name, f"{dry / size:.3f}", f"{formula / size:.3f}", f"{difference:+.1%}", mark]


def _components(report: RankReport, predicted: MemoryEstimate) -> dict[str, tuple[float, float]]:
    """Bytes of each, dry and predicted.

    What FSDP2 has gathered and not yet reduced is a parameter or a gradient to one of them and a buffer to the other.
    """
    dry = report.parts
    return {
        "optimizer": (dry.optimizer, predicted.optimizer),
        "activations, logits": (dry.activation, predicted.activations + predicted.logits),
        "parameters, gradients, buffers": (
            dry.parameter + dry.gathered + dry.gradient + dry.communication + dry.other,
            predicted.parameters + predicted.gradients + predicted.buffers + predicted.overhead,
        ),
        "peak": (report.peak_bytes, predicted.total),
    }


def _to_document(
    layout: Layout, gpu: Gpu, notes: list[str], reports: dict[int, RankReport], estimate: Estimate
) -> dict[str, object]:
    return {
        "ok": True,
        "gpu": gpu.name,
        "layout": asdict(layout),
        "notes": notes,
        "ranks": [
            {
                **asdict(report),
                "predicted_bytes": {
                    name: {"dry": dry, "predicted": formula}
                    for name, (dry, formula) in _components(report, estimate.memory[report.coordinate["pp"]]).items()
                },
            }
            for report in reports.values()
        ],
    }


def _count(number: int, noun: str) -> str:
    plural = f"{noun}es" if noun.endswith("ch") else f"{noun}s"
    return f"{number} {noun if number == 1 else plural}"
