"""Step times: lower bounds of a candidate's step, and its exact time; alike ranks are computed once for their group."""

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
    """Seconds of a step of one candidate, with memory to spare."""

    def __init__(self, candidates: Candidates, candidate: Candidate):
        """`candidates` remembers what the candidate shares with others."""
        self.candidates, self.candidate, self.estimator = candidates, candidate, candidates.estimator
        self._delay_s = self.estimator.delay_s(candidate.cost.part)  # type: ignore[arg-type]
        self._fixed_s = self.estimator.fixed_s(candidate.mapping.num_microbatches, peak_bytes=0.0)
        self._of_group = cache(self._find_of_group)

    @cached_property
    def _work(self) -> dict[StageClass, StageWork]:
        """Stage class → the work of one microbatch on such a stage."""
        return {each: self.candidate.cost.times.on(each) for each in self.candidate.stages.kinds}

    @cached_property
    def _stage_work(self) -> list[StageWork]:
        """Work of one microbatch, stage by stage."""
        return [self._work[each] for each in self.candidate.stages.classes]

    @cached_property
    def bound_s(self) -> float:
        """Lower bound of the step whatever the state sharding: the busiest rank, without reduction and update."""
        return max([self._bound_group_s(group) for group in self.candidate.stages.groups]) + self._fixed_s

    def _bound_group_s(self, group: RankGroup) -> float:
        """Lower bound of the last rank of a group: all its work, and the first microbatch's way there and back.

        Meanwhile the rank has nothing to do. With a split backward the way back is not waited for.
        """
        work, comes_back = self._work, not find_schedule(self.candidate.mapping.schedule).splits_backward
        away_s = sum([n * (work[c].forward_s + comes_back * work[c].backward_s) for c, n in group.before])
        busy_s = sum([work[c].forward_s + work[c].backward_s for c in group.classes])
        m = self.candidate.mapping.num_microbatches
        return away_s + (1 + comes_back) * self._delay_s * group.ranks[-1] + m * busy_s

    @cached_property
    def waiting_s(self) -> float:
        """`bound_s`, or a tighter bound if the schedule has a formula for further waits; it looks at every stage."""
        mapping = self.candidate.mapping
        if not (least := find_schedule(mapping.schedule).least):
            return self.bound_s
        times = stage_times(mapping.schedule, self._stage_work, self._delay_s)
        return max(self.bound_s, least(mapping.num_microbatches, times) + self._fixed_s)

    @cached_property
    def sharding_bounds(self) -> list[tuple[float, StateSharding]]:
        """`bound_s` with reduction and update of the first ranks, for each state sharding; the lowest first."""
        return sorted([(self.bound_s + self.update_s(each), each) for each in self.candidate.least_bytes])

    def update_s(self, sharding: StateSharding, group_index: int = 0) -> float:
        """Seconds of reduction and optimizer on the ranks of a group, by default the first, with a state sharding, and
        those in which tokens are exchanged beside no other microbatch."""
        updates, layouts, own_work, unpaired_s = self._of_group(group_index)
        return unpaired_s + sum(update_times(self.estimator.scenario, layouts[sharding], updates[sharding], *own_work))

    def _find_of_group(
        self, group_index: int
    ) -> tuple[dict[StateSharding, Update], dict[StateSharding, Layout], tuple[int, int, float, float], float]:
        """Updates of a group's ranks and layouts that have them, by state sharding; the work of a rank; `unpaired_s`.

        The work is blocks, microbatches, and seconds of forward and of backward of one microbatch.
        """
        candidate, degrees = self.candidate, self.candidate.mapping.degrees
        group = candidate.stages.groups[group_index]
        own = [self._work[c] for c in group.classes]
        forward_s, backward_s = sum([w.forward_s for w in own]), sum([w.backward_s for w in own])
        own_work = sum([c.num_layers for c in group.classes]), candidate.mapping.num_microbatches, forward_s, backward_s
        sizes = self.candidates.peaks.sizes(group.counts, degrees.tp, degrees.ep)
        updates = self.candidates.updates(degrees, sizes, group.has_head)
        return updates, self.candidates.sharded_layouts(degrees), own_work, sum([w.unpaired_s for w in own])

    def step_s(self, sharding: StateSharding) -> float:
        """Exact step time with a state sharding, as `Estimator.time` says; the pipeline is simulated once for all."""
        updates = [self.update_s(sharding, index) for index in range(len(self._finished_s))]
        return max(map(add, self._finished_s, updates)) + self._fixed_s

    def thrash_s(self, peak_bytes: float) -> float:
        """Seconds by which a step with such a peak is longer than with memory to spare."""
        return self.estimator.fixed_s(self.candidate.mapping.num_microbatches, peak_bytes) - self._fixed_s

    @cached_property
    def _finished_s(self) -> list[float]:
        """Seconds until the last rank of each group is done with its microbatches."""
        candidate, m = self.candidate, self.candidate.mapping.num_microbatches
        pipeline = self.estimator.play(candidate.layout, m, self._stage_work, self._delay_s)
        return [max(pipeline.finished_s[rank] for rank in group.ranks) for group in candidate.stages.groups]
