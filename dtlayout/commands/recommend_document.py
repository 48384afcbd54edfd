"""The documents of `dtlayout recommend`: everything that it says of one search, or of clusters side by side.

`--json` prints a document; text (recommend_text.py) and pages (recommend_page.py, recommend_scale_page.py) read nothing
else. A key that begins with "_" is for them alone.
"""

import argparse
from collections.abc import Sequence
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dtlayout.base.errors import InvalidConfig
from dtlayout.commands.arguments import JsonDocument
from dtlayout.commands.engine_options import to_assumptions
from dtlayout.costmodel.engine import OWN_ENGINE
from dtlayout.costmodel.estimate import Estimate
from dtlayout.costmodel.scenario import Scenario, engine_kernels
from dtlayout.models.counting import count_parameters
from dtlayout.planner import verdicts
from dtlayout.planner.baselines import choose_by_playbook, choose_by_thumb
from dtlayout.planner.choices import parse_choices
from dtlayout.planner.cost import Budget, Marks, find_cost, find_marks
from dtlayout.planner.margin import Margin
from dtlayout.planner.recipes import GREAT_GAIN, find_usual
from dtlayout.planner.search import Search, SearchResult
from dtlayout.planner.sizing import ScaleRow
from dtlayout.planner.space import Space
from dtlayout.planner.suggestions import LOOKED_AT, list_remarks
from dtlayout.records.intervals import count_near, find_alike, find_intervals
from dtlayout.spec.kernels import OpenKernels

if TYPE_CHECKING:
    from dtlayout.commands.like import Like
    from dtlayout.commands.verify import Verified

BASELINES = {"thumb": choose_by_thumb, "playbook": choose_by_playbook}
"""Value of `--baseline` → the procedure that chooses a layout."""


def make_document(
    search: Search,
    result: SearchResult,
    looked_at: Sequence[Estimate],
    options: argparse.Namespace,
    margin: Margin,
    verified: Sequence["Verified"] = (),
) -> dict[str, Any]:
    """The document of one search: the best layouts, what stands against others, and everything that was asked.

    `result` has the layouts that are shown, at least one; remarks speak of `looked_at`, however many are shown.
    """
    scenario, best = search.space.scenario, result.ranked[0]
    pairs = enumerate(pairwise(result.ranked), start=2)
    whys = [*(verdicts.describe_lead(own, following, place) for place, (own, following) in pairs), None]
    others = verdicts.judge_others(search, best)
    against = [{"change": name, **_to_verdict(verdict)} for name, verdict in others]
    document: dict[str, Any] = {
        "ok": True,
        "scenario": _to_scenario(scenario, result.allowed_bytes),
        "searched": {"layouts": result.num_layouts, "counts": result.counts},
        "layouts": [{**_to_layout(scenario, e), "why": why} for e, why in zip(result.ranked, whys, strict=True)],
        "alike": _find_alike(scenario, result.ranked),
        "margin": margin._asdict(),
        "simplest": _find_simplest(scenario, result.ranked),
        "usual": _compare_usual(search, best),
        "remarks": [
            *_remark_on_rows(search, best),
            *_remark_on_near(scenario, looked_at, against),
            *list_remarks(search, looked_at, has_room=not margin.fits_only_without),
        ],
        "against": against,
        "_gpus_linked": scenario.cluster.gpus_linked,
        "_is_smallest": options.min_gpus,
        "_lead": next((verdicts.describe_lead(own, after, "that") for own, after in pairwise(result.ranked)), None),
    }
    if budget := read_budget(options):
        document["cost"] = _to_cost(scenario, best.step_time_s, budget)
    if verified:
        document["verified"] = [each.to_document() for each in verified]
    if options.why_not is not None:
        document |= _answer_why_not(search, best, options.why_not, margin)
    if options.baseline:
        document |= _compare_baseline(search, best, options.baseline, margin)
    return document


def _find_simplest(scenario: Scenario, ranked: Sequence[Estimate]) -> dict[str, Any] | None:
    """The leading places of which the first is the simplest, and how much slower it is predicted than the fastest of
    them, as a fraction; None where one place leads alone."""
    times_s = [estimate.step_time_s for estimate in ranked[:LOOKED_AT]]
    places = count_near(times_s, scenario.engine.name)
    return {"places": places, "slower_than_fastest": times_s[0] / min(times_s) - 1} if places > 1 else None


def _compare_usual(search: Search, best: Estimate) -> dict[str, Any] | None:
    """The layout that a vendor or the program published for such a job, beside the best; None where none is known."""
    if (usual := find_usual(search)) is None:
        return None
    recipe, estimate = usual
    slower = estimate.step_time_s / best.step_time_s - 1
    is_own = recipe.program == search.space.scenario.engine.name  # other programs have other habits
    doubt = is_own and slower > GREAT_GAIN and verdicts.describe_difference(estimate, best)
    return {
        "who": recipe.who, "where": recipe.where, "model": recipe.model, "program": recipe.program,
        "layout": _to_layout(search.space.scenario, estimate), "slower_than_best": slower,
        "needed_bytes": estimate.needed_bytes, "fits": estimate.fits, "has_room": search.has_room(estimate),
        "doubt": doubt or None,
    }  # fmt: skip


def _answer_why_not(search: Search, best: Estimate, asked: str, margin: Margin) -> dict[str, Any]:
    """The judgement of the layout that was asked about, and the best layouts with its choices."""
    choices, scenario = parse_choices(asked), search.space.scenario
    verdict = verdicts.judge(search, *verdicts.parse_layout(search.space, choices), best)
    completed, reopened = _complete(search, choices, margin), None
    if completed is None and choices.pop("recompute", None):
        reopened = _complete(search, choices, margin)
    other = completed or reopened
    why_not = {
        **_to_verdict(verdict),
        "best_with_these_choices": completed and _to_layout(scenario, completed),
        "best_with_other_recompute": reopened and _to_layout(scenario, reopened),
        "fits_only_without_margin": other is not None and not search.has_room(other),
    }
    return {"why_not": why_not, "_why_not_difference": other and verdicts.describe_difference(best, other)}


def _compare_baseline(search: Search, best: Estimate, name: str, margin: Margin) -> dict[str, Any]:
    """The layout that a well-known procedure chooses, beside the best; without the margin if it finds none with it."""
    scenario = search.space.scenario
    chosen = BASELINES[name](Search(Space(scenario), search.max_memory))
    if chosen is None and not margin.is_asked:
        chosen = BASELINES[name](Search(Space(scenario)))
    if chosen is None:
        return {"baseline": {"name": name, "layout": None}}
    slower = chosen.estimate.step_time_s / best.step_time_s - 1
    layout = _to_layout(scenario, chosen.estimate)
    return {
        "baseline": {"name": name, "layout": layout, "steps": chosen.steps, "slower_than_best": slower},
        "_baseline_difference": verdicts.describe_difference(best, chosen.estimate),
    }


def compare_like(like: "Like", best: Estimate, patch: Path | None) -> dict[str, Any]:
    """The layout of --like's file beside the best, and the best as changes of that file; writes `patch` if given.

    Where the file's layout does not fit the GPUs, the document has the reasons in its place.
    """
    own, scenario, file = like.estimate(), like.scenario, like.file
    if patch is not None and file is None:
        raise InvalidConfig("--patch changes a file of another program; of a config of ours, --emit writes a new one")
    if own is None or like.case is None:
        none = dict.fromkeys(("path", "layout", "slower_than_best", "change"))
        return {"yours": {**none, "fits": False, "misfits": list(like.misfits)}, "_yours_difference": ""}
    if best.layout.world_size != own.layout.world_size:
        raise InvalidConfig("--like compares layouts on as many GPUs; leave out --min-gpus")
    yours: dict[str, Any] = {
        "path": str(file.path) if file else None, "layout": _to_layout(scenario, own), "fits": own.fits,
        "slower_than_best": own.step_time_s / best.step_time_s - 1,
        "change": file.describe_patch(like.case, best) if file else None, "misfits": [],
    }  # fmt: skip
    if patch is not None and file is not None:
        yours |= {"written": str(patch), "written_change": file.write_patch(patch, like.case, best)}
    return {"yours": yours, "_yours_difference": verdicts.describe_difference(best, own)}


def _complete(search: Search, choices: dict[str, Any], margin: Margin) -> Estimate | None:
    """The best layout with some choices, without the default margin if none fits with it; None if none of those is
    legal and fits."""
    space = search.space
    avoided = {name: values for name, values in space.avoided.items() if name not in choices}  # asked for, so allowed
    for max_memory in dict.fromkeys([search.max_memory, search.max_memory if margin.is_asked else 1.0]):
        asked = search.with_fixed({**space.fixed, **choices}, max_memory, avoided)
        for found in asked.run(top=1).ranked:
            return found
    return None


def _find_alike(scenario: Scenario, ranked: Sequence[Estimate]) -> dict[str, Any] | None:
    alike = find_alike([estimate.step_time_s for estimate in ranked], scenario.engine.name)
    return alike and alike._asdict()


def _remark_on_rows(search: Search, best: Estimate) -> list[str]:
    """A remark on rows of the vocabulary that a prediction for our trainer has so that each tp divides them."""
    scenario = search.space.scenario
    if scenario.engine.name != OWN_ENGINE or not scenario.model.unused_rows:
        return []
    from dtlayout.commands.model_folder import describe_filled  # only now: most models are described

    return describe_filled(scenario.model, best.layout.tp)


def _remark_on_near(scenario: Scenario, best: Sequence[Estimate], against: Sequence[JsonDocument]) -> list[str]:
    """A remark on other choices that are nearer to the first place than the second one, which stands apart; or none."""
    alike = _find_alike(scenario, best)
    if alike is None or alike["places"] > 1:
        return []
    longest_s, least = (1 + alike["least"]) * best[0].step_time_s, f"{alike['least']:.1%}"
    fitting = [each for each in against if each["outcome"] not in ("does not fit", "too full") and each["step_time_s"]]
    near = [each["change"] for each in fitting if each["step_time_s"] < longest_s]
    with_others = f"with {verdicts.name_together(near)} instead, as below"
    return [f"Variants of 1 are nearer: {with_others}, a step is less than {least} longer."] * bool(near)


def make_scale_document(rows: Sequence[ScaleRow], options: argparse.Namespace) -> dict[str, Any]:
    """The document that compares clusters, an entry for each; with costs where the tokens of a training are given."""
    scenario = rows[0].scenario
    entries = [
        {"num_gpus": row.num_gpus, "efficiency": row.efficiency, "margin": row.margin._asdict(),
         "layout": row.estimate and _to_layout(scenario, row.estimate)}
        for row in rows
    ]  # fmt: skip
    document = {"ok": True, "scenario": _to_scenario(scenario, None), "scale": entries}
    if budget := read_budget(options):
        costs = [find_cost(row.scenario, e.step_time_s, budget) if (e := row.estimate) else None for row in rows]
        for entry, cost in zip(entries, costs, strict=True):
            entry["cost"] = cost and cost._asdict()
        places = marks._asdict() if (marks := find_marks(costs)) else dict.fromkeys(Marks._fields)
        marked = {name: place if place is None else rows[place].num_gpus for name, place in places.items()}
        document |= {**_to_budget(budget), "marks": marked}
    return {**document, "_gpus_linked": scenario.cluster.gpus_linked}


def _to_scenario(scenario: Scenario, allowed_bytes: float | None) -> dict[str, Any]:
    return {
        "model": asdict(scenario.model), "parameters": count_parameters(scenario.model), **_count_trained(scenario),
        "batch": asdict(scenario.batch), "gpu": scenario.cluster.gpu.name, "num_gpus": scenario.cluster.num_gpus,
        "gpus_per_node": scenario.cluster.gpus_per_node, "engine": scenario.engine.name,
        "calibrated": scenario.engine.is_calibrated, "knows_time": scenario.knows_time,
        "intervals": find_intervals(scenario).to_dict(),
        "records": [asdict(record) for record in scenario.cluster.records],
        "precision": asdict(scenario.precision), "optimizer": scenario.optimizer.name,
        "optimizer_keys": scenario.optimizer.given, "allowed_bytes": allowed_bytes,
        "assumptions": to_assumptions(scenario),
    }  # fmt: skip


def _count_trained(scenario: Scenario) -> dict[str, int]:
    """Parameters that an adapter trains; {} without one."""
    model = scenario.model
    if model.adapter is None:
        return {}
    return {"trained_parameters": count_parameters(model) - count_parameters(model.base)}


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


def _full_name(scenario: Scenario, estimate: Estimate) -> str:
    """A layout with the kernels that are not the usual ones."""
    usual = asdict(engine_kernels(scenario, OpenKernels(), estimate.layout))
    kernels = asdict(estimate.kernels).items()
    odd = [kernel if name == "attention" else f"{name} {kernel}" for name, kernel in kernels if kernel != usual[name]]
    return " ".join([str(estimate.layout), *odd])


def _to_verdict(verdict: verdicts.Verdict) -> dict[str, Any]:
    return {
        "name": str(verdict.layout), "layout": asdict(verdict.layout), "kernels": asdict(verdict.kernels),
        "outcome": verdict.outcome,
        "problems": verdict.problems, "step_time_s": verdict.estimate.step_time_s if verdict.estimate else None,
        "peak_bytes": verdict.estimate.peak_bytes if verdict.estimate else None,
    }  # fmt: skip


def read_budget(options: argparse.Namespace) -> Budget | None:
    """The training that is priced; None where nobody gives its tokens."""
    return None if options.tokens is None else Budget(options.tokens, options.price)


def _to_cost(scenario: Scenario, step_time_s: float, budget: Budget) -> dict[str, Any]:
    """The cost of training with one layout, with the range of its days, GPU-hours and money."""
    around_s = find_intervals(scenario).step_time.around(step_time_s)
    bounds = [find_cost(scenario, bound_s, budget) for bound_s in around_s]
    ranges: dict[str, Any] = {
        f"{name}_range": [getattr(each, name) for each in bounds] for name in ("days", "gpu_hours")
    }
    ranges["money_range"] = None if budget.price is None else [each.money for each in bounds]
    return {**_to_budget(budget), **find_cost(scenario, step_time_s, budget)._asdict(), **ranges}


def _to_budget(budget: Budget) -> dict[str, Any]:
    return {"tokens": budget.tokens, "price_per_gpu_hour": budget.price}
