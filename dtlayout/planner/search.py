"""Search: the fastest layouts that fit, out of all that a space holds.

    legal → not dominated by faster kernels → may fit → lower bound of its step time → fits → simulated

What is legal and may fit are candidates (candidates.py); how long their steps are is asked step by step (`_Question`),
in the order of what is known so far. It ends where no lower bound lies below the k-th best step time, so no layout that
was left out is among the best k; whether one fits that is slower anyway is then known from the least that it needs
alone. Of layouts that differ in nothing but kernels and how ranks share the state only the best is ranked: five ways to
share the same state would hide what else there is.

Step times within 0.5 % of each other are a tie: free memory decides, in whole percents of the capacity, then less model
parallelism (tp · pp), then time.
"""

from collections.abc import Sequence
from enum import IntEnum
from heapq import heapify, heappop, heappush, nsmallest
from math import inf
from typing import NamedTuple, get_args

from dtlayout.costmodel.estimate import Estimate, Estimator
from dtlayout.costmodel.parts import StageClass, StageLayout, part_of
from dtlayout.kernels import Kernels
from dtlayout.layout import Layout
from dtlayout.pipelining.partition import StageSlice
from dtlayout.planner.candidates import Candidate, Candidates, LeftOut, Reason
from dtlayout.planner.peaks import Peaks
from dtlayout.planner.space import Sharding, Space
from dtlayout.planner.step_times import StepTimes
from dtlayout.recompute import Recompute

TIE = 0.005
"""Relative difference of step times below which two layouts are equally fast."""


class SearchResult(NamedTuple):
    """The best layouts of a space, and what became of the others."""

    ranked: tuple[Estimate, ...]
    """The best, best first; empty if none is legal and fits."""
    counts: dict[Reason, int]
    """How many layouts ended for each reason; they add up to the space."""
    allowed_bytes: float
    """Bytes that a rank may hold."""
    smallest_oom: Estimate | None
    """Where none fits, the one that misses by least."""

    @property
    def num_layouts(self) -> int:
        """All that were looked at."""
        return sum(self.counts.values())


class _Question(IntEnum):
    """The next thing to find out; each takes longer to answer than the one before, and tells more."""

    BUSIEST = 1
    """When can the busiest rank of a candidate's pipeline be done, if it only waits for its first microbatch?"""
    UPDATE = 2
    """How much longer is a candidate's step with each variant's reduction and update?"""
    PLAY = 3
    """How long is a variant's step, the pipeline played?"""
    FIT = 4
    """Does a variant fit?"""


_ALL = Sharding(0, 0)


class _Open(NamedTuple):
    """A candidate or one of its variants that may be among the best; the one with the least bound is asked first."""

    least_s: float
    """Lower bound of its step."""
    candidate: int
    """Index of the candidate."""
    sharding: Sharding
    """One of the candidate's variants, or _ALL of them."""
    question: _Question
    """The first thing that is not known yet."""


class _Timed(NamedTuple):
    """A layout with its exact step time, and what it needs as far as that is allowed."""

    time_s: float
    needed_bytes: float
    peak_bytes: float
    layout: Layout
    kernels: Kernels
    place: int
    """The place of its candidate."""


class Search:
    """Searches one space; what its layouts share is computed once."""

    def __init__(self, space: Space, max_memory: float = 1.0):
        """`max_memory` is the share of the capacity that a rank may fill."""
        self.space = space
        self.estimator = Estimator(space.scenario)
        self.allowed_bytes = max_memory * self.estimator.capacity_bytes
        self._peaks = Peaks(self.estimator)
        whole = StageSlice(range(space.scenario.model.num_layers), embedding=True, head=True)
        self._whole = {each: StageClass.of(whole, Recompute.parse(each)) for each in space.recompute}
        self._candidates = Candidates(space, self.estimator, self._peaks, self.allowed_bytes)

    def run(self, top: int = 5) -> SearchResult:
        """The best `top` layouts, best first."""
        left_out = LeftOut()
        candidates = list(self._candidates.find(left_out))
        fitting, ooms = self._ask(candidates, top)
        ranked = choose_best(fitting, top, self.estimator.capacity_bytes)
        places = {timed.place for timed in ranked}
        num_may_fit = sum(len(c.variants) for c in candidates) - len(ooms)
        num_alike = sum(len(c.variants) for c in candidates if c.place in places)
        num_alike -= sum(oom.place in places for oom in ooms)
        num_slower = sum(timed.place not in places for timed in fitting)
        counts = left_out.counts
        counts.update({
            "does not fit": len(ooms), "bounded": num_may_fit - num_alike - num_slower, "slower": num_slower,
            "sharded otherwise": num_alike - len(ranked), "ranked": len(ranked),
        })  # fmt: skip
        missed = None if ranked else self._find_smallest_oom(left_out, ooms)
        return SearchResult(
            ranked=tuple(self.estimator.estimate(timed.layout, timed.kernels) for timed in ranked),
            counts={reason: counts[reason] for reason in get_args(Reason)},
            allowed_bytes=self.allowed_bytes,
            smallest_oom=self.estimator.estimate(*missed) if missed else None,
        )

    def reshard(self, layout: Layout, kernels: Kernels) -> Layout:
        """A legal layout with its state shared in the fastest way that fits, or the smallest if none does."""
        left_out = LeftOut()
        candidate = self._candidates.make(layout, part_of(layout, StageLayout), kernels, left_out)
        if candidate is None:  # with no way at all where what was fixed leaves none at these degrees
            return left_out.nearest[0].layout if left_out.nearest else layout
        times = self._times(candidate)
        fastest = sorted((times.step_s(sharding), sharding) for sharding in candidate.variants)
        tried = (self._try(candidate, sharding, time_s) for time_s, sharding in fastest)
        fitting = (timed.layout for timed in tried if timed.needed_bytes <= self.allowed_bytes)
        return next(fitting, min(candidate.variants, key=candidate.variants.__getitem__).of(layout))

    def finds_any(self) -> bool:
        """Whether any layout is legal and fits; those that need least are tried first."""
        candidates = list(self._candidates.find(LeftOut()))
        least = [(need, i, sharding) for i, c in enumerate(candidates) for sharding, need in c.variants.items()]
        tried = (self._try(candidates[i], sharding, 0.0) for _, i, sharding in sorted(least))
        return any(timed.needed_bytes <= self.allowed_bytes for timed in tried)

    def _ask(self, candidates: Sequence[Candidate], top: int) -> tuple[list[_Timed], list[_Timed]]:
        """Ask until nothing that is open can be among the best `top`: what fits and what does not, with step times."""
        queue = [_Open(self._bound_roughly_s(c), i, _ALL, _Question.BUSIEST) for i, c in enumerate(candidates)]
        heapify(queue)
        times: dict[int, StepTimes] = {}
        fitting: list[_Timed] = []
        ooms: list[_Timed] = []
        fastest: dict[int, float] = {}  # by place
        limit_s = inf
        while queue and queue[0].least_s <= limit_s:
            least_s, i, sharding, question = heappop(queue)
            candidate = candidates[i]
            match question:
                case _Question.BUSIEST:
                    times[i] = self._times(candidate)
                    heappush(queue, _Open(times[i].bound_s, i, _ALL, _Question.UPDATE))
                case _Question.UPDATE:
                    for each in candidate.variants:
                        heappush(queue, _Open(least_s + times[i].update_s(each), i, each, _Question.PLAY))
                case _Question.PLAY:
                    heappush(queue, _Open(times[i].step_s(sharding), i, sharding, _Question.FIT))
                case _Question.FIT:
                    timed = self._try(candidate, sharding, least_s)
                    if timed.needed_bytes > self.allowed_bytes:
                        ooms.append(timed)
                        continue
                    fitting.append(timed)
                    fastest[timed.place] = min(timed.time_s, fastest.get(timed.place, inf))
                    if len(fastest) >= top:
                        limit_s = nsmallest(top, fastest.values())[-1] * (1 + TIE)
        return fitting, ooms

    def _bound_roughly_s(self, candidate: Candidate) -> float:
        """A lower bound of its step that any stages would have: all work, shared out evenly over the pipeline."""
        whole = self._whole[candidate.part.recompute]
        work = self.estimator.stage_work(whole, candidate.part, candidate.kernels)
        busy_s = candidate.num_microbatches * (work.forward_s + work.backward_s) / candidate.layout.pp
        return busy_s + self.estimator.fixed_s(candidate.num_microbatches, peak_bytes=0.0)

    def _times(self, candidate: Candidate) -> StepTimes:
        examples = self._candidates.examples(candidate.layout.tp, candidate.layout.pp)
        return StepTimes(self.estimator, candidate, examples)

    def _try(self, candidate: Candidate, sharding: Sharding, step_s: float) -> _Timed:
        """A variant with its exact need, as far as that is allowed; `step_s` is its time with memory to spare."""
        layout, m = sharding.of(candidate.layout), candidate.num_microbatches
        needed, peak = self._peaks.exact(layout, candidate.kernels, self.allowed_bytes)
        more_s = self.estimator.fixed_s(m, peak) - self.estimator.fixed_s(m, 0.0)
        return _Timed(step_s + more_s, needed, peak, layout, candidate.kernels, candidate.place)

    def _find_smallest_oom(self, left_out: LeftOut, ooms: Sequence[_Timed]) -> tuple[Layout, Kernels] | None:
        """The layout that misses by least, by what all of its ranks need."""
        found, smallest = None, inf
        asked = [(each.needed_bytes, each.layout, each.kernels) for each in ooms]
        for least, layout, kernels in [*asked, *left_out.nearest]:
            if least < smallest and (needed := self._peaks.exact(layout, kernels)[0]) < smallest:
                found, smallest = (layout, kernels), needed
        return found


def choose_best(timed: Sequence[_Timed], top: int, capacity_bytes: float) -> list[_Timed]:
    """The best `top`, of each place one: of all within a tie of the fastest that is left, the one with most room."""
    left = sorted(timed, key=lambda t: t.time_s)
    best: list[_Timed] = []
    while left and len(best) < top:
        ties = [t for t in left if t.time_s <= left[0].time_s * (1 + TIE)]
        best.append(min(ties, key=lambda t: _preference(t, capacity_bytes)))
        left = [t for t in left if t.place != best[-1].place]
    return best


def _preference(timed: _Timed, capacity_bytes: float) -> tuple[int, int, float]:
    return round(100 * timed.peak_bytes / capacity_bytes), timed.layout.tp * timed.layout.pp, timed.time_s
