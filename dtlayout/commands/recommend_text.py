"""The text of `dtlayout recommend`, made of its document alone (recommend_document.py)."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from dtlayout.base.formatting import GIB, align, align_in_parts, fold, plural, three_digits, wrap
from dtlayout.base.terminal import find_width
from dtlayout.commands.arguments import JsonDocument
from dtlayout.commands.engine_options import describe_assumptions
from dtlayout.costmodel.scenario import NO_TIME
from dtlayout.models.counting import FROZEN_FLOPS
from dtlayout.planner.verdicts import fold_alike
from dtlayout.records.intervals import Alike, Interval
from dtlayout.spec.batch import Batch
from dtlayout.spec.cluster import SweepRecord
from dtlayout.spec.kernels import COMPILE_OPTIONS
from dtlayout.spec.layout import Layout
from dtlayout.spec.optimizers import AdamW

BASELINE_NAMES = {"thumb": "the rule of thumb", "playbook": "the Ultra-Scale Playbook"}
OUTCOMES = {
    "not legal": "It is not legal", "does not fit": "It does not fit",
    "too full": "It leaves too little memory free", "slower": "It is slower",
    "as fast": "It is as fast", "faster": "It is faster",
}  # fmt: skip
_BAR = 20
"""Letters of a bar of memory."""
_COUNTED = {
    "not legal": ("is not legal", "are not legal"), "slower kernels": ("has slower kernels", "have slower kernels"),
    "does not fit": ("does not fit", "do not fit"),
    "bounded": ("is slower whatever else it costs", "are slower whatever else they cost"),
    "slower": ("was simulated and is slower", "were simulated and are slower"),
    "alike": ("is a variant of one above", "are variants of those above"),
}  # fmt: skip


def describe(document: JsonDocument, width: int | None = None) -> Iterator[str]:
    """The lines of one search's document, the answer first: its parts, with an empty line between.

    They are folded at `width` columns, by default those of the terminal.
    """
    width = find_width() if width is None else width
    yield from _describe_job(document, [document["scenario"]["num_gpus"]], width)
    yield from ("", *_list_layouts(document, width), "")
    for line in _list_sentences(document, width):
        yield from fold(line, width)


def _list_sentences(document: JsonDocument, width: int) -> Iterator[str]:
    """Lines below the table of layouts: first what stands against others, last what predictions rest on."""
    yield from _list_remarks(document)
    for list_part in (
        _list_dry_runs,
        partial(_list_others, width=width),
        _answer_why_not,
        _describe_baseline,
        _describe_yours,
        _describe_emitted,
    ):
        if lines := list(list_part(document)):
            yield from ("", *lines)
    yield from ("", describe_counts(document["searched"]), "", *_describe_basis(document))


def _list_layouts(document: JsonDocument, width: int) -> list[str]:
    """A line for each layout with its speed and a bar of memory, then one with the shares of its step.

    Where a line would be wider than `width`, the name stands above the numbers.
    """
    layouts = [["   layout", "MFU", "tokens/s/GPU", "step s", "memory of the busiest rank, GiB"]]
    shares = [["   of the step, %", *document["layouts"][0]["time"]]]
    for place, each in enumerate(document["layouts"], start=1):
        name, step_time_s = f"{place:<3}{each['name']}", each["step_time_s"]
        layouts.append([name, _describe_mfu(document, each), _speed(each), f"{step_time_s:.3f}", _bar(each)])
        shares.append([f"{place:<3}", *(f"{100 * seconds / step_time_s:.1f}" for seconds in each["time"].values())])
    first = f"<{max(len(row[0]) for row in layouts) - 11}"
    table = align(layouts, ("<", ">18", ">12", ">8", "<"))
    of_step = align(shares, (first, *[">9"] * (len(shares[0]) - 1)))
    if max(map(len, table)) > width:
        numbers = align([["  ", *row[1:]] for row in layouts], ("<", ">18", ">12", ">8", "<"))
        table = [line for row, below in zip(layouts, numbers, strict=True) for line in (row[0], below)]
    if max(map(len, of_step)) > width:
        of_step = align([["% of a step", *shares[0][1:]], *shares[1:]])
    return [*table, "", *of_step]


def _list_remarks(document: JsonDocument) -> Iterator[str]:
    """Why each layout stands before the next one, and remarks on the best."""
    layouts = document["layouts"]
    yield from (f"{place}  {each['why']}." for place, each in enumerate(layouts, start=1) if each["why"])
    if document["alike"]:
        yield str(Alike(**document["alike"]))
    yield from filter(None, (describe_simplest(document["simplest"]), describe_usual(document["usual"])))
    yield from document["remarks"]
    if document["_is_smallest"]:
        number = document["scenario"]["num_gpus"]
        yield f"Fewest GPUs that train it: {number}. Parts of a node and whole nodes were tried."
    if "cost" in document:
        yield _describe_cost(document["cost"])
    unused = {*COMPILE_OPTIONS, *([] if document["scenario"]["model"]["experts"] else ["experts"])}
    kernels = {name: kernel for name, kernel in layouts[0]["kernels"].items() if name not in unused}
    yield f"Kernels of 1: {', '.join(f'{name} {kernel}' for name, kernel in kernels.items())}."


def describe_simplest(simplest: JsonDocument | None) -> str:
    """A sentence on the simplest of the leading layouts, which is the first; "" where one leads alone."""
    if simplest is None:
        return ""
    slower = simplest["slower_than_fastest"]
    cost = f", and predicted {slower:.1%} slower than the fastest of them" if slower >= 0.0005 else ""
    return (
        f"1 is the simplest of places 1 to {simplest['places']}{cost}: of layouts so near each other, fewer than three "
        f"of four pairs came in the predicted order."
    )


def describe_usual(usual: JsonDocument | None) -> str:
    """Sentences on the layout that a vendor or the program published for such a job; "" where none is known."""
    if usual is None:
        return ""
    layout, slower = usual["layout"], usual["slower_than_best"]
    than = (
        "as fast as 1" if abs(slower) < 0.0005 else f"{abs(slower):.1%} {'slower' if slower > 0 else 'faster'} than 1"
    )
    said = (
        f"{usual['who']} for {usual['model']} in {usual['program']}, {layout['name']}: {layout['step_time_s']:.3f} s a "
        f"step, {than}"
    )
    if not usual["has_room"]:
        needed, capacity = usual["needed_bytes"] / GIB, layout["capacity_bytes"] / GIB
        why = "--max-memory 1.0 allows that" if usual["fits"] else "which may be the prediction's error"
        said += f"; it needs {needed:.1f} of {capacity:.1f} GiB, {why}"
    if usual["doubt"]:
        said += (
            f". 1 beats it by far, {usual['doubt']}: treat that with care, since a vendor measures, and measure both"
        )
    return f"{said}."


def _list_dry_runs(document: JsonDocument) -> Iterator[str]:
    if found := document.get("verified"):
        yield from ("Dry runs:", *(f"  {describe_dry_run(each)}" for each in found))


def describe_dry_run(verified: JsonDocument) -> str:
    """A sentence on the peak that a dry run of a layout held, beside the predicted one."""
    peak_bytes, predicted_bytes = verified["peak_memory_bytes"], verified["predicted_peak_memory_bytes"]
    return (
        f"{Layout(**verified['layout'])}: {peak_bytes / GIB:.2f} GiB, predicted {predicted_bytes / GIB:.2f} "
        f"({predicted_bytes / peak_bytes - 1:+.1%}), {'fits' if verified['fits'] else 'does not fit'}"
    )


def _list_others(document: JsonDocument, width: int) -> Iterator[str]:
    """Other choices than those of the best layout, each with what stands against it: a table, or lines to be folded."""
    if document["against"]:
        best = Layout(**document["layouts"][0]["layout"])
        yield f"Against other choices than those of 1, {best}, each with the best of all else,"
        yield "but beside another kernel or tp_overlap with the degrees and the schedule of 1:"
        found = _fold_against(document)
        table = align([(f"  {changes}", verdict) for changes, verdict in found], ("<", "<"))
        is_wide = max(map(len, table)) > width
        yield from (f"  {changes}: {verdict}" for changes, verdict in found) if is_wide else table


def _fold_against(document: JsonDocument) -> list[tuple[str, str]]:
    """Choices → the outcome with its first reason; choices of which the same is said are one row."""
    folded = fold_alike([(each["change"], each) for each in document["against"]], _shorten)
    return [(changes, _shorten(each)) for changes, each in folded]


def _shorten(verdict: JsonDocument) -> str:
    """The outcome with its first reason; a reason that is a difference in speed says the outcome itself."""
    reason = verdict["problems"][0]
    before = {
        "not legal": "not legal: ", "does not fit": f"does not fit, as {verdict['name']}: ",
        "too full": f"leaves too little memory free, as {verdict['name']}: ",
    }  # fmt: skip
    return before.get(verdict["outcome"], f"{verdict['name']}: ") + reason


def _answer_why_not(document: JsonDocument) -> Iterator[str]:
    """Reasons against the layout that was asked about, and the best layout with its choices."""
    if not (found := document.get("why_not")):
        return
    yield f"Why not {found['name']}? {OUTCOMES[found['outcome']]}:"
    yield from (f"  {problem}" for problem in found["problems"])
    best, reopened = found["best_with_these_choices"], found["best_with_other_recompute"]
    if best is None:
        yield "  No layout with these choices is legal and fits."
        if reopened:
            layout, difference = Layout(**reopened["layout"]), document["_why_not_difference"]
            yield f"  One that recomputes otherwise does, {layout}, and is {difference}."
    elif best["layout"] == found["layout"]:
        yield "  It is the best with these choices."
    else:
        difference = document["_why_not_difference"]
        yield f"  The best with these choices, {Layout(**best['layout'])}, is {difference}."
    if found["fits_only_without_margin"]:
        yield "  It fits only without the margin, as with --max-memory 1.0."


def _describe_baseline(document: JsonDocument) -> Iterator[str]:
    """The layout that a well-known procedure chooses, and its steps."""
    if not (found := document.get("baseline")):
        return
    name = f"The {BASELINE_NAMES[found['name']].removeprefix('the ')}"
    if (chosen := found["layout"]) is None:
        yield f"{name} finds no layout that is legal and fits."
        return
    speed = f"{_describe_speed(document, chosen)}, {chosen['step_time_s']:.3f} s a step"
    yield f"{name} chooses {Layout(**chosen['layout'])}: {speed}"
    yield from (f"  {step}" for step in found["steps"])
    yield f"  Against 1 it is {document['_baseline_difference']}."


def _describe_yours(document: JsonDocument) -> Iterator[str]:
    """The layout of the file of --like, and the best as changes of that file."""
    if not (yours := document.get("yours")):
        return
    if (chosen := yours["layout"]) is None:
        yield f"The layout of your file does not fit these GPUs: {'; '.join(yours['misfits'])}"
        return
    misfit = "" if yours["fits"] else ", and does not fit"
    yield f"Yours, {chosen['name']}: {_describe_speed(document, chosen)}, {chosen['step_time_s']:.3f} s a step{misfit}"
    yield f"  Against 1 it is {document['_yours_difference']}."
    if yours["change"] is not None:
        yield from wrap(f"  1 in {yours['path']}: ", yours["change"] or ["nothing to change"])
    if "written" in yours:
        yield f"  It is written to {yours['written']}."


def _describe_emitted(document: JsonDocument) -> Iterator[str]:
    """The file that was written, and what it cannot say."""
    if written := document.get("emitted_for"):
        form = ", as a shell script" * written["is_script"]
        yield f"1 is written to {document['emitted']}, for {written['program']}{form}"
        yield from (f"  {gap}" for gap in written["gaps"])


def describe_counts(searched: Mapping[str, Any], after: str = ":") -> str:
    """How many layouts a search looked at, and what became of them."""
    counted = [(searched["counts"][reason], texts) for reason, texts in _COUNTED.items()]
    parts = [f"{number:,} {one if number == 1 else many}" for number, (one, many) in counted if number]
    return f"{plural(searched['layouts'], 'layout', ',')}{f'{after} ' * bool(parts)}{', '.join(parts)}."


def list_reasons(document: JsonDocument) -> list[str]:
    """Why the best layout is the best, for people who find it in a file."""
    scenario, (best, *others) = document["scenario"], document["layouts"]
    low_s, high_s = best["step_time_range_s"]
    lines = [
        f"Predicted: {Layout(**best['layout'])}, {_describe_speed(document, best)}, {best['step_time_s']:.3f} s a step "
        f"({low_s:.3f} to {high_s:.3f}), {best['peak_bytes'] / GIB:.1f} of {best['capacity_bytes'] / GIB:.1f} GiB.",
        f"The range held for {_read_interval(document, 'step_time').basis}"
        f"{'' if scenario['calibrated'] else '; this engine is uncalibrated here'}.",
    ]
    lines += [f"The next best is {each['name']}; this is {document['_lead']}." for each in others[:1]]
    return lines + [f"{changes}: {verdict}" for changes, verdict in _fold_against(document)]


def _describe_job(document: JsonDocument, sizes: Sequence[int], width: int) -> Iterator[str]:
    """Lines on the model, the batch and the clusters; `sizes` are their GPUs."""
    scenario, linked = document["scenario"], document["_gpus_linked"]
    batch, gpu, per_node = scenario["batch"], scenario["gpu"], scenario["gpus_per_node"]
    nodes = f" in nodes of {per_node}" if max(sizes) > per_node > 1 else ""
    nodes += f", {linked} joined by fast links" if linked > per_node else ""
    keys = [f"{key}={value}" for key, value in scenario["optimizer_keys"].items()]
    by = " with ".join([scenario["optimizer"], *[", ".join(keys)] * bool(keys)])
    updated = "" if by == AdamW.name else f", updated by {by}"
    yield from fold(
        f"{scenario['model']['name']}, {scenario['parameters'] / 1e9:.2f} billion parameters{_say_trained(scenario)}, "
        f"on {', '.join(map(str, sizes))} x {gpu}{nodes}; {plural(batch['global_batch'], 'sequence')} of "
        f"{plural(batch['seq_len'], 'token')} a step{updated}",
        width,
    )
    if not scenario["knows_time"]:
        yield from fold(f"{NO_TIME}; use the seconds below only to compare layouts with each other", width)


def _describe_basis(document: JsonDocument) -> Iterator[str]:
    """Assumptions, and how far predictions are to be trusted."""
    scenario = document["scenario"]
    gpu = scenario["gpu"]
    step, peak = _read_interval(document, "step_time"), _read_interval(document, "peak_memory")
    known = "" if scenario["calibrated"] else f", uncalibrated: no run of it on {gpu} is known"
    yield f"engine {scenario['engine']}{known}{'; nothing like it was measured' * step.is_foreign}"
    yield from describe_assumptions(scenario["engine"], scenario["assumptions"])
    for name, interval in (("step", step), ("peak", peak)):
        yield f"{name} {interval.low:.2f} to {interval.high:.2f} times as predicted, for {interval.basis}"
    yield from filter(None, [_describe_margin(document.get("margin"))])
    yield from (str(SweepRecord(**record)) for record in scenario["records"])


def _describe_margin(margin: JsonDocument | None) -> str:
    """The line on the memory that is kept free; "" where none is, or where a user said how much."""
    if margin is None or margin["is_asked"]:
        return ""
    if margin["fits_only_without"]:
        return f"fits only without the margin, as with --max-memory 1.0: {margin['why']}"
    share = margin["max_memory"]
    if share == 1:
        return ""
    return f"at most {share:.0%} of a GPU's memory is filled, which {margin['why']}; --max-memory says otherwise"


def _say_trained(scenario: JsonDocument) -> str:
    """The share of the parameters that an adapter trains, and by what FLOPs its MFU counts; "" without one."""
    if (adapter := scenario["model"]["adapter"]) is None:
        return ""
    trained = f"{scenario['trained_parameters'] / 1e6:,.1f} million of them trained by {adapter['method']}"
    return f" ({trained}; MFU counts {FROZEN_FLOPS})"


def _read_interval(document: JsonDocument, quantity: str) -> Interval:
    return Interval(**document["scenario"]["intervals"][quantity])


def _describe_mfu(document: JsonDocument, layout: JsonDocument) -> str:
    """MFU of a layout with its range; the CPU has no peak, so no MFU."""
    if layout["mfu"] is None:
        return "n/a"
    step, percents = _read_interval(document, "step_time"), 100 * layout["mfu"]
    return f"{percents:.1f} ({percents / step.high:.0f} to {min(100.0, percents / step.low):.0f}) %"


def _describe_speed(document: JsonDocument, layout: JsonDocument) -> str:
    """MFU and tokens a second of a layout, in a sentence."""
    if layout["mfu"] is None:
        return "MFU n/a"
    return f"{_describe_mfu(document, layout)} MFU, {_speed(layout)} tokens/s/GPU"


def _speed(layout: JsonDocument) -> str:
    return three_digits(layout["tokens_per_s_per_gpu"])


def _bar(layout: JsonDocument) -> str:
    peak, capacity = layout["peak_bytes"], layout["capacity_bytes"]
    filled = round(_BAR * peak / capacity)
    return f"{'█' * filled}{'░' * (_BAR - filled)} {peak / GIB:.1f} / {capacity / GIB:.1f}"


def _describe_cost(cost: JsonDocument) -> str:
    """A sentence on what the training takes."""

    def around(name: str, show: Callable[[float], str] = "{:,.0f}".format) -> str:
        low, high = cost[f"{name}_range"]
        return f"{show(cost[name])} ({show(low)} to {show(high)})"

    parts = [f"{cost['steps']:,} steps", f"{around('days', _days)} days", f"{around('gpu_hours')} GPU-hours"]
    if cost["energy_mwh"] is not None:
        parts.append(f"up to {cost['energy_mwh']:,.1f} MWh at the GPUs' board power")
    if cost["money"] is not None:
        parts.append(f"{around('money')} at {cost['price_per_gpu_hour']:g} for a GPU-hour")
    return f"{format_tokens(cost['tokens'])} tokens take {', '.join(parts)}: steps alone, without restarts."


def describe_scale(document: JsonDocument) -> Iterator[str]:
    """The scenario's lines, and a table with one row for each cluster, in parts where the terminal is narrow."""
    rows, batch = document["scale"], Batch(**document["scenario"]["batch"])
    cells = [["GPUs", "layout", "MFU", "tokens/s/GPU", "step s", "tokens/s", "microbatches", "bubble", "efficiency"]]
    for row in rows:
        if (best := row["layout"]) is None:
            cells.append([str(row["num_gpus"]), "no layout is legal and fits", *[""] * 7])
            continue
        step_time_s = best["step_time_s"]
        cells.append([
            str(row["num_gpus"]), best["name"], _describe_mfu(document, best), _speed(best), f"{step_time_s:.3f}",
            f"{best['tokens_per_s']:,.0f}", str(Layout(**best["layout"]).num_microbatches(batch)),
            f"{best['time']['bubble'] / step_time_s:.1%}", f"{row['efficiency']:.1%}",
        ])  # fmt: skip
    if "tokens" in document:
        cells = [[*row, *cost] for row, cost in zip(cells, _list_costs(document), strict=True)]
    width = find_width()
    yield from _describe_job(document, [row["num_gpus"] for row in rows], width)
    yield from ("", *align_in_parts(cells, (">6", "<", ">18", ">12", ">8", ">12"), width))
    tight = [str(row["num_gpus"]) for row in rows if row["layout"] and row["margin"]["fits_only_without"]]
    if tight:
        yield from ("", f"On {' and '.join(tight)} GPUs it fits only without the margin, as with --max-memory 1.0.")
    yield ""
    for line in _describe_basis(document):
        yield from fold(line, width)


def _list_costs(document: JsonDocument) -> list[list[str]]:
    """Further columns of the table of clusters, the heading first; a mark stands at the first of equal clusters."""
    rows, has_price = document["scale"], document["price_per_gpu_hour"] is not None
    sizes = [row["num_gpus"] for row in rows]
    places = {name: None if size is None else sizes.index(size) for name, size in document["marks"].items()}
    head = ["days", "GPU-hours", "MWh", *["money"] * has_price, ""]
    cells = [head]
    for place, cost in enumerate(row["cost"] for row in rows):
        if cost is None:
            cells.append([""] * len(head))
            continue
        marks = ", ".join(name for name, marked in places.items() if marked == place)
        energy = "n/a" if cost["energy_mwh"] is None else f"{cost['energy_mwh']:,.0f}"
        money = [f"{cost['money']:,.0f}"] if has_price else []
        cells.append([_days(cost["days"]), f"{cost['gpu_hours']:,.0f}", energy, *money, marks])
    return cells


def _days(days: float) -> str:
    return f"{days:,.0f}" if days >= 100 else f"{days:.1f}"


def format_tokens(tokens: float) -> str:
    """A number of tokens as people say it.

    >>> format_tokens(15e12), format_tokens(2.5e9)
    ('15T', '2.5B')
    """
    for size, letter in ((1e12, "T"), (1e9, "B"), (1e6, "M")):
        if tokens >= size:
            return f"{tokens / size:g}{letter}"
    return f"{tokens:,.0f}"
