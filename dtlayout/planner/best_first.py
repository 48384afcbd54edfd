"""Asking: what has to be known of layouts to say which are the fastest that fit, and in which order that is found out.

Everything that is open lies in one queue, by a lower bound of its steps. The next question is asked of what has the
least, and what the answer leaves goes back with a bound that is no lower.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator
from enum import IntEnum
from heapq import heapify, heappop, heappush, nsmallest
from math import inf
from typing import Any, NamedTuple

from dtlayout.planner.candidates import BoundSpread, Candidates, MicrobatchCost, Reason, Recomputing, StepMapping
from dtlayout.planner.ranking import TIE, IsWorse, Timed, choose_best, never, to_percent
from dtlayout.planner.space import StateSharding
from dtlayout.planner.step_times import StepTimes

PlaceOf = Callable[[MicrobatchCost, StepMapping], Hashable]
"""What layouts that are alike have in common."""

_AT_ONCE = 0.02
"""Relative distance of bounds up to which spreads are asked together: fewer questions, of more than are needed."""
_OF_FAMILY = ("tp", "cp", "cp_method", "ep", "micro_batch", "sequence_parallel")
_OF_WORK = (*_OF_FAMILY, "recompute", "tp_overlap")
"""Fields of a layout in which those of a family, and of a work, are the same."""


class Refinement(IntEnum):
    """The next thing to find out; each takes longer to answer than the one before, and tells more."""

    RECOMPUTE = 1
    """How long do the steps of a family take at least with each recomputation?"""
    SPREADS = 2
    """How much longer is the step of each of their spreads at least with reduction and update?"""
    WORKS = 3
    """In which ways can these be computed, and how long does each take at least?"""
    BUSIEST = 4
    """Which spreads of a work may fit, and when can the busiest rank be done, if it waits for no more than its first
    microbatch?"""
    UPDATE = 5
    """How much longer is a candidate's step with each variant's reduction and update?"""
    PLAY = 6
    """How long is a variant's step, the pipeline played?"""
    FIT = 7
    """Does a variant fit?"""


class SearchNode(NamedTuple):
    """Layouts of which one may be among the best; the least is asked first."""

    least_s: float
    """Lower bound of their steps."""
    number: int
    """No two have the same."""
    question: Refinement
    """The first thing that is not known yet."""
    subject: Any
    """What it is asked of: a family; that with a recomputation, or a work, and some of its spreads; `StepTimes`; these
    with the variant, and those that follow it; these with the variant."""


class Choice(NamedTuple):
    """A field of a layout that has to have some value."""

    name: str
    value: Any

    def allows(self, part: Any) -> bool:
        """Whether a part of a layout, which may lack the field, has the value."""
        return bool(getattr(part, self.name, self.value) == self.value)

    def may_be_in(self, opened: SearchNode) -> bool:
        """Whether any of what is open may have it."""
        match opened.question:
            case Refinement.RECOMPUTE:
                return self.name not in _OF_FAMILY or self.allows(opened.subject.layout)
            case Refinement.SPREADS | Refinement.WORKS:
                return self.name not in (*_OF_FAMILY, "recompute") or self.allows(opened.subject[0].layout)
            case Refinement.BUSIEST:
                return self.name not in _OF_WORK or self.allows(opened.subject[0].layout)
        work, spread = opened.subject.candidate[:2]
        return self.name in StateSharding._fields or self.allows(spread if hasattr(spread, self.name) else work.layout)


class BestFirstSearch:
    """Finds the layouts that fit among which the best `top` places are."""

    def __init__(
        self,
        candidates: Candidates,
        numbers: Iterator[int],
        top: int = 1,
        place_of: PlaceOf = lambda work, spread: None,
        most_times: float = inf,
        is_worse: IsWorse = never,
        choice: Choice | None = None,
    ):
        """Of all, or of those with a choice; no place has more than `most_times` the fastest step, or `is_worse`."""
        self.fitting: list[Timed] = []
        """Layouts that fit."""
        self.num_alike = Counter[Hashable]()
        """Place → its layouts that were looked at and may fit."""
        self.counts = Counter[Reason]()
        """Layouts that were looked at and left out."""
        self._candidates, self._numbers = candidates, numbers
        self._top, self._place_of, self._most_times, self._choice = top, place_of, most_times, choice
        self._is_worse = is_worse
        self._queue: list[SearchNode] = []
        self._left: list[SearchNode] = []
        self._fastest: dict[Hashable, float] = {}
        self._placed = defaultdict[Hashable, list[Timed]](list)
        self._limit_s = inf
        self._answers: dict[Refinement, Callable[[SearchNode], None]] = {
            Refinement.RECOMPUTE: self._find_recomputing, Refinement.SPREADS: self._raise_spreads,
            Refinement.WORKS: self._find_works, Refinement.BUSIEST: self._find_busiest,
            Refinement.UPDATE: self._find_updates, Refinement.PLAY: self._play, Refinement.FIT: self._try,
        }  # fmt: skip

    def ask(self, opened: Iterable[SearchNode]) -> list[SearchNode]:
        """Ask until nothing that is open can be among the best; what is open then, variants as their candidates."""
        self._queue = list(opened)
        heapify(self._queue)
        while self._queue and self._queue[0].least_s <= self._limit_s:
            each = heappop(self._queue)
            if self._choice is None or each.question > Refinement.UPDATE or self._choice.may_be_in(each):
                self._answers[each.question](each)
            else:
                self._left.append(each)
        return self._left + [each for each in self._queue if each.question <= Refinement.UPDATE]

    def _push(self, least_s: float, question: Refinement, subject: Any) -> None:
        heappush(self._queue, SearchNode(least_s, next(self._numbers), question, subject))

    def _has_better(self, place: Hashable, least_s: float, least_bytes: float = 0.0) -> bool:
        """Whether another one that is alike stands for all that are as long, or that are no shorter and fuller."""
        if least_s > (1 + TIE) * self._fastest.get(place, inf):
            return True
        capacity_bytes = self._candidates.estimator.capacity_bytes
        percent = to_percent(least_bytes, capacity_bytes)
        return percent > 0 and any(
            timed.time_s <= least_s and to_percent(timed.peak_bytes, capacity_bytes) < percent
            for timed in self._placed[place]
        )

    def _find_recomputing(self, opened: SearchNode) -> None:
        for recomputing, spreads in self._candidates.recomputing(opened.subject):
            self._push_spreads(Refinement.SPREADS, recomputing, spreads)

    def _push_spreads(
        self, question: Refinement, subject: Recomputing | MicrobatchCost, spreads: list[BoundSpread]
    ) -> None:
        if spreads:
            self._push(min([least_s for least_s, _ in spreads]), question, (subject, spreads))

    def _take_spreads(self, opened: SearchNode) -> list[BoundSpread]:
        """Those that are asked now; those with a longer bound are when it is their turn."""
        (subject, spreads), asked_s = opened.subject, (1 + _AT_ONCE) * opened.least_s
        self._push_spreads(opened.question, subject, [each for each in spreads if each[0] > asked_s])
        return [each for each in spreads if each[0] <= asked_s]

    def _raise_spreads(self, opened: SearchNode) -> None:
        with_update_s = self._candidates.with_update_s
        raised = [(with_update_s(least_s, each.spread), each) for least_s, each in self._take_spreads(opened)]
        self._push_spreads(Refinement.WORKS, opened.subject[0], raised)

    def _find_works(self, opened: SearchNode) -> None:
        taken, with_update_s = self._take_spreads(opened), self._candidates.with_update_s
        works, num_slower = self._candidates.works(opened.subject[0])
        self._count("slower kernels", num_slower * sum(each.spread.num_ways for _, each in taken))
        for work in works:
            bound = [(with_update_s(each.bound_s(*work.times.least_s), each.spread), each) for _, each in taken]
            self._push_spreads(Refinement.BUSIEST, work, bound)

    def _find_busiest(self, opened: SearchNode) -> None:
        work, choice = opened.subject[0], self._choice
        left, num_misfits = list[BoundSpread](), 0
        for each in self._take_spreads(opened):
            least_s, (spread, pipeline, _) = each
            if choice and not choice.allows(spread):
                left.append(each)
                continue
            place = self._place_of(work, spread)
            if self._has_better(place, least_s):
                self.num_alike[place] += spread.num_ways
                left.append(each)
            elif candidate := self._candidates.make(work, spread, pipeline):
                times = StepTimes(self._candidates, candidate)
                if choice and not any(map(choice.allows, candidate.variants)):
                    self._left.append(SearchNode(least_s, next(self._numbers), Refinement.UPDATE, times))
                else:
                    self._push(times.bound_s, Refinement.UPDATE, times)
                self.num_alike[place] += len(candidate.variants)
                num_misfits += spread.num_ways - len(candidate.variants)
            else:
                num_misfits += spread.num_ways
        self._count("does not fit", num_misfits)
        if left:
            self._left.append(opened._replace(subject=(work, left)))

    def _count(self, reason: Reason, number: int) -> None:
        self.counts[reason] += number
        self.counts["bounded"] -= number

    def _find_updates(self, opened: SearchNode) -> None:
        times, choice = opened.subject, self._choice
        allowed = [each for each in times.candidate.variants if choice is None or choice.allows(each)]
        place = self._place_of(times.candidate.work, times.candidate.spread)
        if not allowed or self._has_better(place, opened.least_s):
            self._left.append(opened)
            return
        self._left.append(opened._replace(least_s=times.updated[0][0]))
        self._push_next(times, iter([each for each in times.updated if each[1] in allowed]))

    def _push_next(self, times: StepTimes, variants: Iterator[tuple[float, StateSharding]]) -> None:
        """The fastest of the variants, which come in the order of their bounds."""
        for least_s, sharding in variants:
            self._push(least_s, Refinement.PLAY, (times, sharding, variants))
            break

    def _play(self, opened: SearchNode) -> None:
        times, sharding, others = opened.subject
        place = self._place_of(times.candidate.work, times.candidate.spread)
        if self._has_better(place, opened.least_s):
            return
        least_s = times.waiting_s + times.update_s(sharding)
        if least_s > opened.least_s:
            self._push(least_s, Refinement.PLAY, opened.subject)
            return
        if not self._has_better(place, opened.least_s, times.candidate.variants[sharding]):
            self._push(times.step_s(sharding), Refinement.FIT, (times, sharding))
        self._push_next(times, others)

    def _try(self, opened: SearchNode) -> None:
        (times, sharding), step_s = opened.subject, opened.least_s
        work, spread = times.candidate.work, times.candidate.spread
        place = self._place_of(work, spread)
        if self._has_better(place, step_s, times.candidate.variants[sharding]):
            return
        layout = sharding.of(times.candidate.layout)
        needed, peak = self._candidates.need(layout, work.kernels)
        if needed > self._candidates.allowed_bytes:
            self.num_alike[place] -= 1
            self._count("does not fit", 1)
            return
        timed = Timed(step_s + times.thrash_s(peak), needed, peak, layout, work.kernels, place)
        self.fitting.append(timed)
        self._placed[place].append(timed)
        self._fastest[place] = min(timed.time_s, self._fastest.get(place, inf))
        self._limit_s = self._most_times * min(self._fastest.values())
        if len(self._fastest) >= self._top:
            self._limit_s = min(self._limit_s, self._find_last_s())
        self._limit_s *= 1 + TIE

    def _find_last_s(self) -> float:
        """The step of the last place of those found so far; infinite where there are too few."""
        if self._is_worse is never:
            return nsmallest(self._top, self._fastest.values())[-1]
        capacity_bytes = self._candidates.estimator.capacity_bytes
        best = choose_best(self.fitting, self._top, capacity_bytes, is_worse=self._is_worse)
        return best[-1].time_s if len(best) == self._top else inf
