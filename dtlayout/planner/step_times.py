"""Step times: how long the step of a candidate is at least, and how long it is; ranks that are alike count once."""

from collections.abc import Mapping
from functools import cached_property
from operator import add

from dtlayout.costmodel.estimate import Estimator
from dtlayout.costmodel.update import update_times
from dtlayout.layout import Layout
from dtlayout.pipelining.schedules import find_schedule
from dtlayout.planner.candidates import Candidate
from dtlayout.planner.peaks import RankGroup
from dtlayout.planner.space import Sharding


class StepTimes:
    """Seconds of the steps of one candidate, with memory to spare."""

    def __init__(self, estimator: Estimator, candidate: Candidate, examples: Mapping[Sharding, Layout]):
        """`examples` are layouts of the candidate's degrees, for each way to share the state."""
        self.estimator, self.candidate, self.examples = estimator, candidate, examples
        part, kernels = candidate.part, candidate.kernels
        self._work = {each: estimator.stage_work(each, part, kernels) for each in candidate.stages.kinds}
        self._delay_s = estimator.delay_s(candidate.layout)
        self._fixed_s = estimator.fixed_s(candidate.num_microbatches, peak_bytes=0.0)

    @property
    def bound_s(self) -> float:
        """No variant's step is shorter: that of the pipeline's busiest rank, without reduction and update."""
        return max([self._bound_group_s(group) for group in self.candidate.stages.groups]) + self._fixed_s

    def _bound_group_s(self, group: RankGroup) -> float:
        """`timing.lower_bound` of a group: its last rank is busy while the first microbatch is down there and back."""
        work, comes_back = self._work, not find_schedule(self.candidate.layout.schedule).splits_backward
        away_s = sum(n * (work[c].forward_s + comes_back * work[c].backward_s) for c, n in group.before)
        busy_s = sum(work[c].forward_s + work[c].backward_s for c in group.classes)
        return away_s + (1 + comes_back) * self._delay_s * group.ranks[-1] + self.candidate.num_microbatches * busy_s

    def update_s(self, sharding: Sharding, place: int = 0) -> float:
        """Reduction and optimizer of the ranks of a group."""
        candidate, group = self.candidate, self.candidate.stages.groups[place]
        own = [self._work[c] for c in group.classes]
        forward_s, backward_s = sum([w.forward_s for w in own]), sum([w.backward_s for w in own])
        n, num_layers = candidate.num_parameters[place], sum([c.num_layers for c in group.classes])
        layout, m = self.examples[sharding], candidate.num_microbatches
        work = n, num_layers, m, forward_s, backward_s
        return sum(update_times(self.estimator.scenario, layout, *work, has_head=group.has_head))

    def step_s(self, sharding: Sharding) -> float:
        """`Estimator.time`: the pipeline is played, once for all variants."""
        updates = [self.update_s(sharding, place) for place in range(len(self._finished_s))]
        return max(map(add, self._finished_s, updates)) + self._fixed_s

    @cached_property
    def _finished_s(self) -> list[float]:
        """When the last rank of each group is done with its microbatches."""
        candidate = self.candidate
        work = [self._work[each] for each in candidate.stages.classes]
        pipeline = self.estimator.play(candidate.layout, candidate.num_microbatches, work, self._delay_s)
        return [max(pipeline.finished_s[rank] for rank in group.ranks) for group in candidate.stages.groups]
