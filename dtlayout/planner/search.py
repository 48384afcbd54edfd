"""Search: the fastest layouts that fit, out of all that a space holds.

    legal → not dominated by faster kernels → lower bound of its step time → may fit → simulated → fits

What may be among the best is made (candidates.py) and asked (asking.py) step by step, in the order of what is known so
far, and ranked (ranking.py). It ends where no lower bound lies below the k-th best step time, so no layout that was
left out is among the best k; whether one fits that is slower anyway nobody has asked.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache, cached_property
from itertools import count
from math import inf
from typing import Any, NamedTuple, get_args

from dtlayout.costmodel.estimate import Estimate, Estimator
from dtlayout.planner.best_first import BestFirstSearch, Choice, PlaceOf, Refinement, SearchNode
from dtlayout.planner.candidates import Candidates, MicrobatchCost, Reason, StepMapping
from dtlayout.planner.peaks import Peaks
from dtlayout.planner.ranking import MOST_TIMES, IsWorse, LayoutKind, choose_best, is_dominated, never
from dtlayout.planner.space import Space
from dtlayout.spec.kernels import Kernels
from dtlayout.spec.layout import Layout


class SearchResult(NamedTuple):
    """The best layouts of a space, and what became of the others."""

    ranked: tuple[Estimate, ...]
    """The best, best first; empty if none is legal and fits."""
    counts: dict[Reason, int]
    """How many layouts ended for each reason; they add up to the space."""
    allowed_bytes: float
    """Bytes that a rank may hold."""

    @property
    def num_layouts(self) -> int:
        """All that were looked at."""
        return sum(self.counts.values())


class Search:
    """Searches one space; what its layouts share is computed once."""

    def __init__(self, space: Space, max_memory: float = 1.0, peaks: Peaks | None = None):
        """`max_memory` is the share of the capacity that a rank may fill; `peaks` of the scenario may be there."""
        self.space, self.max_memory = space, max_memory
        self._peaks = peaks or Peaks(Estimator(space.scenario))
        self.estimator = self._peaks.estimator
        self.allowed_bytes = max_memory * self.estimator.capacity_bytes
        self._candidates = Candidates(space, self.estimator, self._peaks, self.allowed_bytes)
        self._numbers = count()

    def with_fixed(
        self,
        fixed: Mapping[str, Any],
        max_memory: float | None = None,
        avoided: Mapping[str, Sequence[Any]] | None = None,
    ) -> "Search":
        """A search with other values fixed, or ruled out; it shares all that is remembered of the scenario."""
        max_memory = self.max_memory if max_memory is None else max_memory
        avoided = self.space.avoided if avoided is None else avoided
        return Search(replace(self.space, fixed=fixed, avoided=avoided), max_memory, self._peaks)

    def run(self, top: int = 5) -> SearchResult:
        """The best `top` layouts, best first; none differ in nothing but kernels, tp_overlap and sharding.

        Five ways to share the state would hide what else there is.
        """
        return self._run(top, _place_of)

    def run_ideas(self, top: int = 5) -> SearchResult:
        """The best layouts of the `top` best ideas, best first; none only costs beside one before it."""
        ideas = cache(LayoutKind.with_degrees)

        def idea_of(work: MicrobatchCost, spread: StepMapping) -> LayoutKind:
            return ideas(spread.degrees, spread.schedule, work.part.recompute)

        return self._run(top, idea_of, MOST_TIMES, is_dominated)

    def best_with(self, name: str, value: Any) -> Estimate | None:
        """The best layout with one choice of a layout's field; None if none of those is legal and fits."""
        asking = BestFirstSearch(self._candidates, self._numbers, choice=Choice(name, value))
        self._open = asking.ask(self._open)
        best = choose_best(asking.fitting, 1, self.estimator.capacity_bytes)
        return self.estimator.estimate(best[0].layout, best[0].kernels) if best else None

    @cached_property
    def _families(self) -> tuple[list[SearchNode], Counter[Reason]]:
        """All that is legal, and how many layouts are and are not."""
        counts = Counter[Reason]()
        families = self._candidates.find(counts)
        least_s = map(self._candidates.least_of_family_s, families)
        opened = [
            SearchNode(bound_s, next(self._numbers), Refinement.RECOMPUTE, family)
            for bound_s, family in zip(least_s, families, strict=True)
        ]
        return opened, counts

    @cached_property
    def _open(self) -> list[SearchNode]:
        """All that is legal, as far as it is known."""
        return self._families[0]

    def _run(
        self, top: int, place_of: PlaceOf, most_times: float = inf, is_worse: IsWorse = never
    ) -> SearchResult:  # fmt: skip
        families, legal = self._families
        asking = BestFirstSearch(self._candidates, self._numbers, top, place_of, most_times, is_worse)
        self._open = asking.ask(families)
        ranked = choose_best(asking.fitting, top, self.estimator.capacity_bytes, most_times, is_worse)
        places = {timed.place for timed in ranked}
        num_alike = sum(asking.num_alike[place] for place in places) - len(ranked)
        num_slower = sum(timed.place not in places for timed in asking.fitting)
        counts = legal.copy()
        counts.update(asking.counts)
        counts.update({"alike": num_alike, "slower": num_slower, "ranked": len(ranked)})
        counts["bounded"] -= num_alike + num_slower + len(ranked)
        return SearchResult(
            ranked=tuple(self.estimator.estimate(timed.layout, timed.kernels) for timed in ranked),
            counts={reason: counts[reason] for reason in get_args(Reason)},
            allowed_bytes=self.allowed_bytes,
        )

    def has_room(self, estimate: Estimate) -> bool:
        """Whether the fullest rank of a layout needs no more than is allowed."""
        return estimate.needed_bytes <= self.allowed_bytes

    def fits(self, layout: Layout, kernels: Kernels) -> bool:
        """`has_room` of a layout of which no estimate is made."""
        return self._candidates.need(layout, kernels)[0] <= self.allowed_bytes

    def finds_any(self) -> bool:
        """Whether any layout is legal and fits; those that need least are tried first."""
        return any(
            self.fits(sharding.of(candidate.layout), candidate.work.kernels)
            for _, candidate, sharding in self._candidates.sort_by_need()
        )

    def find_smallest_oom(self) -> Estimate | None:
        """Where none fits, the layout that misses by least; None where none is legal or the host's memory is lacking.

        It is the one whose fullest rank needs least; those that need least at least are looked at first.
        """
        found, smallest = None, inf
        everything = Candidates(self.space, self.estimator, self._peaks, allowed_bytes=inf)
        for least, candidate, sharding in everything.sort_by_need():
            if least >= smallest:
                break
            layout = sharding.of(candidate.layout)
            if (needed := self._peaks.exact(layout, candidate.work.kernels, smallest)[0]) < smallest:
                found, smallest = (layout, candidate.work.kernels), needed
        return self.estimator.estimate(*found) if found else None


def _place_of(work: MicrobatchCost, spread: StepMapping) -> tuple[Any, ...]:
    """The layout, but for tp_overlap and how the state is shared."""
    return work.part._replace(overlaps_tp=False), work.layout.sequence_parallel, spread
