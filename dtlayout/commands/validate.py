"""dtlayout validate: score the predictions against measured runs, and fit the constants to them."""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from dtlayout.cluster import load_cluster
from dtlayout.commands.arguments import show
from dtlayout.commands.validate_text import Fits, describe, format_fragment, list_constants
from dtlayout.errors import InvalidConfig
from dtlayout.files import check_writable
from dtlayout.planner.scores import Prediction, by_table, score
from dtlayout.planner.validate import ablate, fit_group, group_runs, leave_one_out, on_cluster, predict
from dtlayout.report.rows import ROWS, read_rows

EXAMPLE = "dtlayout validate runs.csv --leave-one-out --plots plots"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Tables, and what to do with them beside scoring."""
    parser.add_argument("tables", type=Path, nargs="+", metavar="RUNS", help=ROWS)
    parser.add_argument("--engine", metavar="E", help="predict every row as this engine, whatever the table says")
    parser.add_argument(
        "--cluster", type=Path, metavar="FILE",
        help="predict our own runs on its GPU type with this cluster file; else with what was measured when they ran",
    )  # fmt: skip
    parser.add_argument("--leave-one-out", action="store_true", help="score each model with constants of the others")
    parser.add_argument("--fit", action="store_true", help="fit the engine's constants to these runs, as TOML")
    parser.add_argument("--out", type=Path, metavar="FILE", help="where --fit writes instead of stdout")
    parser.add_argument("--ablate", action="store_true", help="what is lost without each constant; takes minutes")
    parser.add_argument("--plots", type=Path, metavar="FOLDER", help="write pictures of predicted against measured")
    parser.add_argument("--worst", type=int, default=5, metavar="N", help="rows to show of the worst; 5 by default")


def run(options: argparse.Namespace) -> int:
    """Score, and print what was asked for."""
    if options.worst < 0:
        raise InvalidConfig(f"--worst={options.worst} must not be negative")
    if options.out and not options.fit:
        raise InvalidConfig("--out names the file that --fit writes; add --fit")
    if options.out:
        check_writable(options.out)
    runs = read_rows(options.tables, options.engine).runs
    runs = on_cluster(runs, load_cluster(options.cluster)) if options.cluster else runs
    groups = group_runs(runs)
    if options.fit and len(engines := sorted({engine for engine, _ in groups})) > 1:
        raise InvalidConfig(
            f"--fit takes runs of one engine, these are of {', '.join(engines)}; pass fewer tables or --engine"
        )
    predictions = predict(runs)
    left_out = leave_one_out(runs, tell) if options.leave_one_out else {}
    wanted = [g for g in groups.values() if options.fit or (options.ablate and g[0].scenario.engine.is_calibrated)]
    fitted = [fit_group(group, tell) for group in wanted]
    fits = [
        (each, ablate([p.run for p in each.predictions], each.engine, tell) if options.ablate else [])
        for each in fitted
    ]
    if options.out:
        options.out.write_text("\n".join(map(format_fragment, fitted)), encoding="utf-8")
    lines = list(describe(options, predictions, left_out, fits))
    if options.plots:
        from dtlayout.planner.plots import write_plots  # only now: it imports matplotlib

        pictures = [f"written: {picture}" for picture in write_plots(predictions, options.plots)]
        lines += ["", *(pictures or ["no picture: no row has a measured number"])]
    return show(options, _to_document(options, predictions, left_out, fits), lines, allow_nan=False)


def tell(line: str) -> None:
    """Say what takes so long, to who waits for it."""
    if sys.stderr.isatty():
        print(f"{line} …", file=sys.stderr)


def _to_document(
    options: argparse.Namespace, predictions: Sequence[Prediction], left_out: dict[str, list[Prediction]], fits: Fits
) -> dict[str, Any]:
    document: dict[str, Any] = {
        "tables": {table: asdict(score(rows)) for table, rows in by_table(predictions).items()},
        "pooled": asdict(score(predictions)),
    }
    if options.leave_one_out:
        document["left_out"] = {model: asdict(score(rows)) for model, rows in left_out.items()}
    if options.fit:
        document["fitted"] = {
            f.engine.gpu: {"engine": f.engine.name, "constants": list_constants(f.engine),
                           "at_bounds": list(f.engine.at_bounds), "scores": asdict(score(f.predictions))}
            for f, _ in fits
        }  # fmt: skip
    if options.ablate:
        document["ablations"] = [
            {"engine": f.engine.name, "gpu": f.engine.gpu, "constant": a.constant, "neutral": a.neutral}
            | asdict(a.scores)
            for f, ablations in fits
            for a in ablations
        ]
    return document
