"""Candidates: the layouts of a space as a tree, from classes of many layouts down to single ones.

    block class ─▶ with a recomputation ─▶ microbatch cost ─▶ candidate ─▶ layout

- *Block class* and *mapping*: see block_classes.py.
- *Microbatch cost*: seconds and bytes of one microbatch in a block and in the head. It belongs to a block class with
  recomputation, tp_overlap and kernels chosen; kernels that others dominate are left out (kernel_choices.py).
- *Candidate*: a microbatch cost and a mapping. Only the *state sharding* is open, that is how data-parallel ranks
  share parameters, gradients and optimizer state (`space.StateSharding`). Whatever that is, stages do equal work, and
  hold equal bytes beside the state.
- *Layout*: a candidate with one of its state shardings.

Each level has several times as many members as the one before, up to millions of layouts. So the search makes the
members of a level only from the few parents that it opens (best_first.py).
"""

from collections import Counter
from dataclasses import replace
from functools import cache
from itertools import starmap
from math import inf
from operator import add, itemgetter, le
from typing import Any, NamedTuple

from dtlayout.costmodel.cache_keys import PipelineLayout, StageLayout, StateLayout, key_of
from dtlayout.costmodel.estimate import Estimator
from dtlayout.costmodel.rank_groups import Counts, Stages
from dtlayout.costmodel.stage_work import LayoutWork
from dtlayout.costmodel.update import Sent, Update, find_update, hidden_share, least_update_s
from dtlayout.planner.block_classes import BlockClasses, StepMapping
from dtlayout.planner.kernel_choices import KernelChoices
from dtlayout.planner.peaks import BlockBytes, InFlight, Peaks, RankSizes
from dtlayout.planner.space import Degrees, Space, StateSharding
from dtlayout.spec.kernels import Kernels
from dtlayout.spec.layout import Layout


class MicrobatchCost(NamedTuple):
    """Seconds and bytes of one microbatch of a block class with some recomputation, tp_overlap and kernels."""

    layout: Layout
    """A layout of the block class with this recomputation and tp_overlap."""
    part: StageLayout
    """The part of the layout that seconds and bytes depend on."""
    kernels: Kernels
    times: LayoutWork
    """Seconds on any stage."""
    block: BlockBytes
    """Bytes that one microbatch holds in a block and in the head."""


class Pipeline(NamedTuple):
    """Stages of a mapping, and least bytes of them, whatever a microbatch costs.

    A step with more microbatches shares it if no rank holds more of them at a time.
    """

    stages: Stages
    in_flight: list[InFlight]
    """For each rank group the blocks in flight; twice for a group that is checked at two times."""
    state_bytes: dict[StateSharding, tuple[float, ...]]
    """For each state sharding the least bytes of the state, in the order of `in_flight`."""
    least_state_bytes: tuple[float, ...]
    """The least of these over all state shardings, in the order of `in_flight`."""


class Candidate(NamedTuple):
    """Layouts that differ in their state sharding alone; one of them may fit."""

    cost: MicrobatchCost
    mapping: StepMapping
    stages: Stages
    """Stages of its pipeline."""
    least_bytes: dict[StateSharding, float]
    """State shardings that may fit, with the least bytes that the fullest rank needs."""

    @property
    def layout(self) -> Layout:
        """A layout of these, with dp_shard = dp and without ZeRO-2 or 3."""
        pp, dp = self.mapping.pp, self.mapping.degrees.dp
        order: dict[str, Any] = {"schedule": self.mapping.schedule, "virtual_stages": self.mapping.virtual_stages}
        return replace(self.cost.layout, pp=pp, dp_shard=dp, **order)


class Candidates:
    """Makes the candidates of one space, and bounds them; what layouts share is computed once."""

    def __init__(self, space: Space, estimator: Estimator, peaks: Peaks, allowed_bytes: float):
        """`allowed_bytes` is how much a rank may hold."""
        self.space, self.estimator, self.peaks, self.allowed_bytes = space, estimator, peaks, allowed_bytes
        self.kernels = KernelChoices(space, estimator, peaks)
        self.block_classes = BlockClasses(space, estimator, self.kernels)
        self.sharded_layouts = cache(self._find_sharded_layouts)
        """State sharding → a layout that has it, for all state shardings at some degrees."""
        self.updates = cache(self._find_updates)
        """State sharding → reduction and update, for ranks of some degrees and RankSizes, with a head or without."""
        self.microbatch_costs = cache(self._find_microbatch_costs)
        """The costs of a block class with a recomputation, from its layouts: one for each pair of tp_overlap and
        kernels. Dominated pairs are left out; the number says how many these are."""
        self._state_bytes, self._group_bytes = cache(self._find_state_bytes), cache(self._find_group_bytes)
        self._pipelines, self._short_pipelines = cache(self._find_pipeline), cache(self._find_short_pipeline)
        self._sent = cache(self._find_sent)
        self._hidden_share = hidden_share(space.scenario)

    def _find_microbatch_costs(self, layouts: tuple[Layout, ...]) -> tuple[list[MicrobatchCost], int]:
        first, parts = layouts[0], {key_of(each, StageLayout): each for each in layouts}
        best = self.kernels.undominated(tuple(parts), first.splits_backward)
        found = [self.microbatch_cost(parts[part], kernels) for part, kernels in best]
        return found, len(parts) * len(self.kernels.legal_for(first, first.recompute)) - len(found)

    def microbatch_cost(self, layout: Layout, kernels: Kernels) -> MicrobatchCost:
        """The cost of one microbatch of a layout with some kernels."""
        part = key_of(layout, StageLayout)
        times, block = self.estimator.layout_work(part, kernels), self.peaks.block_bytes(part, kernels)
        return MicrobatchCost(layout, part, kernels, times, block)

    def need(self, layout: Layout, kernels: Kernels) -> tuple[float, float]:
        """Bytes that the fullest rank of a layout needs, and its peak; `Peaks.exact` up to `allowed_bytes`."""
        return self.peaks.need(layout, kernels, self.allowed_bytes)

    def with_update_s(self, bound_s: float, mapping: StepMapping) -> float:
        """A bound of a step without reduction and update, raised by those of the first ranks.

        It takes the cheapest state sharding of those whose state alone fits. Compute hides communication for at most a
        fixed share of its own time. So a step that computes some seconds longer than `bound_s` hides at most as many
        seconds more, and the raised bound holds for it too.
        """
        m = mapping.num_microbatches
        hidden_s = self._hidden_share * bound_s / m
        return bound_s + least_update_s(self._sent(mapping), m, hidden_s)

    def may_fit(self, block: BlockBytes, mapping: StepMapping, layout: PipelineLayout) -> bool:
        """True if any state sharding of a mapping may fit, where a microbatch holds no less than these bytes."""
        pipeline, allowed = self._pipelines(mapping, layout), self.allowed_bytes
        held_bytes = self.peaks.held_bytes(block, pipeline.in_flight)
        return all(held + state <= allowed for held, state in zip(held_bytes, pipeline.least_state_bytes, strict=True))

    def make_candidate(self, cost: MicrobatchCost, mapping: StepMapping, layout: PipelineLayout) -> Candidate | None:
        """The candidate with this cost and mapping; None if no state sharding can fit."""
        pipeline, allowed = self._pipelines(mapping, layout), self.allowed_bytes
        held: list[float] = []
        held_bytes = self.peaks.held_bytes(cost.block, pipeline.in_flight)
        for beside, state_bytes in zip(held_bytes, pipeline.least_state_bytes, strict=True):
            if beside + state_bytes > allowed:  # whatever the state sharding
                return None
            held.append(beside)
        needs = {sharding: max(map(add, held, least)) for sharding, least in pipeline.state_bytes.items()}
        if not (fitting := {sharding: need for sharding, need in needs.items() if need <= allowed}):
            return None
        return Candidate(cost, mapping, pipeline.stages, fitting)

    def sort_by_need(self) -> list[tuple[float, Candidate, StateSharding]]:
        """Every layout that may fit, as candidate and state sharding, with its least bytes; the smallest first."""
        in_classes = self.block_classes
        made = (
            (cost, mapping, pipeline)
            for found in in_classes.find(Counter())
            for block_class, bounds in in_classes.with_recompute(found)
            for cost in self.microbatch_costs(block_class.layouts)[0]
            for _, (mapping, pipeline, _) in bounds
        )
        least = [
            (need, candidate, sharding)
            for candidate in filter(None, starmap(self.make_candidate, made))
            for sharding, need in candidate.least_bytes.items()
        ]
        return sorted(least, key=itemgetter(0))

    def _find_sharded_layouts(self, degrees: Degrees) -> dict[StateSharding, Layout]:
        tp, pp, cp, ep, dp = degrees
        plain = Layout(tp=tp, pp=pp, cp=cp, ep=ep, dp_shard=dp, offload=self.space.offload)
        return {sharding: sharding.of(plain) for sharding in self.space.shardings(degrees)}

    def _find_pipeline(self, mapping: StepMapping, pipeline: PipelineLayout) -> Pipeline:
        return self._short_pipelines(pipeline, mapping.degrees, pipeline.shorten(mapping.num_microbatches))

    def _find_short_pipeline(self, pipeline: PipelineLayout, degrees: Degrees, m: int) -> Pipeline:
        stages, in_flight = self.estimator.groups(pipeline), self.peaks.in_flight(pipeline, m)
        moments = tuple([(each.group.counts, each.has_gradients) for each in in_flight])
        return Pipeline(stages, in_flight, *self._state_bytes(degrees, moments))

    def _find_sent(self, mapping: StepMapping) -> list[Sent]:
        """Communication of the first ranks, for each state sharding that fits by itself and is not dominated."""
        degrees, m, scenario = mapping.degrees, mapping.num_microbatches, self.space.scenario
        pipeline = self._pipelines(mapping, self.block_classes.pipeline_of(mapping, recomputed=(0, 1)))
        group, layouts = pipeline.stages.groups[0], self.sharded_layouts(degrees)
        updates = self.updates(degrees, self.peaks.sizes(group.counts, degrees.tp, degrees.ep), group.has_head)
        fitting = [each for each, least in pipeline.state_bytes.items() if max(least) <= self.allowed_bytes]
        # A sharding is dominated if another sends no more of anything.
        sent = dict.fromkeys([Sent.of(scenario, layouts[each], updates[each], m) for each in fitting])
        return [each for each in sent if not any(other is not each and all(map(le, other, each)) for other in sent)]

    def _find_state_bytes(
        self, degrees: Degrees, moments: tuple[tuple[Counts, bool], ...]
    ) -> tuple[dict[StateSharding, tuple[float, ...]], tuple[float, ...]]:
        """`Pipeline.state_bytes` and `least_state_bytes`.

        `moments` has, for each rank group, what it counts and whether all its gradients exist at that moment.
        """
        least = [
            self._group_bytes(degrees, self.peaks.sizes(each, degrees.tp, degrees.ep), has_gradients)
            for each, has_gradients in moments
        ]
        by_sharding = dict(zip(self.sharded_layouts(degrees), zip(*least, strict=True), strict=True))
        return by_sharding, tuple([min(each, default=inf) for each in least])

    def _find_group_bytes(self, degrees: Degrees, size: RankSizes, has_gradients: bool) -> list[float]:
        """Least bytes of a rank's state, in the order of `sharded_layouts`."""
        parts = [key_of(layout, StateLayout) for layout in self.sharded_layouts(degrees).values()]
        return [self.peaks.state_bytes(part, size, has_gradients) for part in parts]

    def _find_updates(self, degrees: Degrees, size: RankSizes, has_head: bool) -> dict[StateSharding, Update]:
        n, scenario, of_experts = size.num_parameters, self.space.scenario, size.num_of_experts
        return {
            sharding: find_update(scenario, layout, n, has_head=has_head, of_experts=of_experts, apart=size.apart)
            for sharding, layout in self.sharded_layouts(degrees).items()
        }
