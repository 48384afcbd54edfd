"""Predictions against tables of measured runs, also of models and GPU types left out of the fits, as Markdown.

    python -m benchmarks.validate FOLDER --out benchmarks/validation.md

The tables are other people's measurements and not part of this project: without a folder there is nothing to do. Why
the worst rows are off stands in benchmarks/explained.toml: below [speed] and [memory] what a row's "TABLE row ROW"
begins with, and the reason.
"""

import argparse
import os
import platform
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from statistics import mean, median
from typing import Any, NamedTuple

from benchmarks.pages.markdown import table
from dtlayout.base import toml
from dtlayout.base.formatting import find_version
from dtlayout.costmodel.engine import ANY_GPU
from dtlayout.records.intervals import Quantity, describe_scenario
from dtlayout.records.run import Run
from dtlayout.validation.cross_validation import (
    HOLD_OUT,
    AllLeftOut,
    HeldOutErrors,
    count_orders,
    leave_out,
    to_errors,
)
from dtlayout.validation.fit import list_parameters
from dtlayout.validation.predict import ablate, describe_group, find_engines, fit_group, group_for_fit, predict
from dtlayout.validation.scores import Errors, Prediction, Scores, by_table, kendall_tau_b, score, score_group
from dtlayout.validation.tables import Tables, find_tables, read_tables

REFERENCES = {  # of the study's five main sweeps, and of the Playbook's 1B and 8B
    "aa_scaling_a100.csv": {"fit": 0.986, "mape": 0.033, "median_ape": 0.017, "tau": 0.90, "top1": 0.95},
    "playbook_h100.csv": {
        "mape": 0.101, "median_ape": 0.025, "tau": 0.82, "top1": 0.99, "memory": 0.040, "false_oom": 0.016,
    },
}  # fmt: skip
"""Table → what a sketch with fitted physical constants reached on the rows that it was fitted to."""
SCORES = {
    "fit": "{:.3f}", "mape": "{:.1%}", "median_ape": "{:.1%}", "tau": "{:.3f}", "top1": "{:.3f}", "memory": "{:.1%}",
    "false_oom": "{:.1%}",
}  # fmt: skip
WORST = 20
_BELOW = "below bfloat16"
_ALL = (
    ("all", "", "bfloat16", "dense models"),
    ("all", "", _BELOW, "dense models"),
    ("all", "", "", "mixtures of experts"),
    ("all", "", "", ""),
)
"""Kinds of rows that have a line together."""
_SWEEPS = ("aa", "playbook")
"""First parts, before the slash, of the tables of the study's and the Playbook's sweeps."""
_LEAST_LAYOUTS = 3
"""Fewest layouts of a job whose order is scored."""
_MOST_LINES = 12
"""Models or tables of a file that have a line each; of more, none has."""
EXPLAINED = Path(__file__).with_name("explained.toml")
UNEXPLAINED = "not explained"


class Rows(NamedTuple):
    """The rows of all tables, predicted in each way."""

    shipped: Sequence[Prediction]
    left_out: AllLeftOut

    @property
    def models(self) -> HeldOutErrors:
        """Errors of predictions for models that were left out of the fit."""
        return self.left_out.ways["model"]

    @property
    def ways(self) -> dict[str, Sequence[Prediction]]:
        """Constants → predictions by them."""
        left_out = {f"{name} left out": found.all_predictions for name, found in self.left_out.ways.items()}
        return {"shipped": self.shipped, **left_out}


def main() -> int:
    """Write the report; 0 without tables too."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path, nargs="?", help="with tables of measured runs")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/validation.md"))
    parser.add_argument("--errors", type=Path, help="write the intervals of predictions too, constants/errors.toml")
    parser.add_argument("--ablate", action="store_true", help="fit without each constant too: minutes for each engine")
    options = parser.parse_args()
    paths, others = find_tables(options.folder) if options.folder else ([], [])
    for line in others:
        tell(line)
    if not paths:
        print("skipped: no folder with tables of measured runs; pass it")
        return 0
    started_s = time.monotonic()
    files = {path.name: read_tables([path]) for path in paths}
    runs = read_tables(paths).runs
    rows = Rows(predict(runs), leave_out(runs, HOLD_OUT, tell))
    lines = list(report(files, rows))
    if options.ablate:
        lines += report_ablations([p.run for p in rows.shipped])
    lines.append(f"\n{time.monotonic() - started_s:.0f} s.")
    options.out.write_text("\n".join(lines) + "\n", encoding="utf-8")
    print(f"written: {options.out}")
    if options.errors:
        options.errors.write_text(to_errors(rows.left_out), encoding="utf-8")
        print(f"written: {options.errors}")
    return 0


def tell(line: str) -> None:
    """Say what takes so long."""
    print(line, file=sys.stderr)


def report(files: Mapping[str, Tables], rows: Rows) -> Iterator[str]:
    """Lines of the page."""
    yield "# Predictions against measured runs\n"
    versions = ", ".join(f"{name} {find_version(name, 'not installed')}" for name in ("dtlayout", "numpy", "scipy"))
    yield f"{datetime.now(timezone.utc):%Y-%m-%d}, Python {platform.python_version()}, {versions}. Predictions need"
    yield f"no GPU: {os.cpu_count()} CPU cores.\n"
    yield "Written by `make bench NAME=validate`."
    yield "Errors are predicted / measured - 1, of speed (MFU of rows that ran at 5 %"
    yield "or more) and of the peak of pipeline rank 0; *signed* and *absolute* are medians. *Left out*: constants"
    yield "fitted to the other models alone, or to the runs on other GPU types. *Inside*: rows of a hundred inside an"
    yield "interval that rests on other rows than theirs ([docs/theory/validation.md](../docs/theory/validation.md)).\n"
    yield from _report_published(rows)
    yield from _report_groups(rows)
    yield from _report_kinds(rows)
    yield from _report_kept(rows.models)
    yield from _report_files(files, rows)
    yield from _report_constants([p.run for p in rows.shipped])
    yield from _report_unpredicted(files)
    yield from _report_orders(rows.models.all_predictions)
    yield from _report_worst(rows)


def _report_published(rows: Rows) -> Iterator[str]:
    """Errors of speed of published rows, and how well their layouts are ordered, by each way's constants."""
    yield "## Published rows\n"
    yield "Absolute errors of speed, median and mean, of rows outside the two sweeps. A *job*: rows of one table that"
    yield f"share program, model, batch, precision and GPUs, in {_LEAST_LAYOUTS} layouts or more. *tau*: Kendall's"
    yield "tau-b of their predicted and measured speeds, 1 in the same order, -1 in the opposite one; a mean of jobs.\n"
    lines = []
    for way, predictions in rows.ways.items():
        found = [p for p in predictions if p.is_scored and p.run.table.partition("/")[0] not in _SWEEPS]
        cells = []
        for is_mixture in (False, True):
            errors = [abs(p.speed_error) for p in found if (p.run.scenario.model.experts is not None) == is_mixture]
            cells += [str(len(errors)), *(_percent(each(errors) if errors else None) for each in (median, mean))]
        taus = list(_rank_jobs(found))
        lines.append([way, *cells, str(len(taus)), f"{mean(taus):.3f}" if taus else "–"])
    of_kinds = [f"{kind}: {what}" for kind in ("dense", "mixtures") for what in ("rows", "median", "mean")]
    yield from (*table(["constants", *of_kinds, "jobs", "tau of jobs"], lines, num_words=1), "")


def _rank_jobs(predictions: Iterable[Prediction]) -> Iterator[float]:
    """Kendall's tau-b of each job with enough layouts."""
    jobs: dict[tuple[Any, ...], list[Prediction]] = {}
    for p in predictions:
        s = p.run.scenario
        job = p.run.table, s.engine.name, s.model, s.batch, s.precision, s.cluster.gpu.name, s.cluster.num_gpus
        jobs.setdefault(job, []).append(p)
    for found in jobs.values():
        if len({p.run.layout for p in found}) >= _LEAST_LAYOUTS:
            tau = kendall_tau_b([p.speed for p in found], [p.run.speed or 0.0 for p in found])
            if tau is not None:
                yield tau


def _percent(value: float | None, sign: str = "") -> str:
    return "–" if value is None else f"{100 * value:{sign}.1f} %"


def _report_groups(rows: Rows) -> Iterator[str]:
    """Speed and memory by kind of row, fitted beside left out."""
    ways = {name: _group(predictions) for name, predictions in rows.ways.items()}
    for quantity in ("speed", "memory"):
        yield f"## {quantity.capitalize()} by engine, GPU type, precision and models\n"
        heading = ["engine", "GPU type", "precision", "models", "rows", "signed", "absolute"]
        for name in HOLD_OUT:
            heading += [f"{name} left out: signed", "absolute", "inside"]
        lines = []
        for key in (*sorted(ways["shipped"]), *_ALL):
            fitted, *left_out = (getattr(score_group(_choose(key, found)), quantity) for found in ways.values())
            if fitted.rows:
                cells = [*key, str(fitted.rows), _percent(fitted.signed, "+"), _percent(fitted.absolute)]
                lines.append([*cells, *(cell for errors in left_out for cell in _left_out_cells(errors))])
        yield from (*table(heading, lines, num_words=4), "")


def _report_kinds(rows: Rows) -> Iterator[str]:
    """Rows inside their ranges, by what was left out of the fits and by the kind of rows that the range rests on."""
    yield "## Ranges by kind\n"
    yield "Rows that were left out in each way, by the kind of rows that their ranges rest on. *Each group alike*: the"
    yield "mean of the shares inside of each group that was left out, so that each counts as much, large or small.\n"
    lines = []
    for way, found in rows.left_out.ways.items():
        for (quantity, kind), groups in sorted(_list_inside_by_kind(found).items()):
            inside = [holds for of_group in groups.values() for holds in of_group]
            of_rows, of_groups = mean(inside), mean(map(mean, groups.values()))
            counts = str(len(inside)), f"{100 * of_rows:.0f}", str(len(groups)), f"{100 * of_groups:.0f}"
            lines.append([way, quantity, kind, *counts])
    heading = ["left out", "of", "kind", "rows", "inside, of 100", "groups", "each group alike"]
    yield from (*table(heading, lines, num_words=3), "")


def _list_inside_by_kind(errors: HeldOutErrors) -> dict[tuple[Quantity, str], dict[str, list[bool]]]:
    """Quantity and kind of a range → group that was left out → whether each of its rows lies inside."""
    by_kind: dict[tuple[Quantity, str], dict[str, list[bool]]] = {}
    for group, predictions in errors.predictions.items():
        for p in predictions:
            ratios, intervals = p.ratios, p.intervals
            for quantity in ratios.keys() & intervals.keys():
                of_kind = by_kind.setdefault((quantity, intervals[quantity].kind), {})
                of_kind.setdefault(group, []).append(intervals[quantity].holds(ratios[quantity]))
    return by_kind


def _choose(key: tuple[str, ...], groups: Mapping[tuple[str, ...], list[Prediction]]) -> list[Prediction]:
    """The predictions of a group, or of all that a line of `_ALL` takes together."""
    if key[0] != "all":
        return groups.get(key, [])
    _, _, precision, models = key

    def belongs(group: tuple[str, ...]) -> bool:
        formats = {"": True, "bfloat16": group[2] == "bfloat16", _BELOW: group[2] != "bfloat16"}
        return formats[precision] and models in ("", group[3])

    return [prediction for group, found in groups.items() if belongs(group) for prediction in found]


def _left_out_cells(errors: Errors) -> list[str]:
    inside = "–" if errors.inside is None else f"{100 * errors.inside:.0f}"
    return [_percent(errors.signed, "+"), _percent(errors.absolute), inside]


def _group(predictions: Iterable[Prediction]) -> dict[tuple[str, ...], list[Prediction]]:
    """Engine, GPU type, precision and dense models or mixtures → predictions."""
    groups: dict[tuple[str, ...], list[Prediction]] = {}
    for prediction in predictions:
        groups.setdefault(tuple(describe_scenario(prediction.run.scenario).values()), []).append(prediction)
    return groups


def _report_kept(models: HeldOutErrors) -> Iterator[str]:
    for group, found in models.kept.items():
        yield f"{len(found)} rows of {group} are all of one model, which cannot be left out.\n"


def _report_files(files: Mapping[str, Tables], rows: Rows) -> Iterator[str]:
    """Scores of each file: all rows in each way, then models that were left out, and tables."""
    for name, tables in files.items():
        names = {run.table for run in tables.runs}
        found = {way: [p for p in each if p.run.table in names] for way, each in rows.ways.items()}
        lines = [[way, str(len(each)), *_show(score(each))] for way, each in found.items()]
        if name in REFERENCES:
            lines.insert(0, ["reference", "", *(_format(REFERENCES[name].get(each), each) for each in SCORES)])
        by_model: dict[str, list[Prediction]] = {}
        for prediction in found["model left out"]:
            by_model.setdefault(prediction.run.scenario.model.name, []).append(prediction)
        for title, parts in (("left out: ", by_model), ("", by_table(found["shipped"]))):
            if 1 < len(parts) <= _MOST_LINES:
                lines += [[f"{title}{part}", str(len(each)), *_show(score(each))] for part, each in parts.items()]
        yield f"## {name}\n"
        yield from (*table(["", "rows", *SCORES], lines), "")
        if name in REFERENCES:
            yield "*Reference*: a sketch with fitted physical constants, on rows that it was fitted to.\n"


def _show(scores: Scores) -> list[str]:
    return [_format(getattr(scores, name), name) for name in SCORES]


def _format(value: float | None, name: str) -> str:
    return "–" if value is None else SCORES[name].format(value).replace("%", " %")


def _report_constants(runs: Sequence[Run]) -> Iterator[str]:
    """Lines on the constants that are fitted, and on those that stand at a bound."""
    lines = []
    for (name, _), group in group_for_fit(runs).items():
        for parameter in list_parameters(find_engines(group)):
            of_type = [engine for engine in find_engines(group) if parameter.gpu in (ANY_GPU, engine.gpu)]
            engine = next(each for each in of_type if parameter.name in (*each.shared, *each.fitted))
            at_bound = "at a bound" if parameter.name in engine.at_bounds else ""
            value = f"{getattr(engine.constants, parameter.name):.4g}"
            lines.append([name, parameter.gpu, parameter.name, at_bound, value])
    yield "## Fitted constants\n"
    yield from (*table(["engine", "GPU type", "constant", "", "value"], lines, num_words=4), "")


def _report_unpredicted(files: Mapping[str, Tables]) -> Iterator[str]:
    """Rows that have no score, by reason."""
    reasons = Counter(
        (name, reason) for name, tables in files.items() for row in tables.unpredicted for reason in row.reasons
    )
    yield "## Rows that cannot be predicted\n"
    yield "Each under all of its reasons.\n"
    lines = [[name, reason, str(count)] for (name, reason), count in reasons.most_common()]
    whole = [[name, "any", str(len(tables.unpredicted))] for name, tables in files.items()]
    yield from (*table(["table", "reason", "rows"], [*whole, *lines], num_words=2), "")


def _report_orders(predictions: Sequence[Prediction]) -> Iterator[str]:
    """How often pairs came in their predicted order."""
    yield "## Which of two layouts is faster\n"
    yield "Pairs of rows of one sweep, their model left out, by how much faster one was predicted to be.\n"
    lines = [
        [order.get("engine", "all"), f"{order['least']:.1%}".replace("%", " %"), str(order["pairs"]),
         _percent(order["right"] / order["pairs"] if order["pairs"] else None)]
        for order in count_orders(predictions)
    ]  # fmt: skip
    yield from (*table(["engine", "at least", "pairs", "in that order"], lines), "")


def _report_worst(rows: Rows) -> Iterator[str]:
    """The rows with the largest errors of the shipped constants, and why."""
    speeds = [(p.speed_error, p) for p in rows.shipped if p.is_scored]
    peaks = [(p.memory_error, p) for p in rows.shipped if p.run.has_peak]
    explained = toml.read(EXPLAINED, "reasons")
    for quantity, found in (("speed", speeds), ("memory", peaks)):
        worst = sorted(found, key=lambda row: abs(row[0]), reverse=True)[:WORST]
        named = {f"{p.run.table} row {p.run.row}": (error, p) for error, p in worst}
        lines = [
            [name, p.run.scenario.engine.name, p.run.scenario.model.name, f"{p.run.scenario.cluster.num_gpus} x "
             f"{p.run.scenario.cluster.gpu.name}", str(p.run.layout), explain_row(name, explained.get(quantity, {})),
             _percent(error, "+")]
            for name, (error, p) in named.items()
        ]  # fmt: skip
        yield f"## Worst {len(lines)} rows of {len(found)}: {quantity}\n"
        yield from (*table(["row", "engine", "model", "GPUs", "layout", "why", "error"], lines, num_words=6), "")


def explain_row(name: str, reasons: Mapping[str, str]) -> str:
    """The reason of "TABLE row ROW", or of its whole table."""
    return reasons.get(name) or reasons.get(name.partition(" row ")[0]) or UNEXPLAINED


def report_ablations(runs: Sequence[Run]) -> Iterator[str]:
    """Lines on the accuracy that is lost without each constant, the others of its kind fitted again."""
    shown = ("fit", "median_ape", "mape", "tau", "memory")
    yield "## Without one constant\n"
    lines = []
    for (name, gpu), group in group_for_fit(runs).items():
        if not list_parameters(find_engines(group)):
            continue
        fitted = fit_group(group, tell)
        whole = _show(score(fitted.predictions))
        lines.append([describe_group(name, gpu), "(all of them)", *(whole[list(SCORES).index(each)] for each in shown)])
        for found in ablate(group, fitted.engines, tell):
            lost = _show(found.scores)
            lines.append([found.gpu, found.constant, *(lost[list(SCORES).index(each)] for each in shown)])
    yield from (*table(["", "constant", *shown], lines, num_words=2), "")


if __name__ == "__main__":
    sys.exit(main())
