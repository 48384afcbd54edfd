"""One search's answer, as values, JSON and text: the best layouts, what stands against others, all that was asked."""

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

from dtlayout.base.formatting import GIB, align, plural, three_digits
from dtlayout.commands.recommend_cost import describe_cost, list_scale_costs, to_cost_document, to_scale_costs
from dtlayout.costmodel.estimate import Estimate
from dtlayout.costmodel.scenario import NO_TIME, Scenario, engine_kernels
from dtlayout.models.counting import count_parameters
from dtlayout.planner import verdicts
from dtlayout.planner.baselines import Baseline, choose_by_playbook, choose_by_thumb
from dtlayout.planner.choices import parse_choices
from dtlayout.planner.cost import Budget
from dtlayout.planner.search import Search, SearchResult
from dtlayout.planner.sizing import ScaleRow
from dtlayout.planner.space import Space
from dtlayout.planner.suggestions import list_remarks, list_ways_to_fit
from dtlayout.records.intervals import Intervals, find_intervals, find_least_apart, find_order
from dtlayout.spec.kernels import Kernels, OpenKernels
from dtlayout.spec.layout import Layout
from dtlayout.spec.optimizers import AdamW

if TYPE_CHECKING:
    from dtlayout.commands.emit import Emitted
    from dtlayout.commands.verify import Verified

BASELINES = {"thumb": choose_by_thumb, "playbook": choose_by_playbook}
BASELINE_NAMES = {"thumb": "the rule of thumb", "playbook": "the Ultra-Scale Playbook"}
_BAR = 20
_COUNTED = {
    "not legal": ("is not legal", "are not legal"), "slower kernels": ("has slower kernels", "have slower kernels"),
    "does not fit": ("does not fit", "do not fit"),
    "bounded": ("is slower whatever else it costs", "are slower whatever else they cost"),
    "slower": ("was simulated and is slower", "were simulated and are slower"),
    "alike": ("is a variant of one above", "are variants of those above"),
}  # fmt: skip
OUTCOMES = {
    "not legal": "It is not legal", "does not fit": "It does not fit", "slower": "It is slower",
    "as fast": "It is as fast", "faster": "It is faster",
}  # fmt: skip


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

    def __init__(
        self, search: Search, result: SearchResult, options: argparse.Namespace, verified: "Sequence[Verified]",
        budget: Budget | None, best: Sequence[Estimate],
    ):  # fmt: skip
        """`result` has the layouts that are shown; `best`, the best `LOOKED_AT`, those of which remarks speak."""
        self.result, self.options, self.verified, self.budget = result, options, verified, budget
        self.scenario, self.best = search.space.scenario, result.ranked[0]
        pairs = enumerate(pairwise(result.ranked), start=2)
        self.alike = find_alike([estimate.step_time_s for estimate in result.ranked], self.scenario.engine.name)
        self.leads = [verdicts.describe_lead(own, following, place) for place, (own, following) in pairs]

        def verdict(layout: Layout, kernels: Kernels) -> verdicts.Verdict:
            return verdicts.judge(search, layout, kernels, self.best)

        self.against = list(verdicts.judge_others(search, self.best))
        near = self._describe_near(find_alike([estimate.step_time_s for estimate in best], self.scenario.engine.name))
        self.remarks = [near] * bool(near) + list(list_remarks(search, best))
        self.emitted: Emitted | None = None
        self.why_not: verdicts.Verdict | None = None
        self.completed: Estimate | None = None
        self.reopened: Estimate | None = None
        self.baseline: Baseline | None = None
        if options.why_not is not None:
            choices = parse_choices(options.why_not)
            self.why_not = verdict(*verdicts.parse_layout(search.space, choices))
            self.completed = _complete(search, choices)
            if self.completed is None and choices.pop("recompute", None):
                self.reopened = _complete(search, choices)
        if options.baseline:
            self.baseline = BASELINES[options.baseline](Search(Space(self.scenario), options.max_memory))

    def _describe_near(self, alike: Alike | None) -> str:
        """Which other choices are as near to a first place that stands apart as layouts whose order may be chance."""
        if alike is None or alike.places > 1:
            return ""
        longest_s = (1 + alike.least) * self.best.step_time_s
        fitting = [(name, each.estimate) for name, each in self.against if each.outcome != "does not fit"]
        near = [name for name, estimate in fitting if estimate and estimate.step_time_s < longest_s]
        if not near:
            return ""
        names, least = verdicts.name_together(near), f"{alike.least:.1%}"
        return f"Variants of 1 are nearer: with {names} instead, as below, a step is less than {least} longer."

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
            "remarks": self.remarks,
            "against": [{"change": name, **_to_verdict(verdict)} for name, verdict in self.against],
        }
        if self.budget:
            document["cost"] = to_cost_document(scenario, self.best.step_time_s, self.budget)
        if self.verified:
            document["verified"] = [
                {"layout": asdict(v.estimate.layout), "peak_memory_bytes": v.peak_bytes,
                 "predicted_peak_memory_bytes": v.estimate.peak_bytes, "fits": v.fits}
                for v in self.verified
            ]  # fmt: skip
        if self.why_not:
            document["why_not"] = {
                **_to_verdict(self.why_not),
                "best_with_these_choices": self.completed and _to_layout(scenario, self.completed),
                "best_with_other_recompute": self.reopened and _to_layout(scenario, self.reopened),
            }
        if options.baseline:
            document["baseline"] = {"name": options.baseline, "layout": None}
            if found := self.baseline:
                document["baseline"] |= {
                    "layout": _to_layout(scenario, found.estimate), "steps": found.steps,
                    "slower_than_best": found.estimate.step_time_s / self.best.step_time_s - 1,
                }  # fmt: skip
        if self.emitted:
            document["emitted"] = str(options.emit)
            document["emitted_for"] = self.emitted._asdict()
        return document

    def to_lines(self) -> list[str]:
        """The lines of it all, for people."""
        best, options = self.best, self.options
        lines = [*_describe_scenario(self.scenario), "", *_table(self.scenario, self.result)]
        said = [f"{place}  {lead}." for place, lead in enumerate(self.leads, start=1)]
        said += [str(self.alike)] * (self.alike is not None) + self.remarks
        if options.min_gpus:
            number = self.scenario.cluster.num_gpus
            said.append(f"Fewest GPUs that train it: {number}. Parts of a node and whole nodes were tried.")
        said += [describe_cost(self.scenario, best.step_time_s, self.budget)] if self.budget else []
        kernels = ", ".join(f"{name} {kernel}" for name, kernel in asdict(best.kernels).items())
        said.append(f"Kernels of 1: {kernels}.")
        lines += ["", *said]
        if self.verified:
            lines += ["", "Dry runs:", *(f"  {run}" for run in self.verified)]
        if self.against:
            lines += ["", f"Against other choices than those of 1, {best.layout}, each with the best of all else,"]
            lines.append("but beside another kernel or tp_overlap with the degrees and the schedule of 1:")
            folded = verdicts.fold_alike(self.against, _shorten)
            lines += align([(f"  {name}", _shorten(verdict)) for name, verdict in folded], ("<", "<"))
        if self.why_not:
            lines += ["", f"Why not {self.why_not.layout}? {OUTCOMES[self.why_not.outcome]}:"]
            lines += [f"  {problem}" for problem in self.why_not.problems]
            if self.completed is None:
                lines.append("  No layout with these choices is legal and fits.")
                if found := self.reopened:
                    difference = verdicts.describe_difference(best, found)
                    lines.append(f"  One that recomputes otherwise does, {found.layout}, and is {difference}.")
            elif self.completed.layout == self.why_not.layout:
                lines.append("  It is the best with these choices.")
            else:
                difference = verdicts.describe_difference(best, self.completed)
                lines.append(f"  The best with these choices, {self.completed.layout}, is {difference}.")
        if options.baseline:
            name = f"The {BASELINE_NAMES[options.baseline].removeprefix('the ')}"
            if self.baseline is None:
                lines += ["", f"{name} finds no layout that is legal and fits."]
            else:
                chosen, steps = self.baseline.estimate, self.baseline.steps
                speed = f"{_describe_mfu(self.scenario, chosen)}, {chosen.step_time_s:.3f} s a step"
                lines += ["", f"{name} chooses {chosen.layout}: {speed}", *(f"  {step}" for step in steps)]
                lines.append(f"  Against 1 it is {verdicts.describe_difference(best, chosen)}.")
        if self.emitted:
            lines += ["", *self.emitted.to_lines(options.emit)]
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
            following = self.result.ranked[1]
            lead = verdicts.describe_lead(best, following, "that")
            lines.append(f"The next best is {_full_name(self.scenario, following)}; this is {lead}.")
        return lines + [f"{name}: {_shorten(verdict)}" for name, verdict in verdicts.fold_alike(self.against, _shorten)]


def _complete(search: Search, choices: dict[str, Any]) -> Estimate | None:
    """The best layout with some choices; None if none of those is legal and fits."""
    space = search.space
    avoided = {name: values for name, values in space.avoided.items() if name not in choices}  # asked for, so allowed
    asked = search.with_fixed({**space.fixed, **choices}, avoided=avoided)
    return next(iter(asked.run(top=1).ranked), None)


def to_scale_document(scenario: Scenario, rows: Sequence[ScaleRow], budget: Budget | None) -> dict[str, Any]:
    """The document that compares clusters, an entry for each."""
    costs, of_all = to_scale_costs(rows, budget)
    entries = [
        {"num_gpus": row.num_gpus, "efficiency": row.efficiency,
         "layout": row.estimate and _to_layout(scenario, row.estimate), **cost}
        for row, cost in zip(rows, costs, strict=True)
    ]  # fmt: skip
    return {"ok": True, "scenario": _to_scenario(scenario, None), "scale": entries, **of_all}


def list_scale(scenario: Scenario, rows: Sequence[ScaleRow], budget: Budget | None) -> list[str]:
    """The lines that compare clusters, one for each below the scenario."""
    cells = [["GPUs", "layout", "MFU", "tokens/s/GPU", "step s", "tokens/s", "microbatches", "bubble", "efficiency"]]
    for row in rows:
        if (e := row.estimate) is None:
            cells.append([str(row.num_gpus), "no layout is legal and fits", *[""] * 7])
            continue
        cells.append([
            str(row.num_gpus), _full_name(scenario, e), _describe_mfu(scenario, e, short=True),
            _speed(scenario, e), f"{e.step_time_s:.3f}", f"{scenario.batch.num_tokens / e.step_time_s:,.0f}",
            str(e.layout.num_microbatches(scenario.batch)), f"{e.time.bubble / e.step_time_s:.1%}",
            f"{row.efficiency:.1%}",
        ])  # fmt: skip
    if budget:
        cells = [[*row, *cost] for row, cost in zip(cells, list_scale_costs(rows, budget), strict=True)]
    return [
        *_describe_scenario(scenario, [row.num_gpus for row in rows]),
        "",
        *align(cells, (">6", "<", ">18", ">12", ">8", ">12")),
    ]


def explain_nothing(search: Search, result: SearchResult) -> list[str]:
    """Why there is no layout, and what would help."""
    space = search.space
    problems = [f"no layout can train {space.scenario.model.name} here: of {_describe_counts(result, ',')}"]
    if not result.num_layouts:
        none = "nothing is left to choose from" if space.degrees else "none has these degrees on so many GPUs"
        problems = [f"no layout can train {space.scenario.model.name} here: {none}"]
    if result.num_layouts and (missed := search.find_smallest_oom()):
        text = verdicts.describe_shortage(missed, result.allowed_bytes)
        problems.append(f"the one that misses by least, {missed.layout}: {text}")
        problems += list_ways_to_fit(search, missed)
        helps = "--min-gpus finds the smallest cluster that works"
        state_bytes = max(rank.parameters + rank.gradients + rank.optimizer for rank in missed.memory)
        problems.append(helps + "; a shorter --seq-len needs less" * (state_bytes < result.allowed_bytes))
    elif space.offload != "none" and result.num_layouts:
        capacity = search.estimator.host_capacity_bytes / GIB
        problems.append(f"offload={space.offload} asks more of the host than {capacity:.0f} GiB a GPU; use another one")
    else:
        layout, kernels = verdicts.parse_layout(space, {})
        example = f"for example {layout}: "
        found = verdicts.find_problems(space, layout, kernels)
        problems += [example * (i == 0) + line for i, line in enumerate(found)]
        fewer = "fewer --fix and --avoid, or " * bool(space.fixed or space.avoided)
        problems.append(f"use {fewer}another number of GPUs or global batch")
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
        "calibrated": scenario.engine.is_calibrated, "knows_time": scenario.knows_time,
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
        "tokens_per_s": scenario.batch.num_tokens / e.step_time_s,
        "tokens_per_s_per_gpu": scenario.batch.tokens_per_s_per_gpu(e.step_time_s, e.layout.world_size),
        "time": e.time.as_dict(),
        "memory": [rank.as_dict() for rank in e.memory], "busiest_rank": e.busiest_rank, "peak_bytes": e.peak_bytes,
        "capacity_bytes": e.capacity_bytes, "step_time_range_s": intervals.step_time.around(e.step_time_s),
        "peak_range_bytes": intervals.peak_memory.around(e.peak_bytes),
    }  # fmt: skip


def _to_verdict(verdict: verdicts.Verdict) -> dict[str, Any]:
    return {
        "name": str(verdict.layout), "layout": asdict(verdict.layout), "kernels": asdict(verdict.kernels),
        "outcome": verdict.outcome,
        "problems": verdict.problems, "step_time_s": verdict.estimate.step_time_s if verdict.estimate else None,
        "peak_bytes": verdict.estimate.peak_bytes if verdict.estimate else None,
    }  # fmt: skip


def _describe_counts(result: SearchResult, after: str = ":") -> str:
    counted = [(result.counts[reason], texts) for reason, texts in _COUNTED.items()]  # type: ignore[index]
    parts = [f"{number:,} {one if number == 1 else many}" for number, (one, many) in counted if number]
    return f"{plural(result.num_layouts, 'layout', ',')}{f'{after} ' * bool(parts)}{', '.join(parts)}."


def _describe_scenario(scenario: Scenario, sizes: Sequence[int] = ()) -> list[str]:
    """Lines on what is asked about; `sizes` are the GPUs where several numbers are compared."""
    model, batch, cluster, engine = scenario.model, scenario.batch, scenario.cluster, scenario.engine
    intervals = find_intervals(scenario)
    known = "" if engine.is_calibrated else f", uncalibrated: no run of it on {engine.gpu} is known"
    known += "; nothing like it was measured" * intervals.step_time.is_foreign
    per_node = cluster.gpus_per_node
    sizes = sizes or [cluster.num_gpus]
    nodes = f" in nodes of {per_node}" if max(sizes) > per_node > 1 else ""
    nodes += f", {cluster.gpus_linked} joined by fast links" if cluster.gpus_linked > per_node else ""
    updated = "" if scenario.optimizer == AdamW() else f", updated by {scenario.optimizer.name}"
    return [
        f"{model.name}, {count_parameters(model) / 1e9:.2f} billion parameters, on {', '.join(map(str, sizes))} x "
        f"{cluster.gpu.name}{nodes}; {plural(batch.global_batch, 'sequence')} of {plural(batch.seq_len, 'token')} "
        f"a step{updated}",
        f"engine {engine.name}{known}",
        *[f"{NO_TIME}; use the seconds below only to compare layouts with each other"] * (not scenario.knows_time),
        *_describe_intervals(intervals),
        *map(str, cluster.records),
    ]


def _describe_intervals(intervals: Intervals) -> Iterator[str]:
    for name, interval in zip(("step", "peak"), intervals, strict=True):
        yield f"{name} {interval.low:.2f} to {interval.high:.2f} times as predicted, for {interval.basis}"


def _table(scenario: Scenario, result: SearchResult) -> list[str]:
    layouts = [["   layout", "MFU", "tokens/s/GPU", "step s", "memory of the busiest rank, GiB"]]
    shares = [["   of the step, %", *result.ranked[0].time.as_dict()]]
    for place, e in enumerate(result.ranked, start=1):
        mfu, name = _describe_mfu(scenario, e, short=True), f"{place:<3}{_full_name(scenario, e)}"
        layouts.append([name, mfu, _speed(scenario, e), f"{e.step_time_s:.3f}", _bar(e)])
        parts = [f"{100 * seconds / e.step_time_s:.1f}" for seconds in e.time.as_dict().values()]
        shares.append([f"{place:<3}", *parts])
    first = f"<{max(len(row[0]) for row in layouts) - 11}"
    return [
        *align(layouts, ("<", ">18", ">12", ">8", "<")),
        "",
        *align(shares, (first, *[">9"] * (len(shares[0]) - 1))),
    ]


def _describe_mfu(scenario: Scenario, estimate: Estimate, short: bool = False) -> str:
    """MFU with its range; the CPU has no peak, so no MFU."""
    if not scenario.cluster.gpu.has_mfu:
        return "n/a" if short else "MFU n/a"
    of_step, percents = find_intervals(scenario).step_time, 100 * estimate.mfu
    text = f"{percents:.1f} ({percents / of_step.high:.0f} to {min(100.0, percents / of_step.low):.0f}) %"
    return text if short else f"{text} MFU, {_speed(scenario, estimate)} tokens/s/GPU"


def _speed(scenario: Scenario, estimate: Estimate) -> str:
    """Tokens a second of one GPU."""
    return three_digits(scenario.batch.tokens_per_s_per_gpu(estimate.step_time_s, estimate.layout.world_size))


def _bar(estimate: Estimate) -> str:
    peak, capacity = estimate.peak_bytes, estimate.capacity_bytes
    filled = round(_BAR * peak / capacity)
    return f"{'█' * filled}{'░' * (_BAR - filled)} {peak / GIB:.1f} / {capacity / GIB:.1f}"


def _shorten(verdict: verdicts.Verdict) -> str:
    """The outcome with its first reason, which of a difference in speed says both, and of which layout."""
    if verdict.outcome == "not legal":
        return f"not legal: {verdict.problems[0]}"
    of_layout = f"{verdict.layout}: {verdict.problems[0]}"
    return f"does not fit, as {of_layout}" if verdict.outcome == "does not fit" else of_layout
