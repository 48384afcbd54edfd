"""dtlayout validate: score the predictions against measured runs, and fit the constants to them."""

import argparse
import sys
import textwrap
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from statistics import quantiles
from typing import Any

from dtlayout.base import toml
from dtlayout.base.errors import InvalidConfig
from dtlayout.base.files import check_writable
from dtlayout.base.formatting import align, choose_unit, plural, wrap
from dtlayout.base.terminal import is_terminal
from dtlayout.commands.arguments import show
from dtlayout.costmodel.engine import ANY_GPU, Engine
from dtlayout.records.run import Run
from dtlayout.report.rows import REPEATS, ROWS, ReportRows, read_rows
from dtlayout.spec.cluster import load_cluster
from dtlayout.validation import predict
from dtlayout.validation.columns import KERNELS
from dtlayout.validation.cross_validation import HOLD_OUT_BY, HeldOutErrors, leave_out, to_errors
from dtlayout.validation.scores import LOWEST_MFU, Errors, Prediction, Scores, by_group, by_table, score, score_group
from dtlayout.validation.tables import Unpredicted

EXAMPLE = "dtlayout validate runs.csv --leave-one-out --plots plots"

WaysLeftOut = Mapping[str, HeldOutErrors]
"""What was left out of the fits, model or GPU type → what was predicted then."""
Fits = Sequence[tuple[predict.Fitted, Sequence[predict.Ablation]]]
"""What was fitted to each engine's runs, with what each of its constants is worth where that was asked."""
_SCORES = {
    "fit": "fit", "mape": "MAPE", "median_ape": "median", "tau": "tau", "top1": "top-1", "memory": "memory",
    "false_oom": "false OOM",
}  # fmt: skip
"""Score → what it is called in tables."""
_PLAIN_SCORES = ("fit", "tau", "top1")
"""Those that are no percentage."""
_MOST_NAMED = 6
"""Rows that are named one by one; of more than these their tables are."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Tables, and what to do with them beside scoring."""
    parser.add_argument("tables", type=Path, nargs="+", metavar="RUNS", help=ROWS)
    parser.add_argument("--engine", metavar="E", help="predict every row as this engine, whatever the table says")
    parser.add_argument(
        "--cluster", type=Path, metavar="FILE",
        help="predict our own runs on its GPU type with this cluster file; else with what was measured when they ran",
    )  # fmt: skip
    parser.add_argument("--leave-one-out", action="store_true", help="score each model with constants of the others")
    parser.add_argument("--leave-gpu-out", action="store_true", help="score each GPU type with constants of the others")
    parser.add_argument(
        "--errors", type=Path, metavar="FILE", help="write the intervals of these rows, left out both ways"
    )
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
    for path in filter(None, (options.out, options.errors)):
        check_writable(path)
    rows = read_rows(options.tables, options.engine)
    runs = rows.runs
    runs = predict.on_cluster(runs, load_cluster(options.cluster)) if options.cluster else runs
    groups = predict.group_for_fit(runs)
    if options.fit and len(engines := sorted({engine for engine, _ in groups})) > 1:
        raise InvalidConfig(
            f"--fit takes runs of one engine, these are of {', '.join(engines)}; pass fewer tables or --engine"
        )
    predictions = predict.predict(runs)
    left_out = _leave_out(options, runs)
    wanted = [g for g in groups.values() if options.fit or (options.ablate and _has_fit(g))]
    fitted = [predict.fit_group(group, tell) for group in wanted]
    fits = [
        (each, predict.ablate([p.run for p in each.predictions], each.engines, tell) if options.ablate else [])
        for each in fitted
    ]
    if options.out:
        options.out.write_text("\n".join(map(_format_fragment, fitted)), encoding="utf-8")
    lines = list(_describe(options, rows, predictions, left_out, fits))
    if options.plots:
        from dtlayout.validation.plots import write_plots  # only now: it imports matplotlib

        pictures = [f"written: {picture}" for picture in write_plots(predictions, options.plots)]
        lines += ["", *(pictures or ["no picture: no row has a measured number"])]
    return show(options, _to_document(options, rows, predictions, left_out, fits), lines, allow_nan=False)


def _leave_out(options: argparse.Namespace, runs: Sequence[Run]) -> WaysLeftOut:
    """What is left out as asked; the errors of all of it are written as asked."""
    asked = {"model": options.leave_one_out, "GPU type": options.leave_gpu_out}
    wanted = [name for name in HOLD_OUT_BY if asked[name] or options.errors]
    if not wanted:
        return {}
    found = leave_out(runs, wanted, tell)
    if options.errors:
        options.errors.write_text(to_errors(found.evidence), encoding="utf-8")
    return {name: left_out for name, left_out in found.ways.items() if asked[name]}


def tell(line: str) -> None:
    """Say what takes so long, to who waits for it."""
    if is_terminal(sys.stderr):
        print(f"{line} …", file=sys.stderr)


def _to_document(
    options: argparse.Namespace,
    rows: ReportRows,
    predictions: Sequence[Prediction],
    left_out: WaysLeftOut,
    fits: Fits,
) -> dict[str, Any]:
    document: dict[str, Any] = {
        "tables": {table: asdict(score(found)) for table, found in by_table(predictions).items()},
        "pooled": asdict(score(predictions)),
        "groups": _to_groups(predictions),
        "rows": _count(rows),
        "unpredicted": dict(_count_reasons(rows)),
        "unpredicted_rows": [row._asdict() for row in rows.unpredicted],
        "changed": {change: len(runs) for change, runs in _find_changes(predictions).items()},
    }
    for of, key in (("model", "left_out"), ("GPU type", "left_out_gpu")):
        if of in left_out:
            document[key] = {name: asdict(score(found)) for name, found in left_out[of].predictions.items()}
            document[f"{key}_groups"] = _to_groups(left_out[of].all_predictions)
            document[f"{key}_kept"] = {group: asdict(score(found)) for group, found in left_out[of].kept.items()}
    if options.fit:
        document["fitted"] = {gpu: values for each, _ in fits for gpu, values in _to_fits(each).items()}
    if options.ablate:
        document["ablations"] = [
            {"engine": f.engines[0].name, "gpu": a.gpu, "constant": a.constant, "neutral": a.neutral} | asdict(a.scores)
            for f, ablations in fits
            for a in ablations
        ]
    return document


def _has_fit(runs: Sequence[Run]) -> bool:
    return any(engine.fitted or engine.shared for engine in predict.find_engines(runs))


def _to_groups(predictions: Sequence[Prediction]) -> dict[str, dict[str, Any]]:
    return {
        grouping: {group: asdict(score_group(found)) for group, found in groups.items()}
        for grouping, groups in by_group(predictions).items()
    }


def _to_fits(fitted: predict.Fitted) -> dict[str, dict[str, Any]]:
    """GPU type → what was fitted to its runs."""
    at_bounds = _find_at_bounds(fitted)
    return {
        gpu: {
            "engine": fitted.engines[0].name, "constants": constants,
            "at_bounds": [name for name in at_bounds if name in constants],
            "scores": asdict(score(_find_on(gpu, fitted.predictions))),
        }
        for gpu, constants in _list_constants(fitted).items()
    }  # fmt: skip


def _find_on(gpu: str, predictions: Iterable[Prediction]) -> list[Prediction]:
    """The predictions for runs on a GPU type; for all, ANY_GPU."""
    return [p for p in predictions if gpu in (ANY_GPU, p.run.scenario.cluster.gpu.name)]


def _count(rows: ReportRows) -> dict[str, int]:
    """Rows that were read, by what became of them: `left_out` are those that do not say how a layout ended."""
    predicted, unpredicted, repeats = len(rows.runs), len(rows.unpredicted), rows.left_out[REPEATS]
    others = rows.left_out.total() - unpredicted - repeats
    read = predicted + rows.left_out.total()
    return {"read": read, "predicted": predicted, "unpredicted": unpredicted, "repeats": repeats, "left_out": others}


def _count_reasons(rows: ReportRows) -> Mapping[str, int]:
    """Why rows cannot be predicted → how many, most first; a row counts under each of its reasons."""
    reasons = Counter(reason for row in rows.unpredicted for reason in row.reasons)
    return dict(reasons.most_common())


def _find_changes(predictions: Sequence[Prediction]) -> dict[str, list[Run]]:
    """What is predicted in the place of what rows say → these rows."""
    changes: dict[str, list[Run]] = {}
    for prediction in predictions:
        for change in predict.describe_changes(prediction.run):
            changes.setdefault(change, []).append(prediction.run)
    return changes


def _describe(
    options: argparse.Namespace,
    rows: ReportRows,
    predictions: Sequence[Prediction],
    left_out: WaysLeftOut,
    fits: Fits,
) -> Iterator[str]:
    """The lines of a validation: engines, scores, what is not predicted, the worst rows, and what was fitted."""
    for (name, gpu), group in predict.group_runs(p.run for p in predictions).items():
        engine = group[0].scenario.engine
        title = f"{name} on {gpu}, {plural(len(group), 'row')}"
        if engine.is_calibrated:
            yield f"{title}: constants from {engine.source}"
        else:
            behind = engine.source.partition("; ")[2] or "general constants, no run stands behind them"
            yield f"{title}: uncalibrated; {behind}"
        if engine.fitted:
            yield from wrap("  fitted constants: ", engine.fitted)
        if engine.shared:
            yield from wrap("  fitted to its runs on all GPU types: ", engine.shared)
        if engine.fitted or engine.shared:
            yield from wrap("  of these at a bound: ", engine.at_bounds or ["none"])
    if predictions:
        tables = {table: score(found) for table, found in by_table(predictions).items()}
        yield from ("", *_tabulate("table", {**tables, "all": score(predictions)}))
        with_mfu = f"rows that ran at an MFU of {LOWEST_MFU:.0%} or more"
        scored = with_mfu if any(p.run.mfu for p in predictions) else "steps a second of rows that ran"
        yield f"MAPE and median over {scored}; tau and top-1 of all: their means"
        yield from _describe_groups(predictions)
    else:
        yield "no row can be scored"
    yield from _describe_unpredicted(rows, predictions)
    for of, found in left_out.items():
        yield from _describe_left_out(of, found)
    yield from _describe_worst(predictions, options.worst)
    for fitted, ablations in fits:
        if options.fit and options.out:
            yield f"\nwritten: {options.out}"
        elif options.fit:
            yield from ("", _format_fragment(fitted).rstrip())
        if options.ablate:
            yield from _describe_ablations(fitted, ablations)


def _describe_left_out(of: str, found: HeldOutErrors) -> Iterator[str]:
    """Scores by constants that never saw the rows, and the groups that could not be left out."""
    yield from ("", *_tabulate(f"{of} left out", {name: score(rows) for name, rows in found.predictions.items()}))
    yield from _describe_groups(found.all_predictions, f", {of} left out")
    for group, rows in found.kept.items():
        (model,) = {p.run.scenario.model.name for p in rows}
        yield f"not left out, by constants that saw them: {plural(len(rows), 'row')} of {group}, all of {model}"


def _describe_groups(predictions: Sequence[Prediction], rows: str = "") -> Iterator[str]:
    """Which way predictions are off for each engine, GPU, precision and source; `rows` says which, if not all."""
    cells = [
        [
            _shorten(f"{grouping} {group}", 38),
            str(scores.rows),
            *_show_errors(scores.speed),
            *_show_errors(scores.memory),
        ]
        for grouping, groups in by_group(predictions).items()
        for group, found in groups.items()
        for scores in [score_group(found)]
    ]
    heading = [f"median errors{rows}", "rows"]
    heading += [each for of in ("of speed", "of memory") for each in (of, "signed", "absolute", "inside")]
    yield from ("", *align([heading, *cells]))
    yield "of predicted / measured - 1; beside each the rows whose speed or memory is scored, and how many of a hundred"
    yield "lie inside the interval that was predicted for them"


def _show_errors(errors: Errors) -> list[str]:
    signed = "–" if errors.signed is None else f"{errors.signed:+.1%}".replace("%", " %")
    inside = "–" if errors.inside is None else f"{100 * errors.inside:.0f}"
    return [str(errors.rows), signed, percent(errors.absolute), inside]


def _describe_unpredicted(rows: ReportRows, predictions: Sequence[Prediction]) -> Iterator[str]:
    """What became of the rows that are not scored, or scored as another layout than they say."""
    counts = _count(rows)
    if rows.unpredicted:
        of = f"{counts['unpredicted']} of {plural(counts['read'], 'row')}"
        yield f"\nnot predicted: {of}, each under all of its reasons"
        for reason, count in _count_reasons(rows).items():
            yield f"  {count:4} {reason}"
            yield from wrap("       in ", _name_rows([row for row in rows.unpredicted if reason in row.reasons]))
    if repeats := counts["repeats"]:
        yield f"\nnot scored: {plural(repeats, 'row')} {REPEATS}"
    for change, runs in _find_changes(predictions).items():
        yield f"\npredicted with a change: {plural(len(runs), 'row')}; {change}"
        yield from wrap("       in ", _name_rows(runs))


def _name_rows(rows: Sequence[Run | Unpredicted]) -> list[str]:
    """Few rows by name, many by their tables, with how many of each."""
    if len(rows) <= _MOST_NAMED:
        return [f"{_shorten(row.table)} row {row.row}" for row in rows]
    return [f"{_shorten(table)} ({count})" for table, count in Counter(row.table for row in rows).items()]


def _tabulate(first: str, scores: dict[str, Scores]) -> list[str]:
    rows = [[_shorten(name), str(s.rows), *(_show(s, each) for each in _SCORES)] for name, s in scores.items()]
    return align([[first, "rows", *_SCORES.values()], *rows])


def _shorten(name: str, width: int = 46) -> str:
    """Both ends of a long name: tables of one study begin alike, sweeps of one model end alike."""
    return name if len(name) <= width else f"{name[: width // 2 - 1]}…{name[-(width - width // 2) :]}"


def _show(scores: Scores, name: str) -> str:
    value = getattr(scores, name)
    return "–" if value is None else f"{value:.3f}" if name in _PLAIN_SCORES else percent(value)


def percent(value: float | None) -> str:
    """A fraction in percent; a dash where there is none."""
    return "–" if value is None else f"{100 * value:.{1 if value < 10 else 0}f} %"


def _describe_worst(predictions: Sequence[Prediction], number: int) -> Iterator[str]:
    """The rows with the largest errors of MFU and of memory, and the surest of the wrong outcomes."""
    speeds = [(abs(p.speed_error), p) for p in predictions if p.is_scored]
    peaks = [(abs(p.memory_error), p) for p in predictions if p.run.has_peak]
    misjudged = [
        (abs(p.estimate.peak_bytes / p.estimate.capacity_bytes - 1), p)
        for p in predictions
        if p.run.outcome == ("oom" if p.estimate.fits else "ok")
    ]
    kinds = {"speed, of {}": speeds, "peak memory, of {}": peaks, "outcome, of {} misjudged": misjudged}
    for kind, rows in kinds.items():
        if rows and number:
            yield from ("", f"worst by {kind.format(len(rows))}")
            for _, prediction in sorted(rows, key=lambda row: row[0], reverse=True)[:number]:
                yield from _describe_row(prediction)


def _describe_row(prediction: Prediction) -> Iterator[str]:
    run, estimate = prediction.run, prediction.estimate
    eager = replace(run.kernels, compile="none")
    kernel = next((word for word, kernels in KERNELS.items() if kernels == eager), eager.attention)
    compiled = " compiled" * run.kernels.compiles_blocks
    yield f"  {_shorten(run.table, 44)} row {run.row}: {run.layout} {kernel}{compiled}, {run.outcome}"
    if run.note:
        yield from textwrap.wrap(f"note: {run.note}", 118, initial_indent=" " * 4, subsequent_indent=" " * 8)
    speed = f"MFU {100 * estimate.mfu:.1f} %" if run.scenario.cluster.gpu.has_mfu else ""
    if run.mfu:
        speed += f", measured {100 * run.mfu:.1f} % ({prediction.speed_error:+.1%})"
    speed += f"{'; ' if speed else ''}step {estimate.step_time_s:.4g} s"
    speed += f", measured {run.step_time_s:.4g} s" if run.step_time_s else ""
    yield f"    {speed}"
    times = [f"{name} {seconds:.4g}" for name, seconds in estimate.time.as_dict().items() if seconds]
    yield from wrap("      s:  ", times)
    shown = 0 if run.peak_bytes else estimate.busiest_rank
    memory = estimate.memory[shown]
    unit, size = choose_unit(memory.total)
    peak = f"peak of pipeline rank {shown} {memory.total / size:.1f} {unit}"
    if run.peak_bytes:
        peak += f", measured {run.peak_bytes / size:.1f} {unit} ({prediction.memory_error:+.1%})"
    peak += f"; highest of any rank {estimate.peak_bytes / size:.1f} of {estimate.capacity_bytes / size:.1f} {unit}"
    yield f"    {peak}"
    parts = [f"{name} {nbytes / size:.1f}" for name, nbytes in memory.as_dict().items() if nbytes]
    yield from wrap(f"      {unit}: ", parts)


def _format_fragment(fitted: predict.Fitted) -> str:
    """Fitted constants as the engine's file has them, with what is left of the errors as comments."""
    scores = score(fitted.predictions)
    cells = [[name, _show(fitted.before, name), _show(scores, name)] for name in _SCORES]
    summary = [f"{fitted.engines[0].name}: scores of the {plural(scores.rows, 'row')} before and after this fit"]
    summary += align(cells, ("<16", ">6", ">8"))
    errors = [100 * p.speed_error for p in fitted.predictions if p.is_scored]
    if len(errors) > 1:
        tenths = quantiles(errors, n=10, method="inclusive")
        spread = ", ".join(f"{name} {tenths[i]:+.1f} %" for name, i in (("p10", 0), ("median", 4), ("p90", 8)))
        summary.append(f"error of speed after: {spread}")
    summary.append(f"at a bound: {', '.join(_find_at_bounds(fitted)) or 'none'}")
    if unchanged := _find_unchanged(fitted):
        summary.append(f"left as they were by these runs: {', '.join(unchanged)}")
    tables = {}
    for gpu, constants in _list_constants(fitted).items():
        ran = [p.run for p in _find_on(gpu, fitted.predictions) if p.run.ran]
        models = ", ".join(dict.fromkeys(run.scenario.model.name for run in ran))
        gpus = {"gpus": sorted({run.scenario.cluster.gpu.name for run in ran})} if gpu == ANY_GPU else {}
        tables[gpu] = {"source": f"{plural(len(ran), 'run')} of {models}", **gpus, **constants}
    return "".join(f"# {line}\n" for line in summary) + toml.dumps({"fitted": tables})


def _find_at_bounds(fitted: predict.Fitted) -> list[str]:
    return list(dict.fromkeys(name for engine in fitted.engines for name in engine.at_bounds))


def _find_unchanged(fitted: predict.Fitted) -> list[str]:
    """Constants that the fit has left as they were on every GPU type."""
    names = dict.fromkeys(name for engine in fitted.engines for name in (*engine.shared, *engine.fitted))
    told = set[str]().union(*map(_find_told, fitted.starts, fitted.engines))
    return [name for name in names if name not in told]


def _find_told(start: Engine, engine: Engine) -> set[str]:
    """Constants that a fit has moved away from where it started."""
    names = (*engine.shared, *engine.fitted)
    return {name for name in names if getattr(engine.constants, name) != getattr(start.constants, name)}


def _list_constants(fitted: predict.Fitted) -> dict[str, dict[str, float]]:
    """GPU type → the constants fitted to its runs, with as many digits as a fit knows; ANY_GPU's are on all types."""
    tables: dict[str, dict[str, float]] = {}
    for start, engine in zip(fitted.starts, fitted.engines, strict=True):
        for gpu, names in ((ANY_GPU, engine.shared), (engine.gpu, engine.fitted)):
            told = _find_told(start, engine)
            values = {name: float(f"{getattr(engine.constants, name):.4g}") for name in names if name in told}
            if values:
                tables.setdefault(gpu, {}).update(values)
    return dict(sorted(tables.items(), key=lambda item: item[0] != ANY_GPU))


def _describe_ablations(fitted: predict.Fitted, ablations: Sequence[predict.Ablation]) -> Iterator[str]:
    """Each constant's worth: scores without it, less those with all."""
    whole = score(fitted.predictions)
    shown, by_gpu = ("fit", "mape", "tau", "memory"), {engine.gpu: engine for engine in fitted.engines}
    first = fitted.engines[0]
    rows = [["constant", "value", "neutral", *(_SCORES[name] for name in shown)]]
    rows.append(["(all of them)", "", "", *(_show(whole, name) for name in shown)])
    for a in ablations:
        value = getattr(by_gpu.get(a.gpu, first).constants, a.constant)
        changes = [_change(getattr(a.scores, name), getattr(whole, name), name) for name in shown]
        of = f" {a.gpu}" * (len(by_gpu) > 1)
        rows.append([a.constant + of, f"{value:.4g}", f"{a.neutral:.4g}", *changes])
    where = predict.describe_group(first.name, ", ".join(by_gpu))
    yield from ("", f"{where} without one constant, the others of its kind fitted again", *align(rows))


def _change(without: float | None, whole: float | None, name: str) -> str:
    if without is None or whole is None:
        return "–"
    return f"{without - whole:+.3f}" if name in _PLAIN_SCORES else f"{without - whole:+.1%}"
