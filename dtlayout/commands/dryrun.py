"""dtlayout dryrun: build and step the trainer as some ranks of a cluster that is not there, and show what they held."""

import argparse
import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from rich.progress import Progress

from dtlayout.base.errors import InvalidConfig
from dtlayout.base.files import check_page
from dtlayout.base.formatting import align, fold, fold_notes
from dtlayout.base.terminal import open_console
from dtlayout.commands.arguments import (
    JsonDocument,
    add_config,
    add_given,
    add_gpu,
    add_world,
    choose_gpu,
    choose_world,
    show,
)
from dtlayout.commands.case import find_other, read_as_ours
from dtlayout.commands.dryrun_tables import describe_peak, describe_place, describe_run, list_tables, list_times
from dtlayout.config.checking import check_layout
from dtlayout.config.config import Config
from dtlayout.config.loading import load_config
from dtlayout.costmodel.estimate import Estimate
from dtlayout.dryrun.choose import choose_kernels, default_ranks
from dtlayout.dryrun.findings import Findings
from dtlayout.dryrun.ranks import dry_run_ranks
from dtlayout.dryrun.report import RankReport
from dtlayout.planner.prediction import own_scenario, predict, predicted_kernels
from dtlayout.records.run import Run
from dtlayout.spec.cluster import Gpu
from dtlayout.spec.device import device_of
from dtlayout.spec.kernels import Kernels, OpenKernels
from dtlayout.spec.layout import Layout
from dtlayout.training.metrics import MemoryCurves

EXAMPLE = "dtlayout dryrun configs/debug.toml --world 4 --gpu cpu --layout.tp=2 --compare"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the config, the world and the ranks."""
    add_config(parser)
    add_world(parser)
    add_gpu(parser)
    add_given(parser)
    parser.add_argument(
        "--ranks", metavar="R,R,…", help="all, or some; the first, the last and the predicted busiest by default"
    )
    parser.add_argument("--steps", type=int, default=0, metavar="N", help="the first N steps instead of a later one")
    parser.add_argument("--whole", action="store_true", help="run all microbatches, also those that repeat others")
    parser.add_argument("--run", type=Path, metavar="FOLDER", help="a run with metrics.memory=true, to compare with")
    parser.add_argument("--page", type=Path, metavar="FILE", help="write an HTML page with the curve of memory too")
    parser.add_argument("--compare", action="store_true", help="show the predicted memory and time beside")


def run(options: argparse.Namespace) -> int:
    """Print what the ranks held, sent and computed."""
    if options.steps < 0:
        raise InvalidConfig(f"--steps={options.steps} must not be negative")
    if options.run and options.steps:
        raise InvalidConfig("--run takes as many steps as the run has measured; leave --steps out")
    if options.page:
        check_page(options.page)
    config, world = _read(options)
    gpu = choose_gpu(config, options.gpu)
    findings = rehearse(config, check_layout(config, world, device_of(gpu)), gpu, options)
    document = {**to_document(findings), "_compares": options.compare}
    show(options, document, describe, ensure_ascii=False)
    if options.page:
        from dtlayout.commands.dryrun_page import write_page  # only now: it imports matplotlib

        write_page(options.page, document)
    return 0


def _read(options: argparse.Namespace) -> tuple[Config, int]:
    """The config and the number of ranks, also of another program's file."""
    if (found := find_other(options.config, options)) is not None:
        return read_as_ours(found, options.config, options.overrides), found.num_gpus
    config = load_config(options.config, options.overrides)
    return config, choose_world(config, options.world)


def rehearse(config: Config, layout: Layout, gpu: Gpu, options: argparse.Namespace) -> Findings:
    """Run the ranks of a legal layout; `options` are those of `add_arguments`."""
    kernels, notes = choose_kernels(config, layout, gpu)
    estimate = predict(replace(config, kernels=OpenKernels.of(kernels)), layout, gpu)
    assert estimate is not None, "the GPU type is known"
    if options.world is None and config.layout.dp_shard == -1:
        notes.append(f"without --world the fewest ranks that the layout takes, {layout.world_size}")
    notes += config.describe_ramp()
    curves = MemoryCurves.read(options.run) if options.run else None
    ranks = _choose_ranks(options.ranks, layout, estimate)
    num_steps, folds, measured = options.steps, not options.whole, {}
    scenario = own_scenario(config, layout.world_size, gpu)
    if curves is not None:
        here = replace(curves.run, scenario=scenario, layout=layout, kernels=predicted_kernels(config, layout, gpu))
        asked = _list_settings(here)
        if differing := [f"{key}={had!r}" for key, had in _list_settings(curves.run).items() if had != asked[key]]:
            what = f"the run of {options.run} had {', '.join(differing)}"
            raise InvalidConfig(f"{what}; dry-run that, or measure this one")
        num_steps, folds = curves.num_steps, False
        measured = dict(zip(_first_ranks(layout), curves.by_pp_rank, strict=True))
        ranks = list(measured) if options.ranks is None else ranks
        if unknown := [rank for rank in ranks if rank not in measured]:
            notes.append(f"not measured: ranks {_join(unknown)}; the run has measured {_join(measured)}")
    reports = sorted(watch(config, layout, kernels, gpu, ranks, num_steps, folds), key=lambda report: report.rank)
    findings = Findings(
        scenario=scenario, layout=layout, reports=reports, estimate=estimate, notes=notes, num_steps=num_steps,
        measured=measured,
    )  # fmt: skip
    if findings.time is None:
        first = _first_ranks(layout)
        notes.append(f"no time of a step: that takes both ends of the pipeline, such as --ranks {first[0]},{first[-1]}")
    return findings


def _first_ranks(layout: Layout) -> list[int]:
    """The first rank of each stage of the pipeline."""
    return list(range(0, layout.world_size, layout.world_size // layout.pp))


def _list_settings(run: Run) -> dict[str, Any]:
    """Settings that the memory of a run depends on: section.key → value."""
    document = run.to_dict()
    sections = ("model", "batch", "layout", "kernels", "precision")
    values = {f"{section}.{key}": value for section in sections for key, value in document[section].items()}
    optimizer = run.scenario.optimizer
    values |= {"optimizer.name": optimizer.name, "optimizer.state": optimizer.state}
    return {**values, "data.document_mask": document["document_mask"]}


def describe(document: JsonDocument) -> Iterator[str]:
    """The lines of a dry run: notes, then the tables of each rank, and those of the step."""
    yield from (*fold(document["_title"]), *fold_notes(document["notes"]))
    compares = document["_compares"]
    for rank in document["ranks"]:
        yield from ("", describe_place(document, rank))
        yield from (f"peak  {describe_peak(document, rank)}", f"run   {describe_run(document, rank)}")
        for table in list_tables(rank, compares=compares):
            yield from ("", *align(table))
    if times := list_times(document, compares=compares):
        yield from ("", *align(times))


def _join(ranks: Iterable[int]) -> str:
    """Names the first few ranks, with commas between."""
    first = list(ranks)
    return ", ".join(map(str, first[:8])) + (", …" if len(first) > 8 else "")


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


def watch(
    config: Config, layout: Layout, kernels: Kernels, gpu: Gpu, ranks: list[int], num_steps: int = 0, folds: bool = True
) -> Iterator[RankReport]:
    """Yield the report of each rank as soon as it is there, with progress on stderr."""
    start = time.monotonic()
    console = open_console(stderr=True, highlight=False)
    console.print(f"dry run as rank {_join(ranks)} of {layout.world_size}", soft_wrap=True)
    with Progress(console=console, disable=not console.is_terminal, transient=True) as progress:
        task = progress.add_task("steps", total=1.0)
        found = dry_run_ranks(
            config, layout, kernels, ranks,
            device_type=gpu.device_type, gpus_per_node=config.cluster.ranks_per_node,
            num_steps=num_steps, folds=folds, on_progress=lambda share: progress.update(task, completed=share),
        )  # fmt: skip
        for number, report in enumerate(found, start=1):
            console.print(f"rank {report.rank} done, {number} of {len(ranks)}, {time.monotonic() - start:.0f} s")
            yield report


def to_document(findings: Findings) -> dict[str, Any]:
    """The document that `--json` prints."""

    def to_rank(report: RankReport) -> dict[str, object]:
        parts = findings.components(report).items()
        return {
            **{name: value for name, value in asdict(report).items() if name != "done"},
            "fits": findings.fits(report),
            "traffic": [{**asdict(message), "count": count} for message, count in report.traffic.items()],
            "flops": report.flops,
            "compared_bytes": {name: {"dry": dry, "predicted": formula} for name, (dry, formula) in parts},
            "predicted_curve": findings.predicted_curve(report),
            "measured": [asdict(highest) for highest in findings.measured.get(report.rank, [])],
        }

    dry, predicted = findings.time, findings.estimate.time
    step = {
        "dry": dry and {**dry.as_dict(), "total": dry.total},
        "predicted": {**predicted.as_dict(), "total": predicted.total},
    }
    gpu = findings.scenario.cluster.gpu
    return {
        "ok": True, "run": findings.to_run().to_dict(), "world_size": findings.layout.world_size,
        "num_steps": findings.num_steps, "capacity_bytes": findings.estimate.capacity_bytes,
        "gpu": gpu.name, "layout": asdict(findings.layout), "notes": findings.notes,
        "ranks": [to_rank(report) for report in findings.reports],
        "step_s": step if findings.estimate.knows_time else dict.fromkeys(step),
        "_title": findings.title, "_is_on_host": gpu.device_type == "cpu", "_step": step,
    }  # fmt: skip
