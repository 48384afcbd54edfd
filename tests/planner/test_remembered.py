"""Remembered results never show: after any number of layouts, each answer is to the bit that of a fresh search."""

import functools
import sys
from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from itertools import combinations
from random import Random
from typing import Any

import pytest
from machine import MACHINE
from thorough import mostly_thorough, thorough
from tiny import SHAPE

from dtlayout.costmodel import cache_keys
from dtlayout.costmodel.cache_keys import (
    BlockLayout,
    ComputeLayout,
    CutLayout,
    PipelineLayout,
    StageLayout,
    StateLayout,
    TensorLayout,
    key_of,
)
from dtlayout.costmodel.engine import find_engine, find_engine_on
from dtlayout.costmodel.estimate import Estimator
from dtlayout.costmodel.scenario import Scenario
from dtlayout.planner.block_classes import StepMapping
from dtlayout.planner.candidates import Candidates
from dtlayout.planner.peaks import Peaks
from dtlayout.planner.search import Search
from dtlayout.planner.space import Degrees, Space
from dtlayout.planner.step_times import StepTimes
from dtlayout.spec.batch import Batch
from dtlayout.spec.cluster import Cluster, find_gpu
from dtlayout.spec.kernels import COMPILE_OPTIONS, Kernels
from dtlayout.spec.layout import Layout
from dtlayout.spec.model_shape import Experts
from dtlayout.spec.precision import Precision

MODEL = replace(SHAPE, hidden_size=512, num_heads=8, num_kv_heads=4, ffn_size=1024, num_layers=12, vocab_size=8192)
BATCH = Batch(global_batch=64, seq_len=512)
EXPERTS = replace(MODEL, experts=Experts(number=8, per_token=2, ffn_size=256, shared_ffn_size=128, dense_layers=3))
BASES = (Layout(pp=2, tp=2, dp_shard=2), Layout(dp_shard=4, zero=3))
LAYOUTS = {
    "pp": [{"pp": n} for n in (1, 2, 4)],
    "dp_replicate": [{"dp_replicate": 2}],
    "dp_shard": [{"dp_shard": n} for n in (1, 8)],
    "cp": [{"cp": 2}],
    "cp_method": [{"cp": 2, "cp_method": name} for name in ("gather", "all-to-all")],
    "tp": [{"tp": 1}, {"tp": 4}],
    "ep": [{"ep": 2}],
    "ep_overlap": [{"ep": 2, "ep_overlap": True}],
    "ep_dispatcher": [{"dp_shard": n, "ep": n, "ep_dispatcher": "deepep"} for n in (8, 4)],
    "sequence_parallel": [{"sequence_parallel": False}],
    "tp_overlap": [{"tp_overlap": True}],
    "micro_batch": [{"micro_batch": 4}],
    "schedule": [{"schedule": "gpipe"}],
    "virtual_stages": [{"schedule": "interleaved-1f1b", "virtual_stages": n} for n in (2, 3)],
    "stage_layers": [{"stage_layers": (4, 8)}, {"stage_layers": (12,)}],
    "zero": [{"zero": 2}],
    "recompute": [{"recompute": kind} for kind in ("full", "every-4", "selective", "keep-attention", "keep-matmuls")],
    "offload": [{"offload": what} for what in ("activations", "optimizer", "disk")],
    "offload_folder": [{"offload": "disk", "offload_folder": "/scratch"}],
}
"""Changes of each field of a layout."""
KERNELS = {
    "attention": ["sdpa-math", "sdpa-efficient"], "norm": ["eager"], "rope": ["liger"], "swiglu": ["liger"],
    "loss": ["eager", "linear"], "experts": ["grouped"], "compile": ["blocks"],
}  # fmt: skip
"""Other values of each kernel."""


def on_gpus(engine: str, **constants: float) -> Scenario:
    constants = {"layer_host_message_s": 1e-3, "thrash_share": 0.8} | constants
    found = find_engine(engine, "a100-80g-sxm").with_constants(**constants)
    gpu = replace(find_gpu("a100-80g-sxm"), memory_bytes=int(1.5e9))
    return Scenario(
        model=MODEL, batch=BATCH, cluster=Cluster(gpu=gpu, num_gpus=8, gpus_per_node=4), engine=found,
        document_mask=True,
    )  # fmt: skip


SCENARIOS = {
    "own": on_gpus("dtlayout", context_bytes=0.0),
    "nanotron": on_gpus("nanotron", context_bytes=0.0, layer_host_tp_s=5e-3),
    "cores": Scenario(
        model=MODEL, batch=BATCH, cluster=MACHINE, engine=find_engine_on("dtlayout", MACHINE.gpu),
        precision=Precision(compute="float32"),
    ),
}  # fmt: skip


def make_cases() -> list[tuple[Layout, Kernels]]:
    """The bases with any one change, and with half of all pairs; all but those with cp or ep can run."""
    changes = [("layout", change) for of_field in LAYOUTS.values() for change in of_field]
    changes += [("kernels", {name: value}) for name, values in KERNELS.items() for value in values]
    found: dict[tuple[Layout, Kernels], None] = {}
    for base in BASES:
        pairs = list(combinations([("", {}), *changes], 2))
        for pair in [*pairs[: len(changes)], *pairs[len(changes) :: 2]]:
            layout = replace(base, **{k: v for kind, change in pair if kind == "layout" for k, v in change.items()})
            kernels = Kernels(**{k: v for kind, change in pair if kind == "kernels" for k, v in change.items()})
            if replace(layout, cp=1, ep=1).is_legal(MODEL, BATCH):
                found[layout, kernels] = None
    return list(found)


CASES = make_cases()


def cases_on(scenario: Scenario) -> list[tuple[Layout, Kernels]]:
    """CASES that can run on the whole cluster, their state sharded over all data-parallel ranks."""
    num_gpus, found = scenario.cluster.num_gpus, dict[tuple[Layout, Kernels], None]()
    for layout, kernels in CASES:
        rest = num_gpus // (layout.tp * layout.pp)
        on_all = replace(layout, dp_replicate=1, dp_shard=max(1, rest), zero=1)
        if on_all.world_size == num_gpus and on_all.is_legal(MODEL, BATCH):
            found[on_all, kernels] = None
    return list(found)


def forget() -> None:
    """Clear results that modules remember for all scenarios."""
    for name in [name for name in sys.modules if name.startswith(("dtlayout.costmodel.fsdp2", "dtlayout.pipelining"))]:
        for value in vars(sys.modules[name]).values():
            if isinstance(value, functools._lru_cache_wrapper):
                value.cache_clear()


def test_every_field_is_changed():
    assert set(LAYOUTS) == {f.name for f in fields(Layout)}
    assert set(KERNELS) == {f.name for f in fields(Kernels)} - {*COMPILE_OPTIONS}  # which no search varies
    for name in LAYOUTS:
        assert len({getattr(layout, name) for layout, _ in CASES}) > 1, name


AT_ONCE = dict.fromkeys(("layer_host_s", "layer_host_tp_s", "layer_host_message_s", "experts_host_s"), 0.0)
"""Constants of a host that is never waited for: where it sets the pace, nothing is seen of a block's own time."""
WITH_EXPERTS = {
    f"experts on {engine}": replace(on_gpus(engine, **AT_ONCE), model=EXPERTS)
    for engine in ("megatron", "torchtitan", "dtlayout")
}
"""Scenarios whose engines have experts."""


@pytest.mark.parametrize("stride", [2, thorough(1)])
def test_estimators_that_have_seen_everything_say_what_fresh_ones_say(stride):
    scenarios = SCENARIOS | WITH_EXPERTS
    known = {name: Estimator(scenario) for name, scenario in scenarios.items()}
    everything = [(name, case) for name in scenarios for case in CASES]
    Random(0).shuffle(everything)
    for name, case in everything:
        known[name].estimate(*case)
    forget()
    for name, case in everything[::stride]:
        fresh = Estimator(scenarios[name])
        assert known[name].estimate(*case) == fresh.estimate(*case), (name, case)
        assert known[name].lower_bound_s(*case) == fresh.lower_bound_s(*case), (name, case)


CandidatesOf = Callable[[tuple[int, ...]], Candidates]


def find_candidates(scenario: Scenario) -> CandidatesOf:
    """stage_layers → candidates of the space with these; all share what is remembered of the scenario."""
    estimator = Estimator(scenario)
    peaks = Peaks(estimator)
    return functools.cache(
        lambda cuts: Candidates(Space(scenario, {"stage_layers": cuts}), estimator, peaks, estimator.capacity_bytes)
    )


def describe(candidates_of: CandidatesOf, layout: Layout, kernels: Kernels) -> tuple[Any, ...]:
    """All answers that a search uses for a layout."""
    candidates = candidates_of(layout.stage_layers)
    m, part = layout.num_microbatches(candidates.space.scenario.batch), key_of(layout, StageLayout)
    cost = candidates.microbatch_cost(layout, kernels)
    mapping = StepMapping(Degrees.of(layout), layout.schedule, layout.virtual_stages, m, 1)
    candidate = candidates.make_candidate(cost, mapping, PipelineLayout.of(layout))
    if candidate is None:
        return None, m, candidates.with_update_s(1.0, mapping)
    times = StepTimes(candidates, candidate)
    with_update_s = candidates.with_update_s(times.bound_s, mapping)
    assert with_update_s <= (1 + 1e-9) * times.sharding_bounds[0][0]
    steps = [times.step_s(sharding) for sharding in candidate.least_bytes]
    made = (*candidate[1:], cost.block, candidates.kernels.undominated((part,)))
    assert times.bound_s <= times.waiting_s <= (1 + 1e-9) * min(steps)
    return made, with_update_s, times.bound_s, times.waiting_s, times.sharding_bounds, steps


def test_candidates_that_follow_all_others_are_those_of_a_fresh_search():
    known = {name: find_candidates(scenario) for name, scenario in SCENARIOS.items()}
    everything = [(name, case) for name, scenario in SCENARIOS.items() for case in cases_on(scenario)]
    Random(1).shuffle(everything)
    for name, case in everything:
        describe(known[name], *case)
    forget()
    described = [describe(known[name], *case) for name, case in everything]
    assert {each[0] is None for each in described} == {True, False}
    assert any(each[3] > each[2] for each in described if each[0]), "a schedule that knows more of its waits"
    for name, case in everything:
        assert describe(known[name], *case) == describe(find_candidates(SCENARIOS[name]), *case), (name, case)


@pytest.mark.parametrize("name", mostly_thorough(SCENARIOS, lambda _, name: name != "cores"))
def test_a_search_that_ran_before_finds_the_same_again(name):
    space = Space(SCENARIOS[name], {"norm": "fused"}, {"recompute": ["every-2", "every-8"]})
    search = Search(space)
    first, kinds, having = search.run(), search.run_kinds(), search.best_with("recompute", "full")
    assert first == search.run() == Search(space).run() and first.ranked
    assert kinds == search.run_kinds() == Search(space).run_kinds() and kinds.ranked
    assert having == search.best_with("recompute", "full") == Search(space).best_with("recompute", "full")


PARTS = (BlockLayout, ComputeLayout, TensorLayout, StageLayout, CutLayout, PipelineLayout, StateLayout)


def say(name: str) -> Iterator[Any]:
    """The answers of one estimator and one search to every case, one after the other."""
    if name in WITH_EXPERTS:
        estimator = Estimator(WITH_EXPERTS[name])
        peaks = Peaks(estimator)
        for layout, kernels in CASES[1::3]:
            yield estimator.lower_bound_s(layout, kernels), estimator.memory(layout, kernels)
            for group in estimator.groups(PipelineLayout.of(layout)).groups:
                yield peaks.state_bytes(key_of(layout, StateLayout), peaks.sizes(group.counts, layout.tp, layout.ep), 2)
        return
    candidates_of = find_candidates(SCENARIOS[name])
    for layout, kernels in CASES[1::3]:
        candidates = candidates_of(layout.stage_layers)
        yield candidates.estimator.lower_bound_s(layout, kernels)
        for group in candidates.estimator.groups(PipelineLayout.of(layout)).groups:
            size = candidates.peaks.sizes(group.counts, layout.tp, layout.ep)
            yield candidates.peaks.state_bytes(key_of(layout, StateLayout), size, 2)
    for case in cases_on(SCENARIOS[name])[1::3]:
        yield describe(candidates_of, *case)


@pytest.fixture(scope="module")
def right() -> dict[str, list[Any]]:
    return {name: list(say(name)) for name in SCENARIOS | WITH_EXPERTS}


@pytest.mark.parametrize(("part", "field"), [(part, field) for part in PARTS for field in part._fields])
def test_every_field_of_every_part_matters_to_some_case(part, field, right, monkeypatch):
    """If a part lacked the field, results of another layout would come back, and these cases would show it."""
    if part is PipelineLayout:
        new, value = part.__new__, getattr(part.of(BASES[0]), field)
        monkeypatch.setattr(part, "__new__", lambda *values: new(*values)._replace(**{field: value}))
    else:
        read, value = cache_keys._READ[part], getattr(key_of(BASES[0], part), field)
        monkeypatch.setitem(cache_keys._READ, part, lambda layout: part._make(read(layout))._replace(**{field: value}))

    def is_noticed(name: str) -> bool:
        try:
            return any(own != said for own, said in zip(right[name], say(name), strict=True))
        except (AssertionError, IndexError, KeyError):  # stages that the pipeline does not have
            return True

    assert any(map(is_noticed, SCENARIOS | WITH_EXPERTS)), (
        f"{part.__name__}.{field} is read by nothing, or by nothing tested here"
    )
