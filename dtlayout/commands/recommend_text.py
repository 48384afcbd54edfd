"""The answers of `recommend` in words and tables, for people."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

from dtlayout.commands.recommend_answer import Answer
from dtlayout.commands.text import describe_records
from dtlayout.costmodel.estimate import Estimate
from dtlayout.costmodel.scenario import Scenario
from dtlayout.kernels import Kernels
from dtlayout.models.counting import count_parameters
from dtlayout.planner.reasons import GIB, Verdict, describe_difference
from dtlayout.planner.search import SearchResult
from dtlayout.planner.sizing import ScaleRow

if TYPE_CHECKING:
    from dtlayout.commands.verify import Verified

_BAR = 20
_COUNTED = {
    "not legal": "not legal", "slower kernels": "with slower kernels", "does not fit": "do not fit",
    "bounded": "slower by their lower bound", "slower": "slower when simulated",
    "shared otherwise": "like one above but for kernels or sharding",
}  # fmt: skip


def to_text(answer: Answer) -> list[str]:
    """Everything that was asked."""
    lines = [*_describe_scenario(answer.scenario), "", *_table(answer.scenario, answer.result), ""]
    lines += [f"{place}  {lead}." for place, lead in enumerate(answer.leads, start=1)]
    if answer.verified:
        lines += ["", "Dry runs:", *(f"  {line}" for line in describe_dry_runs(answer.verified))]
    lines += ["", f"Against other choices than those of 1, {answer.best.layout}:"]
    width = max(len(name) for name, _ in answer.against)
    lines += [f"  {name:<{width}}  {_shorten(verdict)}" for name, verdict in answer.against]
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
    """One line a cluster."""
    tokens = scenario.batch.num_tokens
    width = max((len(full_name(row.estimate)) for row in rows if row.estimate), default=6)
    head = f"{'GPUs':>6}  {'layout':<{width}}  {'MFU':>12}  {'step s':>8}  {'tokens/s':>12}"
    lines = [*_describe_scenario(scenario), "", f"{head}  microbatches  bubble  efficiency"]
    for row in rows:
        if (e := row.estimate) is None:
            lines.append(f"{row.num_gpus:>6}  no layout is legal and fits")
            continue
        mfu, m = _describe_mfu(scenario, e, short=True), e.layout.num_microbatches(scenario.batch)
        lines.append(
            f"{row.num_gpus:>6}  {full_name(e):<{width}}  {mfu:>12}  {e.step_time_s:>8.3f}  "
            f"{tokens / e.step_time_s:>12,.0f}  {m:>12}  {e.time.bubble / e.step_time_s:>6.1%}  {row.efficiency:>10.1%}"
        )
    return lines


def describe_dry_runs(verified: Sequence["Verified"]) -> list[str]:
    """One line each."""
    return [
        f"{v.estimate.layout}: {v.peak_bytes / GIB:.2f} GiB, predicted {v.estimate.peak_bytes / GIB:.2f} "
        f"({v.estimate.peak_bytes / v.peak_bytes - 1:+.1%}), {'fits' if v.fits else 'does not fit'}"
        for v in verified
    ]


def describe_counts(result: SearchResult) -> str:
    """What became of all layouts."""
    parts = [f"{result.counts[reason]:,} {text}" for reason, text in _COUNTED.items() if result.counts[reason]]  # type: ignore[index]
    return f"{result.num_layouts:,} layouts: {', '.join(parts)}."


def full_name(estimate: Estimate) -> str:
    """With the kernels that are not the usual ones."""
    usual = asdict(Kernels())
    odd = [
        kernel if name == "attention" else f"{name} {kernel}"
        for name, kernel in asdict(estimate.kernels).items()
        if kernel != usual[name]
    ]
    return " ".join([str(estimate.layout), *odd])


def _describe_scenario(scenario: Scenario) -> list[str]:
    model, batch, cluster, engine = scenario.model, scenario.batch, scenario.cluster, scenario.engine
    known = "" if engine.is_calibrated else f", uncalibrated: no run of it on {engine.gpu} is known"
    per_node = cluster.gpus_per_node
    nodes = f" in nodes of {per_node}" if cluster.num_gpus > per_node > 1 else ""
    return [
        f"{model.name}, {count_parameters(model) / 1e9:.2f} billion parameters, on {cluster.num_gpus} x "
        f"{cluster.gpu.name}{nodes}; {batch.global_batch} sequences of {batch.seq_len} tokens a step",
        f"engine {engine.name}{known}; predicted speeds are good to about {engine.error:.0%}",
        *describe_records(cluster.records),
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
    parts = list(result.ranked[0].time.as_dict())
    width = max(6, *(len(full_name(e)) for e in result.ranked))
    head = f"   {'layout':<{width}}  {'MFU':>12}  {'step s':>8}  {'memory of the busiest rank, GiB':<{_BAR + 14}}"
    lines = [head]
    for place, e in enumerate(result.ranked, start=1):
        mfu = _describe_mfu(scenario, e, short=True)
        lines.append(f"{place:<3}{full_name(e):<{width}}  {mfu:>12}  {e.step_time_s:>8.3f}  {_bar(e)}")
    lines += ["", "   of the step, %".ljust(width - 8) + "".join(f"{part:>11}" for part in parts)]
    for place, e in enumerate(result.ranked, start=1):
        shares = "".join(f"{100 * seconds / e.step_time_s:>11.1f}" for seconds in e.time.as_dict().values())
        lines.append(f"{place:<3}".ljust(max(17, width - 8)) + shares)
    return lines


def _describe_mfu(scenario: Scenario, estimate: Estimate, short: bool = False) -> str:
    """With its band; the CPU has no peak that would make one."""
    if not scenario.cluster.gpu.has_mfu:
        return "n/a" if short else "MFU n/a"
    band = 100 * estimate.mfu * scenario.engine.error
    return f"{100 * estimate.mfu:.1f} ± {band:.1f} %" if short else f"{100 * estimate.mfu:.1f} ± {band:.1f} % MFU"


def _bar(estimate: Estimate) -> str:
    filled = round(_BAR * estimate.peak_bytes / estimate.capacity_bytes)
    sizes = f"{estimate.peak_bytes / GIB:.1f} / {estimate.capacity_bytes / GIB:.1f}"
    return f"{'█' * filled}{'░' * (_BAR - filled)} {sizes}"


def _shorten(verdict: Verdict) -> str:
    """The outcome with its first reason; a difference in speed says both."""
    is_refused = verdict.outcome in ("not legal", "does not fit")
    return f"{verdict.outcome}: {verdict.problems[0]}" if is_refused else verdict.problems[0]
