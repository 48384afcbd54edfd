"""dtlayout dryrun: build and step the trainer as some ranks of a cluster that is not there, and show what they held."""

import argparse
import json
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

from dtlayout.cluster import Gpu
from dtlayout.commands.arguments import add_config, choose_gpu
from dtlayout.commands.dryrun_tables import RankTables, components
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
from dtlayout.training.prediction import predict

EXAMPLE = "dtlayout dryrun configs/debug.toml --world 4 --gpu cpu --layout.tp=2 --compare"


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
    parser.add_argument("--page", type=Path, metavar="FILE", help="write an HTML page with the curve of memory too")
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
    title = f"{config.model.name} as {layout} on {layout.world_size} x {gpu.name}, dry"
    predicted = {rank: estimate.memory[report.coordinate["pp"]] for rank, report in reports.items()}
    if options.page:
        from dtlayout.commands.dryrun_page import write_page  # only now: it imports matplotlib

        tables = [RankTables.make(report, layout, predicted[rank]) for rank, report in reports.items()]
        peaks = [predicted[rank].total for rank in reports]
        ranks_of_page = list(zip(reports.values(), tables, peaks, strict=True))
        write_page(options.page, title, notes, ranks_of_page, estimate.capacity_bytes)
    if options.json:
        print(json.dumps(_to_document(layout, gpu, notes, reports, predicted), indent=2, ensure_ascii=False))
        return 0
    print("\n".join([title, *(f"note: {note}" for note in notes)]))
    for rank, report in reports.items():
        found = RankTables.make(report, layout, predicted[rank] if options.compare else None)
        print("\n".join(["", found.place, f"peak  {found.peak}", f"run   {found.run}"]))
        for table in found.tables:
            print("\n".join(["", *(line.rstrip() for line in align(table))]))
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
    named = ", ".join(map(str, ranks[:8])) + (", …" if len(ranks) > 8 else "")
    print(f"dry run as rank {named} of {layout.world_size}", file=sys.stderr, flush=True)
    found = dry_run_ranks(
        config, layout, kernels, ranks,
        device_type=gpu.device_type, gpus_per_node=config.cluster.gpus_per_node,
        num_steps=options.steps, folds=not options.whole,
    )  # fmt: skip
    for number, report in enumerate(found, start=1):
        seconds = time.monotonic() - start
        print(f"rank {report.rank} done, {number} of {len(ranks)}, {seconds:.0f} s", file=sys.stderr, flush=True)
        yield report


def _to_document(
    layout: Layout, gpu: Gpu, notes: list[str], reports: dict[int, RankReport], predicted: dict[int, MemoryEstimate]
) -> dict[str, object]:
    def compare(rank: int) -> dict[str, dict[str, float]]:
        parts = components(reports[rank], predicted[rank]).items()
        return {name: {"dry": dry, "predicted": formula} for name, (dry, formula) in parts}

    ranks = [{**asdict(report), "compared_bytes": compare(rank)} for rank, report in reports.items()]
    return {"ok": True, "gpu": gpu.name, "layout": asdict(layout), "notes": notes, "ranks": ranks}
