"""Search: the fastest layouts that fit, out of all that a space holds.

    legal → not dominated by other kernels → lower bound of its step time → may fit → simulated → fits

candidates.py makes layouts level by level, best_first.py decides which node to refine next, and ranking.py ranks what
fits. The search ends when no lower bound lies below the step time of the k-th best. So every layout outside the best k
is slower, alike to one of them, or dominated by one; whether such a layout fits is not always known.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache, cached_property
from itertools import count
from math import inf
from typing import Any, NamedTuple, get_args

from dtlayout.costmodel.cache_keys import StageLayout, key_of
from dtlayout.costmodel.estimate import Estimate, Estimator
from dtlayout.planner.best_first import BestFirstSearch, Choice, GroupOf, Refinement, SearchNode
from dtlayout.planner.block_classes import Reason, StepMapping
from dtlayout.planner.candidates import Candidates
from dtlayout.planner.peaks import Peaks
from dtlayout.planner.ranking import (
    MAX_SLOWDOWN,
    Dominance,
    LayoutKind,
    TimedLayout,
    choose_best,
    is_dominated,
    no_dominance,
)
from dtlayout.planner.simplicity import without_idle_overlap
from dtlayout.planner.space import Space
from dtlayout.spec.kernels import Kernels
from dtlayout.spec.layout import Layout


class SearchResult(NamedTuple):
    """The best layouts of a space, and why the others left the search."""

    ranked: tuple[Estimate, ...]
    """The best layouts, best first; empty if no layout is legal and fits."""
    counts: dict[Reason, int]
    """Number of layouts by reason; the numbers add up to all layouts of the space."""
    allowed_bytes: float
    """Bytes that a rank may hold."""

    @property
    def num_layouts(self) -> int:
        """Number of layouts in the space."""
        return sum(self.counts.values())


class Search:
    """Searches one space; what its layouts share is computed once."""

    def __init__(self, space: Space, max_memory: float = 1.0, peaks: Peaks | None = None):
        """`max_memory` is the share of the capacity that a rank may fill; `peaks` of the same scenario are reused."""
        self.space, self.max_memory = space, max_memory
        self._peaks = peaks or Peaks(Estimator(space.scenario))
        self.estimator = self._peaks.estimator
        self.allowed_bytes = max_memory * self.estimator.capacity_bytes
        self._candidates = Candidates(space, self.estimator, self._peaks, self.allowed_bytes)
        self._serials = count()
        self.run_kinds = cache(self._run_kinds)
        """`SearchResult` of the best layout of each of the best kinds, so many, best first; searched once for each
        number. No layout is dominated by one before it."""

    def with_fixed(
        self,
        fixed: Mapping[str, Any],
        max_memory: float | None = None,
        avoided: Mapping[str, Sequence[Any]] | None = None,
    ) -> "Search":
        """A search with other values fixed or avoided; it shares all that is remembered of the scenario."""
        max_memory = self.max_memory if max_memory is None else max_memory
        avoided = self.space.avoided if avoided is None else avoided
        return Search(replace(self.space, fixed=fixed, avoided=avoided), max_memory, self._peaks)

    def run(self, top: int = 5) -> SearchResult:
        """The best `top` layouts, best first; no two differ in kernels, tp_overlap and state sharding alone.

        Five state shardings of one layout would hide the other layouts.
        """
        return self._run(top, _group_of)

    def _run_kinds(self, top: int = 5) -> SearchResult:
        kinds = cache(LayoutKind.with_degrees)

        def kind_of(layout: Layout, mapping: StepMapping) -> LayoutKind:
            return kinds(mapping.degrees, mapping.schedule, layout.recompute)

        return self._run(top, kind_of, MAX_SLOWDOWN, is_dominated)

    def best_with(self, name: str, value: Any) -> Estimate | None:
        """The best layout with one value of a field of Layout; None if no such layout is legal and fits."""
        search = BestFirstSearch(self._candidates, self._serials, choice=Choice(name, value))
        self._open = search.run(self._open)
        best = choose_best(search.fitting, 1)
        return self._estimate(best[0].timed) if best else None

    @cached_property
    def _block_classes(self) -> tuple[list[SearchNode], Counter[Reason]]:
        """A node for each block class, and the numbers of legal layouts ("bounded") and of others."""
        counts = Counter[Reason]()
        found = self._candidates.block_classes.find(counts)
        bounds_s = map(self._candidates.block_classes.bound_s, found)
        nodes = [
            SearchNode(bound_s, next(self._serials), Refinement.CHOOSE_RECOMPUTE, block_class)
            for bound_s, block_class in zip(bounds_s, found, strict=True)
        ]
        return nodes, counts

    @cached_property
    def _open(self) -> list[SearchNode]:
        """Nodes of all legal layouts, as far as searches of this space have refined them."""
        return self._block_classes[0]

    def _run(
        self, top: int, group_of: GroupOf, max_slowdown: float = inf, dominance: Dominance = no_dominance
    ) -> SearchResult:
        nodes, legal = self._block_classes
        search = BestFirstSearch(self._candidates, self._serials, top, group_of, max_slowdown, dominance)
        self._open = search.run(nodes)
        ranked = [each.timed for each in choose_best(search.fitting, top, max_slowdown, dominance)]
        groups = {timed.group for timed in ranked}
        num_alike = sum(search.num_in_group[group] for group in groups) - len(ranked)
        num_slower = sum(timed.group not in groups for timed in search.fitting)
        counts = legal.copy()
        counts.update(search.counts)
        counts.update({"alike": num_alike, "slower": num_slower, "ranked": len(ranked)})
        counts["bounded"] -= num_alike + num_slower + len(ranked)
        return SearchResult(
            ranked=tuple(map(self._estimate, ranked)),
            counts={reason: counts[reason] for reason in get_args(Reason)},
            allowed_bytes=self.allowed_bytes,
        )

    def _estimate(self, timed: TimedLayout) -> Estimate:
        layout = timed.layout
        if "ep_overlap" not in self.space.fixed:
            layout = without_idle_overlap(layout, self.space.scenario.batch)
        return self.estimator.estimate(layout, timed.kernels)

    def has_room(self, estimate: Estimate) -> bool:
        """Whether the fullest rank of an estimate needs no more bytes than are allowed."""
        return estimate.needed_bytes <= self.allowed_bytes

    def fits(self, layout: Layout, kernels: Kernels) -> bool:
        """Whether a layout's fullest rank needs no more bytes than are allowed; faster than making an estimate."""
        return self._candidates.need(layout, kernels)[0] <= self.allowed_bytes

    def finds_any(self) -> bool:
        """Whether any layout is legal and fits; layouts with the lowest bound of memory are tried first."""
        return any(
            self.fits(sharding.of(candidate.layout), candidate.cost.kernels)
            for _, candidate, sharding in self._candidates.sort_by_need()
        )

    def find_smallest_oom(self) -> Estimate | None:
        """The layout whose fullest rank needs the fewest bytes, for spaces in which none fits.

        None if no layout is legal, or each needs more of the host's memory than there is. Layouts with the lowest bound
        of memory are looked at first.
        """
        found, smallest = None, inf
        everything = Candidates(self.space, self.estimator, self._peaks, allowed_bytes=inf)
        for least, candidate, sharding in everything.sort_by_need():
            if least >= smallest:
                break
            layout = sharding.of(candidate.layout)
            if (needed := self._peaks.exact(layout, candidate.cost.kernels, smallest)[0]) < smallest:
                found, smallest = (layout, candidate.cost.kernels), needed
        return self.estimator.estimate(*found) if found else None


def _group_of(layout: Layout, mapping: StepMapping) -> tuple[Any, ...]:
    """All of a layout but kernels, tp_overlap, what ep sends how, and state sharding."""
    part = key_of(layout, StageLayout)._replace(overlaps_tp=False, overlaps_ep=False, sends_tokens_once=False)
    return part, layout.sequence_parallel, mapping
