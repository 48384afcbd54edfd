"""The text of `dtlayout validate`, made of its document alone (validate.py)."""

import textwrap
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace

from dtlayout.base.formatting import align, choose_unit, plural, wrap
from dtlayout.commands.arguments import JsonDocument
from dtlayout.report.rows import REPEATS
from dtlayout.validation import predict
from dtlayout.validation.columns import KERNELS
from dtlayout.validation.scores import LOWEST_MFU, PLAIN_SCORES, SCORES, Prediction, format_percent, format_score, score

LEFT_OUT = {
    "left_out": "model", "left_out_gpu": "GPU type", "left_out_site": "site", "left_out_nodes": "nodes",
}  # fmt: skip
"""Key of the document → what was left out of the fits."""
_MOST_NAMED = 6
"""Most rows that are named one by one; if there are more, their tables are named."""


def describe(document: JsonDocument) -> Iterator[str]:
    """The lines of a validation: engines, scores, what is not predicted, the worst rows, and what was fitted."""
    yield from _describe_engines(document["_predictions"])
    if document["tables"]:
        yield from ("", *_tabulate("table", {**document["tables"], "all": document["pooled"]}))
        with_mfu = f"rows that ran at an MFU of {LOWEST_MFU:.0%} or more"
        scored = with_mfu if any(p.run.mfu for p in document["_predictions"]) else "steps a second of rows that ran"
        yield f"MAPE and median over {scored}; tau and top-1 of all: their means"
        yield from _describe_groups(document["groups"])
    else:
        yield "no row can be scored"
    yield from _describe_unpredicted(document)
    for key, of in LEFT_OUT.items():
        if key in document:
            yield from _describe_left_out(document, key, of)
    yield from _describe_worst(document["_predictions"], document["_num_worst"])
    yield from _describe_fits(document)
    if (pictures := document.get("_pictures")) is not None:
        written = [f"written: {picture}" for picture in pictures]
        yield from ("", *(written or ["no picture: no row has a measured number"]))


def _describe_engines(predictions: Sequence[Prediction]) -> Iterator[str]:
    """Lines on the source of the constants of each engine, on each GPU type."""
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


def _describe_left_out(document: JsonDocument, key: str, of: str) -> Iterator[str]:
    """Scores by constants that never saw the rows, and the groups that could not be left out."""
    yield from ("", *_tabulate(f"{of} left out", document[key]))
    yield from _describe_groups(document[f"{key}_groups"], f", {of} left out")
    for group, model in document[f"_{key}_kept_model"].items():
        rows = plural(document[f"{key}_kept"][group]["rows"], "row")
        yield f"not left out, by constants that saw them: {rows} of {group}, all of {model}"


def _describe_groups(groups: Mapping[str, JsonDocument], rows: str = "") -> Iterator[str]:
    """The direction in which predictions are off, for each engine, GPU, precision and source; `rows` says of which."""
    cells = [
        [
            _shorten(f"{grouping} {group}", 38), str(scores["rows"]),
            *_show_errors(scores["speed"]), *_show_errors(scores["memory"]),
        ]
        for grouping, of_grouping in groups.items()
        for group, scores in of_grouping.items()
    ]  # fmt: skip
    heading = [f"median errors{rows}", "rows"]
    heading += [each for of in ("of speed", "of memory") for each in (of, "signed", "absolute", "inside")]
    yield from ("", *align([heading, *cells]))
    yield "of predicted / measured - 1; beside each the rows whose speed or memory is scored, and how many of a hundred"
    yield "lie inside the interval that was predicted for them"


def _show_errors(errors: JsonDocument) -> list[str]:
    signed = "–" if errors["signed"] is None else f"{errors['signed']:+.1%}".replace("%", " %")
    inside = "–" if errors["inside"] is None else f"{100 * errors['inside']:.0f}"
    return [str(errors["rows"]), signed, format_percent(errors["absolute"]), inside]


def _describe_unpredicted(document: JsonDocument) -> Iterator[str]:
    """Rows that are not scored, or are scored as another layout than they say."""
    counts, rows = document["rows"], document["unpredicted_rows"]
    if rows:
        of = f"{counts['unpredicted']} of {plural(counts['read'], 'row')}"
        yield f"\nnot predicted: {of}, each under all of its reasons"
        for reason, count in document["unpredicted"].items():
            yield f"  {count:4} {reason}"
            yield from wrap("       in ", _name_rows([row for row in rows if reason in row["reasons"]]))
    if repeats := counts["repeats"]:
        yield f"\nnot scored: {plural(repeats, 'row')} {REPEATS}"
    for change, changed in document["_changed_rows"].items():
        yield f"\npredicted with a change: {plural(len(changed), 'row')}; {change}"
        yield from wrap("       in ", _name_rows(changed))


def _name_rows(rows: Sequence[JsonDocument]) -> list[str]:
    """Names of a few rows; of many rows their tables, with the number of rows in each."""
    if len(rows) <= _MOST_NAMED:
        return [f"{_shorten(row['table'])} row {row['row']}" for row in rows]
    return [f"{_shorten(table)} ({count})" for table, count in Counter(row["table"] for row in rows).items()]


def _tabulate(first: str, scores: Mapping[str, JsonDocument]) -> list[str]:
    rows = [[_shorten(name), str(s["rows"]), *(format_score(s, each) for each in SCORES)] for name, s in scores.items()]
    return align([[first, "rows", *SCORES.values()], *rows])


def _shorten(name: str, width: int = 46) -> str:
    """A name; of a long one both ends, since tables of one study begin alike and sweeps of one model end alike."""
    return name if len(name) <= width else f"{name[: width // 2 - 1]}…{name[-(width - width // 2) :]}"


def _describe_worst(predictions: Sequence[Prediction], number: int) -> Iterator[str]:
    """Rows with the largest errors of speed and of memory, and wrong outcomes farthest from the capacity."""
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


def _describe_fits(document: JsonDocument) -> Iterator[str]:
    """Fitted constants as a piece of an engine's file, and each constant's worth, as asked."""
    for fitted, fragment, ablations in document["_fits"]:
        if "fitted" in document:
            yield f"\nwritten: {document['_out']}" if document["_out"] else f"\n{fragment.rstrip()}"
        if "ablations" in document:
            yield from _describe_ablations(fitted, ablations)


def _describe_ablations(fitted: predict.Fitted, ablations: Sequence[JsonDocument]) -> Iterator[str]:
    """Each constant's worth: scores without it, less those with all."""
    whole, first = asdict(score(fitted.predictions)), fitted.engines[0]
    shown, by_gpu = ("fit", "mape", "tau", "memory"), {engine.gpu: engine for engine in fitted.engines}
    rows = [["constant", "value", "neutral", *(SCORES[name] for name in shown)]]
    rows.append(["(all of them)", "", "", *(format_score(whole, name) for name in shown)])
    for a in ablations:
        gpu, constant = a["gpu"], a["constant"]
        value = getattr(by_gpu.get(gpu, first).constants, constant)
        changes = [_change(a[name], whole[name], name) for name in shown]
        of = f" {gpu}" * (len(by_gpu) > 1)
        rows.append([constant + of, f"{value:.4g}", f"{a['neutral']:.4g}", *changes])
    where = predict.describe_group(first.name, ", ".join(by_gpu))
    yield from ("", f"{where} without one constant, the others of its kind fitted again", *align(rows))


def _change(without: float | None, whole: float | None, name: str) -> str:
    if without is None or whole is None:
        return "–"
    return f"{without - whole:+.3f}" if name in PLAIN_SCORES else f"{without - whole:+.1%}"
