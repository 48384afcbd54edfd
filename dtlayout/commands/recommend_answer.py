"""One search's answer, as values, JSON and text: the best layouts, what stands against others, all that was asked."""

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from dtlayout import toml
from dtlayout.costmodel.estimate import Estimate, Estimator
from dtlayout.costmodel.scenario import Scenario, engine_kernels
from dtlayout.errors import InvalidLayout
from dtlayout.kernels import Kernels, OpenKernels
from dtlayout.layout import Layout
from dtlayout.models.counting import count_parameters
from dtlayout.optimizers import AdamW
from dtlayout.planner import reasons
from dtlayout.planner.baselines import Baseline, choose_by_playbook, choose_by_thumb
from dtlayout.planner.intervals import Intervals, find_intervals, find_least_apart, find_order
from dtlayout.planner.search import Search, SearchResult
from dtlayout.planner.sizing import ScaleRow
from dtlayout.planner.space import Space, parse_choice
from dtlayout.text import GIB, align, plural

BASELINES = {"thumb": choose_by_thumb, "playbook": choose_by_playbook}
_BAR = 20
_COUNTED = {
    "not legal": "not legal", "slower kernels": "with slower kernels", "does not fit": "do not fit",
    "bounded": "slower by their lower bound", "slower": "slower when simulated",
    "sharded otherwise": "like one above but for kernels or sharding",
}  # fmt: skip


class Verified(NamedTuple):
    """A layout and what a dry run of it held."""

    estimate: Estimate
    peak_bytes: int
    """Most bytes that one of the default ranks held, less what torch.compile spares by the formula."""
    fits: bool
    """Whether that fits, with what the engine's allocator holds beside tensors."""


def verify(scenario: Scenario, result: SearchResult, number: int) -> list[Verified]:
    """Dry-run the first `number` of the best layouts, and further ones until one fits.

    Each with the config that `--emit` writes; refuses what a dry run cannot execute, and layouts of which none fits.
    """
    from dtlayout.commands.emit import make_config
    from dtlayout.config import parse_config
    from dtlayout.dryrun.choose import choose_kernels, default_ranks
    from dtlayout.dryrun.ranks import dry_run_ranks  # only now: it imports torch

    gpu, found = scenario.cluster.gpu, list[Verified]()
    for estimate in result.ranked:
        config = parse_config(toml.loads(make_config(Path("verified.toml"), scenario, estimate, ())))
        kernels, _ = choose_kernels(config, estimate.layout, gpu)
        reports = dry_run_ranks(
            config, estimate.layout, kernels, default_ranks(estimate.layout, estimate),
            device_type=gpu.device_type, gpus_per_node=scenario.cluster.gpus_per_node,
        )  # fmt: skip
        eager = Estimator(scenario).estimate(estimate.layout, kernels)
        spared = round(eager.peak_bytes - estimate.peak_bytes)
        peak_bytes = max(report.peak_bytes for report in reports) - spared
        fits = peak_bytes + scenario.engine.constants.overhead_bytes <= result.allowed_bytes
        found.append(Verified(estimate, peak_bytes, fits))
        if len(found) >= number and any(v.fits for v in found):
            break
    if any(v.fits for v in found):
        return found
    advice = "use a larger --top or a smaller --max-memory"
    problem = f"none of the {len(found)} best fits when it is dry-run; {advice}"
    raise InvalidLayout([problem, *_describe_dry_runs(found)])


class Alike(NamedTuple):
    """How far down the list of the best its order may be chance."""

    places: int
    """Leading places that cannot be told apart; 1 where the first stands alone."""
    least: float
    """Difference of the predicted steps, over the shorter one, from which on pairs are counted."""
    most: float | None
    """Difference up to which they are; None where that is open."""
    pairs: int
    """Pairs of measured layouts of one sweep that were predicted so far apart."""
    right: int
    """Those of them that came in their predicted order."""

    def __str__(self) -> str:
        share = f"{100 * self.right / self.pairs:.0f} of 100 times"
        if self.places == 1:
            return f"1 is apart from 2: layouts predicted {self.least:.1%} apart or more came in that order {share}."
        within = "any distance" if self.most is None else f"{self.most:.1%}"
        return (
            f"Places 1 to {self.places} cannot be told apart: layouts predicted within {within} of each other came in "
            f"the predicted order {share}."
        )


def find_alike(times_s: Sequence[float], engine: str) -> Alike | None:
    """How many of the leading layouts cannot be told apart, by their steps; None where there is nothing to compare."""
    orders = find_order(engine)
    apart, fastest_s = find_least_apart(orders), min(times_s)
    differences = [time_s / fastest_s - 1 for time_s in times_s]
    places = next((i for i, difference in enumerate(differences) if difference >= apart), len(differences))
    if places > 1:
        counted = [order for order in orders if order.least <= max(differences[:places])]
        most = min((order.least for order in orders if order not in counted), default=None)
    else:
        counted = [order for order in orders if order.least >= apart]
        most = None
    pairs, right = (sum(getattr(order, name) for order in counted) for name in ("pairs", "right"))
    if len(times_s) < 2 or not pairs:
        return None
    return Alike(max(places, 1), 0.0 if places > 1 else apart, most, pairs, right)


class Answer:
    """Everything that one search has to say."""

    def __init__(self, search: Search, result: SearchResult, options: argparse.Namespace, verified: Sequence[Verified]):
        self.result, self.options, self.verified = result, options, verified
        self.scenario, self.best = search.space.scenario, result.ranked[0]
        pairs = enumerate(pairwise(result.ranked), start=2)
        self.alike = find_alike([estimate.step_time_s for estimate in result.ranked], self.scenario.engine.name)
        self.leads = [reasons.describe_lead(own, following, place) for place, (own, following) in pairs]

        def verdict(layout: Layout, kernels: Kernels) -> reasons.Verdict:
            return reasons.judge(search, layout, kernels, self.best)

        others = reasons.neighbours(search, self.best)
        self.against = [(name, verdict(layout, kernels)) for name, layout, kernels in others]
        self.why_not: reasons.Verdict | None = None
        self.completed: Estimate | None = None
        self.baseline: Baseline | None = None
        if options.why_not:
            choices = dict(parse_choice(text) for text in options.why_not.split(","))
            self.why_not = verdict(*reasons.parse_layout(search.space, choices))
            wanted = Space(self.scenario, {**search.space.fixed, **choices}, search.space.avoided)
            self.completed = next(iter(Search(wanted, options.max_memory).run(top=1).ranked), None)
        if options.baseline:
            self.baseline = BASELINES[options.baseline](Search(Space(self.scenario), options.max_memory))

    def to_document(self) -> dict[str, Any]:
        """The document of it all, for `--json`."""
        scenario, result, options = self.scenario, self.result, self.options
        whys = [*self.leads, None]
        document: dict[str, Any] = {
            "ok": True,
            "scenario": _to_scenario(scenario, result.allowed_bytes),
            "searched": {"layouts": result.num_layouts, "counts": result.counts},
            "layouts": [{**_to_layout(scenario, e), "why": why} for e, why in zip(result.ranked, whys, strict=True)],
            "alike": self.alike and self.alike._asdict(),
            "against": [{"change": name, **_to_verdict(verdict)} for name, verdict in self.against],
        }
        if self.verified:
            document["verified"] = [
                {"layout": asdict(v.estimate.layout), "peak_memory_bytes": v.peak_bytes,
                 "predicted_peak_memory_bytes": v.estimate.peak_bytes, "fits": v.fits}
                for v in self.verified
            ]  # fmt: skip
        if self.why_not:
            completed = self.completed and _to_layout(scenario, self.completed)
            document["why_not"] = {**_to_verdict(self.why_not), "best_with_these_choices": completed}
        if options.baseline:
            document["baseline"] = {"name": options.baseline, "layout": None}
            if found := self.baseline:
                document["baseline"] |= {
                    "layout": _to_layout(scenario, found.estimate), "steps": found.steps,
                    "slower_than_best": found.estimate.step_time_s / self.best.step_time_s - 1,
                }  # fmt: skip
        if options.emit:
            document["emitted"] = str(options.emit)
        return document

    def to_lines(self) -> list[str]:
        """The lines of it all, for people."""
        best, options = self.best, self.options
        lines = [*_describe_scenario(self.scenario), "", *_table(self.scenario, self.result), ""]
        lines += [f"{place}  {lead}." for place, lead in enumerate(self.leads, start=1)]
        lines += [str(self.alike)] * (self.alike is not None)
        if self.verified:
            lines += ["", "Dry runs:", *(f"  {line}" for line in _describe_dry_runs(self.verified))]
        lines += ["", f"Against other choices than those of 1, {best.layout}:"]
        lines += align([(f"  {name}", _shorten(verdict)) for name, verdict in self.against], ("<", "<"))
        if self.why_not:
            lines += ["", f"Why not {self.why_not.layout}? It is {self.why_not.outcome}:"]
            lines += [f"  {problem}" for problem in self.why_not.problems]
            if self.completed is None:
                lines.append("  No layout with these choices is legal and fits.")
            elif self.completed.layout == self.why_not.layout:
                lines.append("  It is the best with these choices.")
            else:
                difference = reasons.describe_difference(best, self.completed)
                lines.append(f"  The best with these choices, {self.completed.layout}, is {difference}.")
        if options.baseline:
            name = {"thumb": "The rule of thumb", "playbook": "The Ultra-Scale Playbook"}[options.baseline]
            if self.baseline is None:
                lines += ["", f"{name} finds no layout that is legal and fits."]
            else:
                chosen, steps = self.baseline.estimate, self.baseline.steps
                speed = f"{_describe_mfu(self.scenario, chosen)}, {chosen.step_time_s:.3f} s a step"
                lines += ["", f"{name} chooses {chosen.layout}: {speed}", *(f"  {step}" for step in steps)]
                lines.append(f"  Against 1 it is {reasons.describe_difference(best, chosen)}.")
        if options.emit:
            lines += ["", f"1 is written to {options.emit}"]
        return [*lines, "", _describe_counts(self.result)]

    def give_reasons(self) -> list[str]:
        """Why the best is the best, for people who find it in a file."""
        best, of_step = self.best, find_intervals(self.scenario).step_time
        is_known = self.scenario.engine.is_calibrated
        low_s, high_s = of_step.around(best.step_time_s)
        lines = [
            f"Predicted: {best.layout}, {_describe_mfu(self.scenario, best)}, {best.step_time_s:.3f} s a step "
            f"({low_s:.3f} to {high_s:.3f}), {best.peak_bytes / GIB:.1f} of {best.capacity_bytes / GIB:.1f} GiB.",
            f"The range held for {of_step.basis}{'' if is_known else '; this engine is uncalibrated here'}.",
        ]
        if self.leads:
            lines.append(f"Before the next best, {self.result.ranked[1].layout}: {self.leads[0]}.")
        return lines + [f"{name}: {verdict.problems[0]}" for name, verdict in self.against]


def to_scale_document(scenario: Scenario, rows: Sequence[ScaleRow]) -> dict[str, Any]:
    """The document that compares clusters, an entry for each."""
    entries = [
        {"num_gpus": row.num_gpus, "efficiency": row.efficiency,
         "layout": row.estimate and _to_layout(scenario, row.estimate)}
        for row in rows
    ]  # fmt: skip
    return {"ok": True, "scenario": _to_scenario(scenario, None), "scale": entries}


def list_scale(scenario: Scenario, rows: Sequence[ScaleRow]) -> list[str]:
    """The lines that compare clusters, one for each below the scenario."""
    cells = [["GPUs", "layout", "MFU", "step s", "tokens/s", "microbatches", "bubble", "efficiency"]]
    for row in rows:
        if (e := row.estimate) is None:
            cells.append([str(row.num_gpus), "no layout is legal and fits", *[""] * 6])
            continue
        cells.append([
            str(row.num_gpus), _full_name(scenario, e), _describe_mfu(scenario, e, short=True), f"{e.step_time_s:.3f}",
            f"{scenario.batch.num_tokens / e.step_time_s:,.0f}", str(e.layout.num_microbatches(scenario.batch)),
            f"{e.time.bubble / e.step_time_s:.1%}", f"{row.efficiency:.1%}",
        ])  # fmt: skip
    return [*_describe_scenario(scenario), "", *align(cells, (">6", "<", ">18", ">8", ">12"))]


def explain_nothing(space: Space, result: SearchResult) -> list[str]:
    """Why there is no layout, and what would help."""
    problems = [f"no layout can train {space.scenario.model.name} here: {_describe_counts(result)}"]
    if missed := result.smallest_oom:
        text = reasons.describe_shortage(missed, result.allowed_bytes)
        problems.append(f"the one that misses by least, {missed.layout}: {text}")
        problems.append("--min-gpus finds the smallest cluster that works; a shorter --seq-len needs less")
    else:
        layout, kernels = reasons.parse_layout(space, {})
        problems += [f"for example {layout}: {line}" for line in reasons.find_problems(space, layout, kernels)]
        problems.append("use another number of GPUs or global batch, or fewer --fix and --avoid")
    return problems


def _full_name(scenario: Scenario, estimate: Estimate) -> str:
    """A layout with the kernels that are not the usual ones."""
    usual = asdict(engine_kernels(scenario, OpenKernels(), estimate.layout))
    kernels = asdict(estimate.kernels).items()
    odd = [kernel if name == "attention" else f"{name} {kernel}" for name, kernel in kernels if kernel != usual[name]]
    return " ".join([str(estimate.layout), *odd])


def _to_scenario(scenario: Scenario, allowed_bytes: float | None) -> dict[str, Any]:
    return {
        "model": asdict(scenario.model), "parameters": count_parameters(scenario.model),
        "batch": asdict(scenario.batch), "gpu": scenario.cluster.gpu.name, "num_gpus": scenario.cluster.num_gpus,
        "gpus_per_node": scenario.cluster.gpus_per_node, "engine": scenario.engine.name,
        "calibrated": scenario.engine.is_calibrated,
        "intervals": find_intervals(scenario).to_dict(),
        "records": [asdict(record) for record in scenario.cluster.records],
        "precision": asdict(scenario.precision), "optimizer": scenario.optimizer.name, "allowed_bytes": allowed_bytes,
    }  # fmt: skip


def _to_layout(scenario: Scenario, e: Estimate) -> dict[str, Any]:
    intervals = find_intervals(scenario)
    return {
        "name": _full_name(scenario, e), "layout": asdict(e.layout), "kernels": asdict(e.kernels),
        "stage_layers": e.stage_layers,
        "mfu": e.mfu if scenario.cluster.gpu.has_mfu else None, "step_time_s": e.step_time_s,
        "tokens_per_s": scenario.batch.num_tokens / e.step_time_s, "time": e.time.as_dict(),
        "memory": [rank.as_dict() for rank in e.memory], "busiest_rank": e.busiest_rank, "peak_bytes": e.peak_bytes,
        "capacity_bytes": e.capacity_bytes, "step_time_range_s": intervals.step_time.around(e.step_time_s),
        "peak_range_bytes": intervals.peak_memory.around(e.peak_bytes),
    }  # fmt: skip


def _to_verdict(verdict: reasons.Verdict) -> dict[str, Any]:
    return {
        "layout": asdict(verdict.layout), "kernels": asdict(verdict.kernels), "outcome": verdict.outcome,
        "problems": verdict.problems, "step_time_s": verdict.estimate.step_time_s if verdict.estimate else None,
        "peak_bytes": verdict.estimate.peak_bytes if verdict.estimate else None,
    }  # fmt: skip


def _describe_dry_runs(verified: Sequence[Verified]) -> list[str]:
    return [
        f"{v.estimate.layout}: {v.peak_bytes / GIB:.2f} GiB, predicted {v.estimate.peak_bytes / GIB:.2f} "
        f"({v.estimate.peak_bytes / v.peak_bytes - 1:+.1%}), {'fits' if v.fits else 'does not fit'}"
        for v in verified
    ]


def _describe_counts(result: SearchResult) -> str:
    parts = [f"{result.counts[reason]:,} {text}" for reason, text in _COUNTED.items() if result.counts[reason]]  # type: ignore[index]
    return f"{plural(result.num_layouts, 'layout', ',')}: {', '.join(parts)}."


def _describe_scenario(scenario: Scenario) -> list[str]:
    model, batch, cluster, engine = scenario.model, scenario.batch, scenario.cluster, scenario.engine
    intervals = find_intervals(scenario)
    known = "" if engine.is_calibrated else f", uncalibrated: no run of it on {engine.gpu} is known"
    known += "; nothing like it was measured" * intervals.step_time.is_foreign
    per_node = cluster.gpus_per_node
    nodes = f" in nodes of {per_node}" if cluster.num_gpus > per_node > 1 else ""
    nodes += f", {cluster.gpus_linked} joined by fast links" if cluster.gpus_linked > per_node else ""
    updated = "" if scenario.optimizer == AdamW() else f", updated by {scenario.optimizer.name}"
    return [
        f"{model.name}, {count_parameters(model) / 1e9:.2f} billion parameters, on {cluster.num_gpus} x "
        f"{cluster.gpu.name}{nodes}; {plural(batch.global_batch, 'sequence')} of {plural(batch.seq_len, 'token')} "
        f"a step{updated}",
        f"engine {engine.name}{known}",
        *_describe_intervals(intervals),
        *map(str, cluster.records),
    ]


def _describe_intervals(intervals: Intervals) -> Iterator[str]:
    for name, interval in zip(("step", "peak"), intervals, strict=True):
        yield f"{name} {interval.low:.2f} to {interval.high:.2f} times as predicted, for {interval.basis}"


def _table(scenario: Scenario, result: SearchResult) -> list[str]:
    layouts = [["   layout", "MFU", "step s", "memory of the busiest rank, GiB"]]
    shares = [["   of the step, %", *result.ranked[0].time.as_dict()]]
    for place, e in enumerate(result.ranked, start=1):
        mfu, name = _describe_mfu(scenario, e, short=True), f"{place:<3}{_full_name(scenario, e)}"
        layouts.append([name, mfu, f"{e.step_time_s:.3f}", _bar(e)])
        parts = [f"{100 * seconds / e.step_time_s:.1f}" for seconds in e.time.as_dict().values()]
        shares.append([f"{place:<3}", *parts])
    first = f"<{max(len(row[0]) for row in layouts) - 11}"
    return [*align(layouts, ("<", ">18", ">8", "<")), "", *align(shares, (first, *[">9"] * (len(shares[0]) - 1)))]


def _describe_mfu(scenario: Scenario, estimate: Estimate, short: bool = False) -> str:
    """MFU with its range; the CPU has no peak, so no MFU."""
    if not scenario.cluster.gpu.has_mfu:
        return "n/a" if short else "MFU n/a"
    of_step, percents = find_intervals(scenario).step_time, 100 * estimate.mfu
    text = f"{percents:.1f} ({percents / of_step.high:.0f} to {percents / of_step.low:.0f}) %"
    return text if short else f"{text} MFU"


def _bar(estimate: Estimate) -> str:
    peak, capacity = estimate.peak_bytes, estimate.capacity_bytes
    filled = round(_BAR * peak / capacity)
    return f"{'█' * filled}{'░' * (_BAR - filled)} {peak / GIB:.1f} / {capacity / GIB:.1f}"


def _shorten(verdict: reasons.Verdict) -> str:
    """The outcome with its first reason; a difference in speed says both."""
    is_refused = verdict.outcome in ("not legal", "does not fit")
    return f"{verdict.outcome}: {verdict.problems[0]}" if is_refused else verdict.problems[0]
