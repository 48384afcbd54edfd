"""dtlayout recommend: the fastest layouts that fit, what each costs and why, and what stands against the others."""

import argparse
import gc
import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dtlayout.commands.arguments import add_scenario, read_scenario
from dtlayout.commands.text import describe_records
from dtlayout.costmodel.engine import OWN_ENGINE
from dtlayout.costmodel.estimate import Estimate
from dtlayout.costmodel.scenario import Scenario
from dtlayout.errors import InvalidConfig, InvalidLayout
from dtlayout.kernels import Kernels
from dtlayout.models.counting import count_parameters
from dtlayout.planner.baselines import Baseline, choose_by_playbook, choose_by_thumb
from dtlayout.planner.reasons import (
    GIB,
    Verdict,
    describe_difference,
    describe_lead,
    describe_misfit,
    find_problems,
    judge,
    neighbours,
    parse_layout,
)
from dtlayout.planner.search import Search, SearchResult
from dtlayout.planner.sizing import ScaleRow, find_smallest, scale
from dtlayout.planner.space import Space, parse_choice

if TYPE_CHECKING:
    from dtlayout.commands.verify import Verified

EXAMPLE = "dtlayout recommend --model llama-13b --gpu a100-80g-sxm --gpus 64 --seq-len 2048 --global-batch 2048"
_BASELINES = {"thumb": choose_by_thumb, "playbook": choose_by_playbook}
_BAR = 20
_COUNTED = {
    "not legal": "not legal", "slower kernels": "with slower kernels", "does not fit": "do not fit",
    "bounded": "slower by their lower bound", "slower": "slower when simulated",
    "shared otherwise": "like one above but for kernels or sharding",
}  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The scenario, and what is asked about it."""
    add_scenario(parser)
    parser.add_argument("--top", type=int, default=5, metavar="K", help="layouts to show; 5 by default")
    parser.add_argument(
        "--fix", action="append", default=[], metavar="NAME=VALUE", help="such as tp=2; may be repeated"
    )
    parser.add_argument(
        "--avoid", action="append", default=[], metavar="NAME=VALUE", help="such as recompute=full; may be repeated"
    )
    parser.add_argument("--max-memory", type=float, default=1.0, metavar="SHARE", help="of the capacity, such as 0.9")
    parser.add_argument("--why-not", metavar="CHOICES", help="such as tp=4,pp=4,micro_batch=2: what stands against it")
    parser.add_argument("--baseline", choices=tuple(_BASELINES), help="what a well-known procedure would have chosen")
    parser.add_argument("--scale", metavar="N,N,…", help="the best layout on each of these numbers of GPUs")
    parser.add_argument("--min-gpus", action="store_true", help="the smallest cluster that trains the model")
    parser.add_argument("--verify", type=int, default=0, metavar="K", help="dry-run the K best, and drop what misfits")
    parser.add_argument("--emit", type=Path, metavar="FILE", help="write the best layout as a config for train.py")


def run(options: argparse.Namespace) -> int:
    """Search, and print what was found."""
    was_enabled = gc.isenabled()
    gc.disable()  # many small values and no cycles: collecting would take a tenth of the time
    try:
        return _run(options)
    finally:
        if was_enabled:
            gc.enable()


def _run(options: argparse.Namespace) -> int:
    _check(options)
    fixed, avoided = _read_choices(options)

    def make_space(num_gpus: int | None = None) -> Space:
        return Space(read_scenario(options, num_gpus), fixed, avoided)

    if options.scale:
        sizes = _read_sizes(options.scale)
        spaces = [make_space(num_gpus) for num_gpus in sizes]
        return _print_scale(options, spaces[0].scenario, scale(spaces, options.max_memory))
    if options.min_gpus:
        per_node = read_scenario(options, options.gpus or 1).cluster.gpus_per_node
        space = find_smallest(make_space, per_node, options.max_memory)
    else:
        space = make_space()
    search = Search(space, options.max_memory)
    result = search.run(options.top)
    if not result.ranked:
        raise InvalidLayout(_explain_nothing(space, result))
    verified = _verify(space.scenario, result, options.verify) if options.verify else []
    misfits = {v.estimate.layout for v in verified if not v.fits}
    result = replace(result, ranked=tuple(e for e in result.ranked if e.layout not in misfits))
    if not result.ranked:
        advice = "use a larger --top or a smaller --max-memory"
        problem = f"none of the {len(verified)} best fits when it is dry-run; {advice}"
        raise InvalidLayout([problem, *_verdicts(verified)])
    answer = _Answer(space, search, result, options, verified)
    if options.emit:
        from dtlayout.commands.emit import write_config  # only now: it imports pydantic

        write_config(options.emit, space.scenario, result.ranked[0], answer.reasons)
    print(json.dumps(answer.to_document(), indent=2) if options.json else "\n".join(answer.to_text()))
    return 0


class _Answer:
    """Everything that one search has to say."""

    def __init__(
        self,
        space: Space,
        search: Search,
        result: SearchResult,
        options: argparse.Namespace,
        verified: Sequence["Verified"],
    ):
        self.verified = verified
        self.space, self.result, self.options = space, result, options
        self.scenario, self.best = space.scenario, result.ranked[0]
        following = zip(result.ranked, result.ranked[1:], range(2, len(result.ranked) + 1), strict=False)
        self.leads = [describe_lead(own, after, place) for own, after, place in following]

        def verdict(layout: Any, kernels: Any) -> Verdict:
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
            choose = _BASELINES[options.baseline]
            self.baseline = choose(Space(self.scenario), search.estimator, result.allowed_bytes)

    @property
    def reasons(self) -> list[str]:
        """Why the best is the best, for people who find it in a file."""
        band = self.scenario.engine.error
        lines = [
            f"Predicted: {self.best.layout}, {_mfu(self.scenario, self.best)}, "
            f"{self.best.step_time_s:.3f} s a step (each to about {band:.0%}"
            f"{'' if self.scenario.engine.is_calibrated else ', uncalibrated'}), "
            f"{self.best.peak_bytes / GIB:.1f} of {self.best.capacity_bytes / GIB:.1f} GiB.",
        ]
        if self.leads:
            lines.append(f"Before the next best, {self.result.ranked[1].layout}: {self.leads[0]}.")
        return lines + [f"{name}: {verdict.problems[0]}" for name, verdict in self.against]

    def to_document(self) -> dict[str, Any]:
        """For `--json`."""
        scenario, result = self.scenario, self.result
        document = {
            "ok": True,
            "scenario": _scenario_document(scenario, result.allowed_bytes),
            "searched": {"layouts": result.num_layouts, "counts": result.counts},
            "layouts": [
                {**_estimate_document(scenario, e), "why": why}
                for e, why in zip(result.ranked, [*self.leads, None], strict=True)
            ],
            "against": [{"change": name, **_verdict_document(verdict)} for name, verdict in self.against],
        }
        if self.verified:
            document["verified"] = [
                {"layout": asdict(v.estimate.layout), "peak_memory_bytes": v.peak_bytes,
                 "predicted_peak_memory_bytes": v.estimate.peak_bytes, "fits": v.fits}
                for v in self.verified
            ]  # fmt: skip
        if self.why_not:
            best = _estimate_document(scenario, self.completed) if self.completed else None
            document["why_not"] = {**_verdict_document(self.why_not), "best_with_these_choices": best}
        if self.options.baseline:
            document["baseline"] = _baseline_document(scenario, self.options.baseline, self.baseline, self.best)
        if self.options.emit:
            document["emitted"] = str(self.options.emit)
        return document

    def to_text(self) -> list[str]:
        """For people."""
        lines = [*_describe_scenario(self.scenario), "", *_table(self.scenario, self.result), ""]
        lines += [f"{place}  {lead}." for place, lead in enumerate(self.leads, start=1)]
        if self.verified:
            lines += ["", "Dry runs:", *(f"  {line}" for line in _verdicts(self.verified))]
        lines += ["", f"Against other choices than those of 1, {self.best.layout}:"]
        width = max(len(name) for name, _ in self.against)
        lines += [f"  {name:<{width}}  {_shorten(verdict)}" for name, verdict in self.against]
        if self.why_not:
            lines += ["", f"Why not {self.why_not.layout}? It is {self.why_not.outcome}:"]
            lines += [f"  {problem}" for problem in self.why_not.problems]
            lines += self._describe_completion()
        if self.options.baseline:
            lines += ["", *self._describe_baseline()]
        if self.options.emit:
            lines += ["", f"1 is written to {self.options.emit}"]
        return [*lines, "", _describe_counts(self.result)]

    def _describe_completion(self) -> list[str]:
        if self.completed is None:
            return ["  No layout with these choices is legal and fits."]
        if self.why_not and self.completed.layout == self.why_not.layout:
            return ["  It is the best with these choices."]
        difference = describe_difference(self.best, self.completed)
        return [f"  The best with these choices, {self.completed.layout}, is {difference}."]

    def _describe_baseline(self) -> list[str]:
        name = {"thumb": "The rule of thumb", "playbook": "The Ultra-Scale Playbook"}[self.options.baseline]
        if self.baseline is None:
            return [f"{name} finds no layout that is legal and fits."]
        found = self.baseline.estimate
        return [
            f"{name} chooses {found.layout}: {_mfu(self.scenario, found)}, {found.step_time_s:.3f} s a step",
            *(f"  {step}" for step in self.baseline.steps),
            f"  Against 1 it is {describe_difference(self.best, found)}.",
        ]


def _verify(scenario: Scenario, result: SearchResult, number: int) -> list["Verified"]:
    """The first `number` of them, and further ones until one fits."""
    from dtlayout.commands.verify import verify  # only now: it imports pydantic

    found: list[Verified] = []
    for verified in verify(scenario, result.ranked, result.allowed_bytes):
        found.append(verified)
        if len(found) >= number and any(v.fits for v in found):
            break
    return found


def _verdicts(verified: Sequence["Verified"]) -> list[str]:
    return [
        f"{v.estimate.layout}: {v.peak_bytes / GIB:.2f} GiB, predicted {v.estimate.peak_bytes / GIB:.2f} "
        f"({v.estimate.peak_bytes / v.peak_bytes - 1:+.1%}), {'fits' if v.fits else 'does not fit'}"
        for v in verified
    ]


def _check(options: argparse.Namespace) -> None:
    problems = [] if options.top >= 1 else [f"--top={options.top} must be at least 1"]
    if options.verify < 0:
        problems.append(f"--verify={options.verify} must not be negative")
    if options.verify and options.engine != OWN_ENGINE:
        problems.append(f"--verify runs our own trainer, not that of --engine={options.engine}; leave one of them out")
    if options.verify and options.scale:
        problems.append("--scale compares clusters; ask --verify of one of them")
    if not 0 < options.max_memory <= 1:
        problems.append(f"--max-memory={options.max_memory} must lie above 0 and be at most 1")
    if options.scale and (options.emit or options.why_not or options.baseline or options.min_gpus):
        problems.append("--scale compares clusters; ask --emit, --why-not, --baseline and --min-gpus of one of them")
    if problems:
        raise InvalidConfig(problems)


def _read_choices(options: argparse.Namespace) -> tuple[dict[str, Any], dict[str, list[Any]]]:
    """What is fixed and what is avoided."""
    fixed = dict(parse_choice(text) for text in options.fix)
    avoided: dict[str, list[Any]] = {}
    for name, value in (parse_choice(text) for text in options.avoid):
        avoided.setdefault(name, []).append(value)
    return fixed, avoided


def _read_sizes(text: str) -> list[int]:
    try:
        sizes = [int(part) for part in text.split(",")]
    except ValueError:
        raise InvalidConfig(f"--scale={text} is no list of numbers; write --scale 64,128,256") from None
    if min(sizes) < 1:
        raise InvalidConfig(f"--scale={text} must name at least 1 GPU each")
    return sizes


def _explain_nothing(space: Space, result: SearchResult) -> list[str]:
    """Why there is no layout, and what would help."""
    problems = [f"no layout can train {space.scenario.model.name} here: {_describe_counts(result)}"]
    if missed := result.smallest_misfit:
        text = describe_misfit(missed, result.allowed_bytes)
        problems.append(f"the one that misses by least, {missed.layout}: {text}")
        problems.append("--min-gpus finds the smallest cluster that works; a shorter --seq-len needs less")
    else:
        layout, kernels = parse_layout(space, {})
        problems += [f"for example {layout}: {line}" for line in find_problems(space, layout, kernels)]
        problems.append("use another number of GPUs or global batch, or fewer --fix and --avoid")
    return problems


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


def _table(scenario: Scenario, result: SearchResult) -> list[str]:
    parts = list(result.ranked[0].time.as_dict())
    width = max(6, *(len(_name(e)) for e in result.ranked))
    head = f"   {'layout':<{width}}  {'MFU':>12}  {'step s':>8}  {'memory of the busiest rank, GiB':<{_BAR + 14}}"
    lines = [head]
    for place, e in enumerate(result.ranked, start=1):
        lines.append(
            f"{place:<3}{_name(e):<{width}}  {_mfu(scenario, e, short=True):>12}  {e.step_time_s:>8.3f}  {_bar(e)}"
        )
    lines += ["", "   of the step, %".ljust(width - 8) + "".join(f"{part:>11}" for part in parts)]
    for place, e in enumerate(result.ranked, start=1):
        shares = "".join(f"{100 * seconds / e.step_time_s:>11.1f}" for seconds in e.time.as_dict().values())
        lines.append(f"{place:<3}".ljust(max(17, width - 8)) + shares)
    return lines


def _name(estimate: Estimate) -> str:
    usual = asdict(Kernels())
    odd = [
        kernel if name == "attention" else f"{name} {kernel}"
        for name, kernel in asdict(estimate.kernels).items()
        if kernel != usual[name]
    ]
    return " ".join([str(estimate.layout), *odd])


def _mfu(scenario: Scenario, estimate: Estimate, short: bool = False) -> str:
    """With its band; the CPU has no peak that would make one."""
    if scenario.cluster.gpu.name == "cpu":
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


def _describe_counts(result: SearchResult) -> str:
    parts = [f"{result.counts[reason]:,} {text}" for reason, text in _COUNTED.items() if result.counts[reason]]  # type: ignore[index]
    return f"{result.num_layouts:,} layouts: {', '.join(parts)}."


def _print_scale(options: argparse.Namespace, scenario: Scenario, rows: Sequence[ScaleRow]) -> int:
    """One row a cluster."""
    if options.json:
        entries = [
            {"num_gpus": row.num_gpus, "efficiency": row.efficiency,
             "layout": _estimate_document(scenario, row.estimate) if row.estimate else None}
            for row in rows
        ]  # fmt: skip
        print(json.dumps({"ok": True, "scenario": _scenario_document(scenario, None), "scale": entries}, indent=2))
        return 0
    tokens = scenario.batch.num_tokens
    print("\n".join(_describe_scenario(scenario)), end="\n\n")
    width = max((len(_name(row.estimate)) for row in rows if row.estimate), default=6)
    head = f"{'GPUs':>6}  {'layout':<{width}}  {'MFU':>12}  {'step s':>8}  {'tokens/s':>12}"
    print(f"{head}  microbatches  bubble  efficiency")
    for row in rows:
        if (e := row.estimate) is None:
            print(f"{row.num_gpus:>6}  no layout is legal and fits")
            continue
        print(
            f"{row.num_gpus:>6}  {_name(e):<{width}}  {_mfu(scenario, e, short=True):>12}  {e.step_time_s:>8.3f}  "
            f"{tokens / e.step_time_s:>12,.0f}  {e.layout.num_microbatches(scenario.batch):>12}  "
            f"{e.time.bubble / e.step_time_s:>6.1%}  {row.efficiency:>10.1%}"
        )
    return 0


def _scenario_document(scenario: Scenario, allowed_bytes: float | None) -> dict[str, Any]:
    return {
        "model": asdict(scenario.model), "parameters": count_parameters(scenario.model),
        "batch": asdict(scenario.batch), "gpu": scenario.cluster.gpu.name, "num_gpus": scenario.cluster.num_gpus,
        "gpus_per_node": scenario.cluster.gpus_per_node, "engine": scenario.engine.name,
        "calibrated": scenario.engine.is_calibrated, "error_band": scenario.engine.error,
        "records": [asdict(record) for record in scenario.cluster.records],
        "precision": asdict(scenario.precision), "allowed_bytes": allowed_bytes,
    }  # fmt: skip


def _estimate_document(scenario: Scenario, e: Estimate) -> dict[str, Any]:
    has_peak = scenario.cluster.gpu.name != "cpu"
    return {
        "name": _name(e), "layout": asdict(e.layout), "kernels": asdict(e.kernels), "stage_layers": e.stage_layers,
        "mfu": e.mfu if has_peak else None, "step_time_s": e.step_time_s,
        "tokens_per_s": scenario.batch.num_tokens / e.step_time_s, "time": e.time.as_dict(),
        "memory": [rank.as_dict() for rank in e.memory], "busiest_rank": e.busiest_rank, "peak_bytes": e.peak_bytes,
        "capacity_bytes": e.capacity_bytes,
    }  # fmt: skip


def _verdict_document(verdict: Verdict) -> dict[str, Any]:
    return {
        "layout": asdict(verdict.layout), "kernels": asdict(verdict.kernels), "outcome": verdict.outcome,
        "problems": verdict.problems, "step_time_s": verdict.estimate.step_time_s if verdict.estimate else None,
        "peak_bytes": verdict.estimate.peak_bytes if verdict.estimate else None,
    }  # fmt: skip


def _baseline_document(scenario: Scenario, name: str, baseline: Baseline | None, best: Estimate) -> dict[str, Any]:
    if baseline is None:
        return {"name": name, "layout": None}
    found = _estimate_document(scenario, baseline.estimate)
    slower = baseline.estimate.step_time_s / best.step_time_s - 1
    return {"name": name, "layout": found, "steps": baseline.steps, "slower_than_best": slower}
