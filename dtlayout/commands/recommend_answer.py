"""One search's answer, as values and as JSON: the best layouts, what stands against others, and what else was asked."""

import argparse
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from dtlayout import toml
from dtlayout.costmodel.estimate import Estimate
from dtlayout.costmodel.scenario import Scenario
from dtlayout.kernels import Kernels
from dtlayout.layout import Layout
from dtlayout.models.counting import count_parameters
from dtlayout.planner.baselines import Baseline, choose_by_playbook, choose_by_thumb
from dtlayout.planner.reasons import Verdict, describe_lead, judge, neighbours, parse_layout
from dtlayout.planner.search import Search, SearchResult
from dtlayout.planner.sizing import ScaleRow
from dtlayout.planner.space import Space, parse_choice

BASELINES = {"thumb": choose_by_thumb, "playbook": choose_by_playbook}


@dataclass(frozen=True)
class Verified:
    """A layout and what a dry run of it held."""

    estimate: Estimate
    peak_bytes: int
    """Most bytes that one of the default ranks held."""
    fits: bool
    """Whether that fits, with what the engine's allocator holds beside tensors."""


def verify(scenario: Scenario, result: SearchResult, number: int) -> list[Verified]:
    """Dry-run the first `number` of the best layouts, and further ones until one fits.

    Each with the config that `--emit` writes; refuses what a dry run cannot execute.
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
        peak_bytes = max(report.peak_bytes for report in reports)
        fits = peak_bytes + scenario.engine.constants.overhead_bytes <= result.allowed_bytes
        found.append(Verified(estimate, peak_bytes, fits))
        if len(found) >= number and any(v.fits for v in found):
            break
    return found


class Answer:
    """Everything that one search has to say."""

    def __init__(
        self, space: Space, search: Search, result: SearchResult, options: argparse.Namespace,
        verified: Sequence[Verified],
    ):  # fmt: skip
        self.result, self.options, self.verified = result, options, verified
        self.scenario, self.best = space.scenario, result.ranked[0]
        self.leads = [describe_lead(*pair, place) for place, pair in enumerate(pairwise(result.ranked), start=2)]

        def verdict(layout: Layout, kernels: Kernels) -> Verdict:
            return judge(space, search.estimator, layout, kernels, result.allowed_bytes, self.best)

        self.against = [(name, verdict(layout, kernels)) for name, layout, kernels in neighbours(search, self.best)]
        self.why_not: Verdict | None = None
        self.completed: Estimate | None = None
        self.baseline: Baseline | None = None
        if options.why_not:
            choices = dict(parse_choice(text) for text in options.why_not.split(","))
            self.why_not = verdict(*parse_layout(space, choices))
            wanted = Space(self.scenario, {**space.fixed, **choices}, space.avoided)
            self.completed = next(iter(Search(wanted, options.max_memory).run(top=1).ranked), None)
        if options.baseline:
            choose = BASELINES[options.baseline]
            self.baseline = choose(Space(self.scenario), search.estimator, result.allowed_bytes)

    def to_document(self) -> dict[str, Any]:
        """The document of it all, for `--json`."""
        scenario, result, options = self.scenario, self.result, self.options
        whys = [*self.leads, None]
        document: dict[str, Any] = {
            "ok": True,
            "scenario": _to_scenario(scenario, result.allowed_bytes),
            "searched": {"layouts": result.num_layouts, "counts": result.counts},
            "layouts": [{**_to_layout(scenario, e), "why": why} for e, why in zip(result.ranked, whys, strict=True)],
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


def to_scale_document(scenario: Scenario, rows: Sequence[ScaleRow]) -> dict[str, Any]:
    """The document that compares clusters, an entry for each."""
    entries = [
        {"num_gpus": row.num_gpus, "efficiency": row.efficiency,
         "layout": row.estimate and _to_layout(scenario, row.estimate)}
        for row in rows
    ]  # fmt: skip
    return {"ok": True, "scenario": _to_scenario(scenario, None), "scale": entries}


def full_name(estimate: Estimate) -> str:
    """A layout with the kernels that are not the usual ones."""
    usual, kernels = asdict(Kernels()), asdict(estimate.kernels).items()
    odd = [kernel if name == "attention" else f"{name} {kernel}" for name, kernel in kernels if kernel != usual[name]]
    return " ".join([str(estimate.layout), *odd])


def _to_scenario(scenario: Scenario, allowed_bytes: float | None) -> dict[str, Any]:
    return {
        "model": asdict(scenario.model), "parameters": count_parameters(scenario.model),
        "batch": asdict(scenario.batch), "gpu": scenario.cluster.gpu.name, "num_gpus": scenario.cluster.num_gpus,
        "gpus_per_node": scenario.cluster.gpus_per_node, "engine": scenario.engine.name,
        "calibrated": scenario.engine.is_calibrated, "error_band": scenario.engine.error,
        "records": [asdict(record) for record in scenario.cluster.records],
        "precision": asdict(scenario.precision), "optimizer": scenario.optimizer.name, "allowed_bytes": allowed_bytes,
    }  # fmt: skip


def _to_layout(scenario: Scenario, e: Estimate) -> dict[str, Any]:
    return {
        "name": full_name(e), "layout": asdict(e.layout), "kernels": asdict(e.kernels), "stage_layers": e.stage_layers,
        "mfu": e.mfu if scenario.cluster.gpu.has_mfu else None, "step_time_s": e.step_time_s,
        "tokens_per_s": scenario.batch.num_tokens / e.step_time_s, "time": e.time.as_dict(),
        "memory": [rank.as_dict() for rank in e.memory], "busiest_rank": e.busiest_rank, "peak_bytes": e.peak_bytes,
        "capacity_bytes": e.capacity_bytes,
    }  # fmt: skip


def _to_verdict(verdict: Verdict) -> dict[str, Any]:
    return {
        "layout": asdict(verdict.layout), "kernels": asdict(verdict.kernels), "outcome": verdict.outcome,
        "problems": verdict.problems, "step_time_s": verdict.estimate.step_time_s if verdict.estimate else None,
        "peak_bytes": verdict.estimate.peak_bytes if verdict.estimate else None,
    }  # fmt: skip
