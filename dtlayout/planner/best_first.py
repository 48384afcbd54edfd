"""Best-first branch and bound: finds the fastest layouts that fit without building most of the space.

    take the node with the lowest bound ─▶ refine it ─▶ put its children back, until the lowest bound is above the limit

- *Node*: layouts that are still undecided together, with a *bound*: no step of these layouts takes fewer seconds.
- *Refinement*: the next thing to find out about a node. It splits the node into parts, or finds a tighter bound. Each
  level of `Refinement` costs more than the one before, and tells more.
- *Limit*: the slowest step that may still be ranked. It falls as layouts are found to fit. Once the lowest bound is
  above it, all layouts left are too slow, and most of them were never made.
- *Dominance*: a layout is dominated if another one is surely ranked in its place. Alike layouts are a *group*, and only
  the best of them is ranked; inside a group, a layout dominates another if it is no slower and preferred. Between
  groups the caller gives the rule (`ranking.Dominance`).

block_classes.py and candidates.py say what the layouts of a node are: block classes, mappings, microbatch costs,
candidates and state shardings.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator
from enum import IntEnum
from heapq import heapify, heappop, heappush, nsmallest
from itertools import compress
from math import inf
from typing import Any, NamedTuple

from dtlayout.planner.block_classes import BlockClass, BoundMapping, Reason, StepMapping
from dtlayout.planner.candidates import Candidates, MicrobatchCost
from dtlayout.planner.peaks import BlockBytes
from dtlayout.planner.ranking import (
    TIE,
    Dominance,
    RankedLayout,
    TimedLayout,
    choose_best,
    no_dominance,
    prefer,
    to_percent,
)
from dtlayout.planner.space import StateSharding
from dtlayout.planner.step_times import StepTimes
from dtlayout.spec.layout import Layout

GroupOf = Callable[[Layout, StepMapping], Hashable]
"""Names the group of alike layouts to which those of a block class belong, from one of them, and a mapping."""

_TOGETHER = 0.04
"""Relative distance of bounds up to which mappings are refined together: fewer nodes, and a few mappings in vain."""
_OF_CLASS = ("tp", "cp", "cp_method", "ep", "micro_batch", "sequence_parallel")
"""Fields of a layout that a block class decides."""
_OF_COST = (*_OF_CLASS, "recompute", "tp_overlap")
"""Fields of a layout that a microbatch cost decides."""


class Refinement(IntEnum):
    """The next thing to find out about a node, from the cheapest level to the dearest."""

    CHOOSE_RECOMPUTE = 1
    """Split a block class by recomputation, and bound the step of each mapping."""
    ADD_UPDATE = 2
    """Raise the bounds of its mappings by reduction and update."""
    CHOOSE_KERNELS = 3
    """Split by tp_overlap and kernels into microbatch costs, and bound each mapping anew."""
    CHOOSE_MAPPING = 4
    """Split a microbatch cost into candidates that may fit, each with the bound of its busiest rank."""
    CHOOSE_SHARDING = 5
    """Split a candidate by state sharding, and add reduction and update to the bound."""
    SIMULATE = 6
    """Simulate the pipeline, which gives the exact step time of one layout."""
    CHECK_MEMORY = 7
    """Compute the exact memory of one layout, and take it or leave it out."""


class SearchNode(NamedTuple):
    """Layouts of which one may be among the best; the node with the lowest bound is refined first."""

    bound_s: float
    """Lower bound of their steps; from CHECK_MEMORY on their step time."""
    serial: int
    """Number that no other node has, so that nodes with equal bounds are sorted too."""
    refinement: Refinement
    """The next thing to find out."""
    payload: Any
    """The layouts themselves, by refinement.

    CHOOSE_RECOMPUTE: a BlockClass. ADD_UPDATE and CHOOSE_KERNELS: a BlockClass and some of its mappings with bounds.
    CHOOSE_MAPPING: a MicrobatchCost and some mappings with bounds. CHOOSE_SHARDING: StepTimes. SIMULATE: StepTimes, a
    state sharding, and an iterator of the slower ones. CHECK_MEMORY: StepTimes and a state sharding.
    """


class Choice(NamedTuple):
    """A value that a field of the layout must have."""

    name: str
    value: Any

    def allows(self, part: Any) -> bool:
        """Whether a part of a layout has the value, or lacks the field."""
        return bool(getattr(part, self.name, self.value) == self.value)

    def may_be_in(self, node: SearchNode) -> bool:
        """Whether a layout of a node may have the value."""
        match node.refinement:
            case Refinement.CHOOSE_RECOMPUTE:
                return self.name not in _OF_CLASS or self.allows(node.payload.layouts[0])
            case Refinement.ADD_UPDATE | Refinement.CHOOSE_KERNELS:
                return self.name not in (*_OF_CLASS, "recompute") or self.allows(node.payload[0].layouts[0])
            case Refinement.CHOOSE_MAPPING:
                return self.name not in _OF_COST or self.allows(node.payload[0].layout)
        cost, mapping = node.payload.candidate[:2]
        decided = mapping if hasattr(mapping, self.name) else cost.layout
        return self.name in StateSharding._fields or self.allows(decided)


class BestFirstSearch:
    """Finds layouts that fit, among them the best of each of the `top` best groups."""

    def __init__(
        self,
        candidates: Candidates,
        serials: Iterator[int],
        top: int = 1,
        group_of: GroupOf = lambda layout, mapping: None,
        max_slowdown: float = inf,
        dominance: Dominance = no_dominance,
        choice: Choice | None = None,
    ):
        """`choice` leaves the layouts that have it; by default all layouts are one group.

        A step may take `max_slowdown` times the fastest. `dominance` says which groups are not ranked.
        """
        self.fitting: list[TimedLayout] = []
        """Layouts that fit, in the order in which they were found."""
        self.num_in_group = Counter[Hashable]()
        """Group → number of its layouts that were reached and may fit."""
        self.counts = Counter[Reason]()
        """Reason → number of layouts that left for it; "bounded" falls as others rise."""
        self._candidates, self._serials = candidates, serials
        self._top, self._group_of, self._max_slowdown, self._choice = top, group_of, max_slowdown, choice
        self._dominance = dominance
        self._capacity_bytes = candidates.estimator.capacity_bytes
        self._queue: list[SearchNode] = []
        self._set_aside: list[SearchNode] = []
        self._fastest_s: dict[Hashable, float] = {}
        self._fitting_in_group = defaultdict[Hashable, list[TimedLayout]](list)
        self._best: list[RankedLayout] = []
        self._limit_s = inf
        self._refine: dict[Refinement, Callable[[SearchNode], None]] = {
            Refinement.CHOOSE_RECOMPUTE: self._choose_recompute, Refinement.ADD_UPDATE: self._add_update,
            Refinement.CHOOSE_KERNELS: self._choose_kernels, Refinement.CHOOSE_MAPPING: self._choose_mapping,
            Refinement.CHOOSE_SHARDING: self._choose_sharding, Refinement.SIMULATE: self._simulate,
            Refinement.CHECK_MEMORY: self._check_memory,
        }  # fmt: skip

    def run(self, nodes: Iterable[SearchNode]) -> list[SearchNode]:
        """Refine nodes until no layout left can be ranked; returns nodes from which another search can go on.

        The nodes returned hold every layout that neither memory nor dominated kernels rule out; a single layout comes
        back as its candidate.
        """
        self._queue = list(nodes)
        heapify(self._queue)
        while self._queue and self._queue[0].bound_s <= self._limit_s:
            node = heappop(self._queue)
            if self._choice is None or node.refinement > Refinement.CHOOSE_SHARDING or self._choice.may_be_in(node):
                self._refine[node.refinement](node)
            else:
                self._set_aside.append(node)
        return self._set_aside + [node for node in self._queue if node.refinement <= Refinement.CHOOSE_SHARDING]

    def _push(self, bound_s: float, refinement: Refinement, payload: Any) -> None:
        heappush(self._queue, SearchNode(bound_s, next(self._serials), refinement, payload))

    def _has_faster(self, group: Hashable, bound_s: float) -> bool:
        """True if a layout of the group fits that is surely faster."""
        return bound_s > (1 + TIE) * self._fastest_s.get(group, inf)

    def _may_be_ranked(self, times: StepTimes, sharding: StateSharding, bound_s: float) -> bool:
        """True if a layout may be ranked for its group: none that fits is surely faster or preferred to it, and none of
        the best surely dominates it."""
        group, least_bytes = self._group_of_times(times), times.candidate.least_bytes[sharding]
        if self._has_faster(group, bound_s):
            return False
        layout, kernels = times.candidate.layout, times.candidate.cost.kernels
        least = prefer(bound_s, least_bytes, layout, self._capacity_bytes)
        for each in self._fitting_in_group[group]:
            if each.time_s <= bound_s and each.preference < least and each.peak_bytes <= least_bytes:
                return False
        return not self._is_dominated(TimedLayout(bound_s, least_bytes, least_bytes, layout, kernels, group))

    def _is_dominated(self, timed: TimedLayout) -> bool:
        """True if a layout is surely dominated. Its time and bytes are given as the least that it can take.

        Only layouts beside which another of their group fits that is no slower: were this one preferred to the other,
        both would be dominated, since one that is not needs less memory, in whole percents. So it changes nothing that
        is ranked.
        """
        settled = [each.timed for each in self._best if each.settled_s < timed.time_s]
        if not settled or timed.time_s < self._fastest_s.get(timed.group, inf):
            return False
        percent = to_percent(timed.peak_bytes, self._capacity_bytes)
        smallest = timed._replace(peak_bytes=(percent - 0.5) / 100 * self._capacity_bytes)
        return any(self._dominance(smallest, better) for better in settled)

    def _choose_recompute(self, node: SearchNode) -> None:
        for block_class, bounds in self._candidates.block_classes.with_recompute(node.payload):
            self._push_bounds(Refinement.ADD_UPDATE, block_class, bounds)

    def _push_bounds(
        self, refinement: Refinement, parent: BlockClass | MicrobatchCost, bounds: list[BoundMapping]
    ) -> None:
        if bounds:
            self._push(min([bound_s for bound_s, _ in bounds]), refinement, (parent, bounds))

    def _take_lowest(self, node: SearchNode) -> list[BoundMapping]:
        """Mappings of a node that may be ranked for their groups, with bounds close to the lowest.

        Those with higher bounds go back to the queue as one node.
        """
        (parent, bounds), most_s = node.payload, (1 + _TOGETHER) * node.bound_s
        self._push_bounds(node.refinement, parent, [each for each in bounds if each[0] > most_s])
        layout = parent.layout if isinstance(parent, MicrobatchCost) else parent.layouts[0]
        taken, set_aside = list[BoundMapping](), list[BoundMapping]()
        for each in bounds:
            if each[0] <= most_s:
                has_faster = self._has_faster(self._group_of(layout, each[1].mapping), each[0])
                (set_aside if has_faster else taken).append(each)
        if set_aside:
            self._set_aside.append(node._replace(serial=next(self._serials), payload=(parent, set_aside)))
        return taken

    def _add_update(self, node: SearchNode) -> None:
        with_update_s = self._candidates.with_update_s
        raised = [(with_update_s(bound_s, each.mapping), each) for bound_s, each in self._take_lowest(node)]
        self._push_bounds(Refinement.CHOOSE_KERNELS, node.payload[0], raised)

    def _choose_kernels(self, node: SearchNode) -> None:
        taken, with_update_s = self._take_lowest(node), self._candidates.with_update_s
        costs, num_dominated = self._candidates.microbatch_costs(node.payload[0].layouts)
        self._count("slower kernels", num_dominated * sum([each.mapping.num_shardings for _, each in taken]))
        least = BlockBytes(*map(min, zip(*[cost.block for cost in costs], strict=True)))
        may_fit = [self._candidates.may_fit(least, each.mapping, each.pipeline) for _, each in taken]
        misfits = [each.mapping for fits, (_, each) in zip(may_fit, taken, strict=True) if not fits]
        self._count("does not fit", len(costs) * sum([mapping.num_shardings for mapping in misfits]))
        taken = list(compress(taken, may_fit))
        for cost in costs:
            bounds = [(with_update_s(each.bound_s(*cost.times.least_s), each.mapping), each) for _, each in taken]
            self._push_bounds(Refinement.CHOOSE_MAPPING, cost, bounds)

    def _choose_mapping(self, node: SearchNode) -> None:
        cost, choice = node.payload[0], self._choice
        set_aside, num_misfits = list[BoundMapping](), 0
        for each in self._take_lowest(node):
            bound_s, (mapping, pipeline, _) = each
            if choice and not choice.allows(mapping):
                set_aside.append(each)
                continue
            if candidate := self._candidates.make_candidate(cost, mapping, pipeline):
                times = StepTimes(self._candidates, candidate)
                if choice and not any(map(choice.allows, candidate.least_bytes)):
                    self._set_aside.append(SearchNode(bound_s, next(self._serials), Refinement.CHOOSE_SHARDING, times))
                else:
                    self._push(times.bound_s, Refinement.CHOOSE_SHARDING, times)
                self.num_in_group[self._group_of(cost.layout, mapping)] += len(candidate.least_bytes)
                num_misfits += mapping.num_shardings - len(candidate.least_bytes)
            else:
                num_misfits += mapping.num_shardings
        self._count("does not fit", num_misfits)
        if set_aside:
            self._set_aside.append(node._replace(serial=next(self._serials), payload=(cost, set_aside)))

    def _count(self, reason: Reason, number: int) -> None:
        self.counts[reason] += number
        self.counts["bounded"] -= number

    def _choose_sharding(self, node: SearchNode) -> None:
        times, choice = node.payload, self._choice
        allowed = [each for each in times.candidate.least_bytes if choice is None or choice.allows(each)]
        if not allowed or self._has_faster(self._group_of_times(times), node.bound_s):
            self._set_aside.append(node)
            return
        self._set_aside.append(node._replace(bound_s=times.sharding_bounds[0][0]))
        self._push_next(times, iter([each for each in times.sharding_bounds if each[1] in allowed]))

    def _group_of_times(self, times: StepTimes) -> Hashable:
        return self._group_of(times.candidate.cost.layout, times.candidate.mapping)

    def _push_next(self, times: StepTimes, shardings: Iterator[tuple[float, StateSharding]]) -> None:
        """Push the first of the shardings, which come with the lowest bound first, and keep the others with it."""
        for bound_s, sharding in shardings:
            self._push(bound_s, Refinement.SIMULATE, (times, sharding, shardings))
            break

    def _simulate(self, node: SearchNode) -> None:
        times, sharding, others = node.payload
        if self._has_faster(self._group_of_times(times), node.bound_s):
            return
        bound_s = times.waiting_s + times.update_s(sharding)
        if bound_s > node.bound_s:
            self._push(bound_s, Refinement.SIMULATE, node.payload)
            return
        if self._may_be_ranked(times, sharding, node.bound_s):
            self._push(times.step_s(sharding), Refinement.CHECK_MEMORY, (times, sharding))
        self._push_next(times, others)

    def _check_memory(self, node: SearchNode) -> None:
        (times, sharding), step_s = node.payload, node.bound_s
        if not self._may_be_ranked(times, sharding, step_s):
            return
        group, kernels = self._group_of_times(times), times.candidate.cost.kernels
        layout = sharding.of(times.candidate.layout)
        needed, peak = self._candidates.need(layout, kernels)
        if needed > self._candidates.allowed_bytes:
            self.num_in_group[group] -= 1
            self._count("does not fit", 1)
            return
        time_s = step_s + times.thrash_s(peak)
        preference = prefer(time_s, peak, layout, self._capacity_bytes, f"{layout} {kernels}")
        self._add_fitting(TimedLayout(time_s, needed, peak, layout, kernels, group, preference))

    def _add_fitting(self, timed: TimedLayout) -> None:
        """Keep a layout that fits, and lower the limit."""
        self.fitting.append(timed)
        self._fitting_in_group[timed.group].append(timed)
        self._fastest_s[timed.group] = min(timed.time_s, self._fastest_s.get(timed.group, inf))
        self._limit_s = self._max_slowdown * min(self._fastest_s.values())
        if self._dominance is not no_dominance:
            self._best = choose_best(self.fitting, self._top, dominance=self._dominance)
        if len(self._fastest_s) >= self._top:
            self._limit_s = min(self._limit_s, self._find_last_s())
        self._limit_s *= 1 + TIE

    def _find_last_s(self) -> float:
        """Step time of the last ranked layout as things stand; infinite while fewer than `top` are ranked."""
        if self._dominance is no_dominance:
            return nsmallest(self._top, self._fastest_s.values())[-1]
        return self._best[-1].timed.time_s if len(self._best) == self._top else inf
