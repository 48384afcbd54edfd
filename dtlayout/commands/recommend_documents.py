"""The answers of `recommend` as JSON, for programs."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from dtlayout.commands.recommend_answer import Answer
from dtlayout.commands.recommend_text import full_name
from dtlayout.costmodel.estimate import Estimate
from dtlayout.costmodel.scenario import Scenario
from dtlayout.models.counting import count_parameters
from dtlayout.planner.baselines import Baseline
from dtlayout.planner.reasons import Verdict
from dtlayout.planner.sizing import ScaleRow


def to_document(answer: Answer) -> dict[str, Any]:
    """The document of a whole answer, for `--json`."""
    scenario, result = answer.scenario, answer.result
    document = {
        "ok": True,
        "scenario": _to_scenario(scenario, result.allowed_bytes),
        "searched": {"layouts": result.num_layouts, "counts": result.counts},
        "layouts": [
            {**_to_layout(scenario, e), "why": why} for e, why in zip(result.ranked, [*answer.leads, None], strict=True)
        ],
        "against": [{"change": name, **_to_verdict(verdict)} for name, verdict in answer.against],
    }
    if answer.verified:
        document["verified"] = [
            {"layout": asdict(v.estimate.layout), "peak_memory_bytes": v.peak_bytes,
             "predicted_peak_memory_bytes": v.estimate.peak_bytes, "fits": v.fits}
            for v in answer.verified
        ]  # fmt: skip
    if answer.why_not:
        best = _to_layout(scenario, answer.completed) if answer.completed else None
        document["why_not"] = {**_to_verdict(answer.why_not), "best_with_these_choices": best}
    if answer.options.baseline:
        document["baseline"] = _to_baseline(scenario, answer.options.baseline, answer.baseline, answer.best)
    if answer.options.emit:
        document["emitted"] = str(answer.options.emit)
    return document


def to_scale_document(scenario: Scenario, rows: Sequence[ScaleRow]) -> dict[str, Any]:
    """The document that compares clusters, an entry for each."""
    entries = [
        {"num_gpus": row.num_gpus, "efficiency": row.efficiency,
         "layout": _to_layout(scenario, row.estimate) if row.estimate else None}
        for row in rows
    ]  # fmt: skip
    return {"ok": True, "scenario": _to_scenario(scenario, None), "scale": entries}


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


def _to_baseline(scenario: Scenario, name: str, baseline: Baseline | None, best: Estimate) -> dict[str, Any]:
    if baseline is None:
        return {"name": name, "layout": None}
    found = _to_layout(scenario, baseline.estimate)
    slower = baseline.estimate.step_time_s / best.step_time_s - 1
    return {"name": name, "layout": found, "steps": baseline.steps, "slower_than_best": slower}
