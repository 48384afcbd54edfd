"""Step times: how long the step of a candidate is at least, and how long it is; ranks that are alike count once."""

from functools import cache, cached_property
from operator import add

from dtlayout.costmodel.cache_keys import StageClass
from dtlayout.costmodel.estimate import stage_times
from dtlayout.costmodel.rank_groups import RankGroup
from dtlayout.costmodel.stage_work import StageWork
from dtlayout.costmodel.update import Update, update_times
from dtlayout.planner.candidates import Candidate, Candidates
from dtlayout.planner.space import StateSharding
from dtlayout.schedules.schedules import find_schedule
from dtlayout.spec.layout import Layout


class StepTimes:
    """Seconds of the steps of one candidate, with memory to spare."""

    def __init__(self, candidates: Candidates, candidate: Candidate):
        """`candidates` knows what it shares with others."""
        self.candidates, self.candidate, self.estimator = candidates, candidate, candidates.estimator
        self._delay_s = self.estimator.delay_s(candidate.work.part)  # type: ignore[arg-type]
        self._fixed_s = self.estimator.fixed_s(candidate.spread.num_microbatches, peak_bytes=0.0)
        self._of_group = cache(self._find_of_group)

    @cached_property
    def _work(self) -> dict[StageClass, StageWork]:
        """One microbatch on each kind of stage."""
        return {each: self.candidate.work.times.on(each) for each in self.candidate.stages.kinds}

    @cached_property
    def _stage_work(self) -> list[StageWork]:
        """That of each stage."""
        return [self._work[each] for each in self.candidate.stages.classes]

    @cached_property
    def bound_s(self) -> float:
        """No variant's step is shorter: that of the pipeline's busiest rank, without reduction and update."""
        return max([self._bound_group_s(group) for group in self.candidate.stages.groups]) + self._fixed_s

    def _bound_group_s(self, group: RankGroup) -> float:
        """Of a group the last rank is busy while the first microbatch is not on its way down there or back."""
        work, comes_back = self._work, not find_schedule(self.candidate.spread.schedule).splits_backward
        away_s = sum([n * (work[c].forward_s + comes_back * work[c].backward_s) for c, n in group.before])
        busy_s = sum([work[c].forward_s + work[c].backward_s for c in group.classes])
        m = self.candidate.spread.num_microbatches
        return away_s + (1 + comes_back) * self._delay_s * group.ranks[-1] + m * busy_s

    @cached_property
    def waiting_s(self) -> float:
        """`bound_s`, or more where the schedule knows of more waits; it costs more, as each stage is looked at."""
        spread = self.candidate.spread
        if not (least := find_schedule(spread.schedule).least):
            return self.bound_s
        times = stage_times(spread.schedule, self._stage_work, self._delay_s)
        return max(self.bound_s, least(spread.num_microbatches, times) + self._fixed_s)

    @cached_property
    def updated(self) -> list[tuple[float, StateSharding]]:
        """The bound of each variant with its reduction and update, the least first."""
        return sorted([(self.bound_s + self.update_s(each), each) for each in self.candidate.variants])

    def update_s(self, sharding: StateSharding, place: int = 0) -> float:
        """Reduction and optimizer of the ranks of a group, the first by default, with the state shared in some way."""
        updates, layouts, own_work = self._of_group(place)
        return sum(update_times(self.estimator.scenario, layouts[sharding], updates[sharding], *own_work))

    def _find_of_group(
        self, place: int
    ) -> tuple[dict[StateSharding, Update], dict[StateSharding, Layout], tuple[int, int, float, float]]:
        """Updates of a rank of a group and layouts that have them, by the way to share the state; and its own work:
        blocks, microbatches, and the seconds of a forward and a backward of one.
        """
        candidate, degrees = self.candidate, self.candidate.spread.degrees
        group = candidate.stages.groups[place]
        own = [self._work[c] for c in group.classes]
        forward_s, backward_s = sum([w.forward_s for w in own]), sum([w.backward_s for w in own])
        own_work = sum([c.num_layers for c in group.classes]), candidate.spread.num_microbatches, forward_s, backward_s
        updates = self.candidates.updates(degrees, candidate.sizes[place], group.has_head)
        return updates, self.candidates.examples(degrees), own_work

    def step_s(self, sharding: StateSharding) -> float:
        """`Estimator.time`: the pipeline is played, once for all variants."""
        updates = [self.update_s(sharding, place) for place in range(len(self._finished_s))]
        return max(map(add, self._finished_s, updates)) + self._fixed_s

    def thrash_s(self, peak_bytes: float) -> float:
        """Seconds that a step with such a peak is longer than with memory to spare."""
        return self.estimator.fixed_s(self.candidate.spread.num_microbatches, peak_bytes) - self._fixed_s

    @cached_property
    def _finished_s(self) -> list[float]:
        """When the last rank of each group is done with its microbatches."""
        candidate, m = self.candidate, self.candidate.spread.num_microbatches
        pipeline = self.estimator.play(candidate.layout, m, self._stage_work, self._delay_s)
        return [max(pipeline.finished_s[rank] for rank in group.ranks) for group in candidate.stages.groups]
