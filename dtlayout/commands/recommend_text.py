"""The answers of `recommend` in words and tables, for people."""

from collections.abc import Sequence

from dtlayout.commands.recommend_answer import Answer, Verified, full_name
from dtlayout.costmodel.estimate import Estimate
from dtlayout.costmodel.scenario import Scenario
from dtlayout.models.counting import count_parameters
from dtlayout.optimizers import AdamW
from dtlayout.planner.reasons import Verdict, describe_difference
from dtlayout.planner.search import SearchResult
from dtlayout.planner.sizing import ScaleRow
from dtlayout.text import GIB, align

_BAR = 20
_COUNTED = {
    "not legal": "not legal", "slower kernels": "with slower kernels", "does not fit": "do not fit",
    "bounded": "slower by their lower bound", "slower": "slower when simulated",
    "sharded otherwise": "like one above but for kernels or sharding",
}  # fmt: skip


def to_text(answer: Answer) -> list[str]:
    """The lines of a whole answer."""
    lines = [*_describe_scenario(answer.scenario), "", *_table(answer.scenario, answer.result), ""]
    lines += [f"{place}  {lead}." for place, lead in enumerate(answer.leads, start=1)]
    if answer.verified:
        lines += ["", "Dry runs:", *(f"  {line}" for line in describe_dry_runs(answer.verified))]
    lines += ["", f"Against other choices than those of 1, {answer.best.layout}:"]
    lines += align([(f"  {name}", _shorten(verdict)) for name, verdict in answer.against], ("<", "<"))
    if answer.why_not:
        lines += ["", f"Why not {answer.why_not.layout}? It is {answer.why_not.outcome}:"]
        lines += [f"  {problem}" for problem in answer.why_not.problems]
        lines += _describe_completion(answer)
    if answer.options.baseline:
        lines += ["", *_describe_baseline(answer)]
    if answer.options.emit:
        lines += ["", f"1 is written to {answer.options.emit}"]
    return [*lines, "", describe_counts(answer.result)]


def give_reasons(answer: Answer) -> list[str]:
    """Why the best is the best, for people who find it in a file."""
    band = answer.scenario.engine.error
    lines = [
        f"Predicted: {answer.best.layout}, {_describe_mfu(answer.scenario, answer.best)}, "
        f"{answer.best.step_time_s:.3f} s a step (each to about {band:.0%}"
        f"{'' if answer.scenario.engine.is_calibrated else ', uncalibrated'}), "
        f"{answer.best.peak_bytes / GIB:.1f} of {answer.best.capacity_bytes / GIB:.1f} GiB.",
    ]
    if answer.leads:
        lines.append(f"Before the next best, {answer.result.ranked[1].layout}: {answer.leads[0]}.")
    return lines + [f"{name}: {verdict.problems[0]}" for name, verdict in answer.against]


def list_scale(scenario: Scenario, rows: Sequence[ScaleRow]) -> list[str]:
    """The lines that compare clusters, one for each below the scenario."""
    cells = [["GPUs", "layout", "MFU", "step s", "tokens/s", "microbatches", "bubble", "efficiency"]]
    for row in rows:
        if (e := row.estimate) is None:
            cells.append([str(row.num_gpus), "no layout is legal and fits", *[""] * 6])
            continue
        cells.append([
            str(row.num_gpus), full_name(e), _describe_mfu(scenario, e, short=True), f"{e.step_time_s:.3f}",
            f"{scenario.batch.num_tokens / e.step_time_s:,.0f}", str(e.layout.num_microbatches(scenario.batch)),
            f"{e.time.bubble / e.step_time_s:.1%}", f"{row.efficiency:.1%}",
        ])  # fmt: skip
    return [*_describe_scenario(scenario), "", *align(cells, (">6", "<", ">12", ">8", ">12"))]


def describe_dry_runs(verified: Sequence[Verified]) -> list[str]:
    """A line for each layout that was dry-run."""
    return [
        f"{v.estimate.layout}: {v.peak_bytes / GIB:.2f} GiB, predicted {v.estimate.peak_bytes / GIB:.2f} "
        f"({v.estimate.peak_bytes / v.peak_bytes - 1:+.1%}), {'fits' if v.fits else 'does not fit'}"
        for v in verified
    ]


def describe_counts(result: SearchResult) -> str:
    """What became of all layouts of a search, in a line."""
    parts = [f"{result.counts[reason]:,} {text}" for reason, text in _COUNTED.items() if result.counts[reason]]  # type: ignore[index]
    return f"{result.num_layouts:,} layouts: {', '.join(parts)}."


def _describe_scenario(scenario: Scenario) -> list[str]:
    model, batch, cluster, engine = scenario.model, scenario.batch, scenario.cluster, scenario.engine
    known = "" if engine.is_calibrated else f", uncalibrated: no run of it on {engine.gpu} is known"
    per_node = cluster.gpus_per_node
    nodes = f" in nodes of {per_node}" if cluster.num_gpus > per_node > 1 else ""
    updated = "" if scenario.optimizer == AdamW() else f", updated by {scenario.optimizer.name}"
    return [
        f"{model.name}, {count_parameters(model) / 1e9:.2f} billion parameters, on {cluster.num_gpus} x "
        f"{cluster.gpu.name}{nodes}; {batch.global_batch} sequences of {batch.seq_len} tokens a step{updated}",
        f"engine {engine.name}{known}; predicted speeds are good to about {engine.error:.0%}",
        *map(str, cluster.records),
    ]


def _describe_completion(answer: Answer) -> list[str]:
    if answer.completed is None:
        return ["  No layout with these choices is legal and fits."]
    if answer.why_not and answer.completed.layout == answer.why_not.layout:
        return ["  It is the best with these choices."]
    difference = describe_difference(answer.best, answer.completed)
    return [f"  The best with these choices, {answer.completed.layout}, is {difference}."]


def _describe_baseline(answer: Answer) -> list[str]:
    name = {"thumb": "The rule of thumb", "playbook": "The Ultra-Scale Playbook"}[answer.options.baseline]
    if answer.baseline is None:
        return [f"{name} finds no layout that is legal and fits."]
    found = answer.baseline.estimate
    return [
        f"{name} chooses {found.layout}: {_describe_mfu(answer.scenario, found)}, {found.step_time_s:.3f} s a step",
        *(f"  {step}" for step in answer.baseline.steps),
        f"  Against 1 it is {describe_difference(answer.best, found)}.",
    ]


def _table(scenario: Scenario, result: SearchResult) -> list[str]:
    places = [f"{place:<3}" for place in range(1, len(result.ranked) + 1)]
    layouts = [["   layout", "MFU", "step s", "memory of the busiest rank, GiB"]]
    layouts += [
        [place + full_name(e), _describe_mfu(scenario, e, short=True), f"{e.step_time_s:.3f}", _bar(e)]
        for place, e in zip(places, result.ranked, strict=True)
    ]
    shares = [["   of the step, %", *result.ranked[0].time.as_dict()]]
    shares += [
        [place, *(f"{100 * seconds / e.step_time_s:.1f}" for seconds in e.time.as_dict().values())]
        for place, e in zip(places, result.ranked, strict=True)
    ]
    names = max(len(row[0]) for row in layouts)
    return [
        *align(layouts, ("<", ">12", ">8", "<")), "",
        *align(shares, (f"<{names - 11}", *[">9"] * (len(shares[0]) - 1))),
    ]  # fmt: skip


def _describe_mfu(scenario: Scenario, estimate: Estimate, short: bool = False) -> str:
    """MFU with its error band; the CPU has no peak, so no MFU."""
    if not scenario.cluster.gpu.has_mfu:
        return "n/a" if short else "MFU n/a"
    band = 100 * estimate.mfu * scenario.engine.error
    return f"{100 * estimate.mfu:.1f} ± {band:.1f} %" if short else f"{100 * estimate.mfu:.1f} ± {band:.1f} % MFU"


def _bar(estimate: Estimate) -> str:
    peak, capacity = estimate.peak_bytes, estimate.capacity_bytes
    filled = round(_BAR * peak / capacity)
    return f"{'█' * filled}{'░' * (_BAR - filled)} {peak / GIB:.1f} / {capacity / GIB:.1f}"


def _shorten(verdict: Verdict) -> str:
    """The outcome with its first reason; a difference in speed says both."""
    is_refused = verdict.outcome in ("not legal", "does not fit")
    return f"{verdict.outcome}: {verdict.problems[0]}" if is_refused else verdict.problems[0]
