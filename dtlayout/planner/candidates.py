"""Candidates: what is left of a space when all is gone that is not legal, has slower kernels or surely does not fit.

A *candidate* is all of a layout but how its data-parallel ranks share the state (`space.Sharding`): whatever that is,
its stages do the same work, and hold the same beside their state. Its *variants* are the ways that may fit.
"""

from bisect import insort
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from itertools import product
from math import inf
from operator import add
from typing import Literal, NamedTuple

from dtlayout.costmodel.estimate import Estimator
from dtlayout.costmodel.parts import BlockLayout, PipelineLayout, StageLayout, StateLayout, part_of
from dtlayout.kernels import Kernels
from dtlayout.layout import Layout
from dtlayout.planner.peaks import Counts, Moments, Peaks, RankGroup, Stages, gradient_phase
from dtlayout.planner.space import Sharding, Space

Reason = Literal["not legal", "slower kernels", "does not fit", "bounded", "slower", "sharded otherwise", "ranked"]
"""A layout's end in a search; "bounded" may fit, but is slower by its lower bound alone, "slower" was simulated, and
"sharded otherwise" differs from a ranked one in nothing but kernels and how its ranks share the state."""


class State(NamedTuple):
    """Parameters, gradients and optimizer of each group of ranks."""

    num_parameters: tuple[float, ...]
    """Parameters of a rank."""
    ways: tuple[tuple[Sharding, tuple[float, ...]], ...]
    """Least bytes, for each way to share them."""
    least: tuple[float, ...]
    """The least in any of them."""


class Pipeline(NamedTuple):
    """A pipeline with a number of microbatches, or with any larger one that holds no more, whatever they compute."""

    stages: Stages
    in_flight: list[tuple[RankGroup, Moments]]
    """Each group of ranks with what it has in flight."""
    state: State
    """The state of each of these groups."""


class Candidate(NamedTuple):
    """Layouts that differ in nothing but how their ranks share the state."""

    place: int
    """The number of its layout among all that are legal: candidates of one place differ in their kernels."""
    layout: Layout
    """One of the layouts, with its state shared in some way."""
    part: StageLayout
    """The part of the layout on which its work depends."""
    kernels: Kernels
    num_microbatches: int
    """Microbatches of a step."""
    stages: Stages
    """The stages of its pipeline."""
    num_parameters: tuple[float, ...]
    """Parameters of a rank of each group of ranks."""
    variants: dict[Sharding, float]
    """Ways to share the state that may fit, and what the fullest rank needs at least."""


MOST_OOMS = 32
"""Layouts of which the one that misses by least is looked for: what they need at least says which they are, and what
they need exactly which of them it is."""


class Oom(NamedTuple):
    """A layout that does not fit."""

    least_bytes: float
    """The least that its fullest rank can need."""
    layout: Layout
    kernels: Kernels


@dataclass
class LeftOut:
    """Layouts that are no candidates, by reason."""

    counts: Counter[Reason] = field(default_factory=Counter)
    """How many, by reason."""
    nearest: list[Oom] = field(default_factory=list)
    """The `MOST_OOMS` that need least at least of all that surely don't fit, sorted."""

    @property
    def limit_bytes(self) -> float:
        """The need above which a layout is none of the nearest."""
        return self.nearest[-1].least_bytes if len(self.nearest) == MOST_OOMS else inf

    def note_oom(self, least_bytes: float, layout: Layout, kernels: Kernels) -> None:
        """Keep a layout that does not fit, if it is among those that need least."""
        insort(self.nearest, Oom(least_bytes, layout, kernels), key=lambda each: each.least_bytes)
        del self.nearest[MOST_OOMS:]


class Candidates:
    """Finds the candidates of one space; what layouts share is computed once."""

    def __init__(self, space: Space, estimator: Estimator, peaks: Peaks, allowed_bytes: float):
        """A rank may hold `allowed_bytes`."""
        self.space, self.estimator, self.peaks, self.allowed_bytes = space, estimator, peaks, allowed_bytes
        self.examples = cache(self._find_examples)
        """Every way to share the state at some tp and pp, with a layout of these degrees that does."""
        self.undominated = cache(self._find_undominated)
        """Kernels with a StageLayout that are not both slower and larger than others."""
        self._kernels, self._states = cache(self._find_kernels), cache(self._find_states)
        self._pipelines, self._group_states = cache(self._find_pipeline), cache(self._find_group_states)

    def find(self, left_out: LeftOut) -> Iterator[Candidate]:
        """All of them; the others are counted."""
        space, place = self.space, 0
        for tp, pp, dp in space.degrees:
            num_shardings = len(space.shardings(tp, dp))
            num_kernels = sum(len(self._kernels(tp, recompute)) for recompute in space.recompute)
            num_each = len(space.recompute) * num_shardings * len(space.kernels)
            tensor = [sp for sp in space.sequence_parallel(tp) if space.allows_tensor(tp, sp)]
            num_tensor = len(space.sequence_parallel(tp))
            for (schedule, v), micro_batch in product(space.orders(pp), space.micro_batches):
                is_legal = tensor and space.allows_pipeline(pp, (schedule, v), dp, micro_batch)
                num_legal = len(tensor) * num_shardings * num_kernels if is_legal else 0
                left_out.counts["not legal"] += num_tensor * num_each - num_legal
                if not num_legal:
                    continue
                for sp, recompute in product(tensor, space.recompute):
                    layout = Layout(
                        tp=tp, pp=pp, dp_shard=dp, schedule=schedule, virtual_stages=v, micro_batch=micro_batch,
                        sequence_parallel=sp, recompute=recompute, **space.constant,
                    )  # fmt: skip
                    part = part_of(layout, StageLayout)
                    best = self.undominated(part)
                    num_slower = len(self._kernels(tp, recompute)) - len(best)
                    left_out.counts["slower kernels"] += num_slower * num_shardings
                    for kernels in best:
                        if candidate := self.make(layout, part, kernels, left_out, place):
                            yield candidate
                    place += 1

    def make(
        self, layout: Layout, part: StageLayout, kernels: Kernels, left_out: LeftOut, place: int = 0
    ) -> Candidate | None:
        """The candidate of a legal layout, of which `part` is a part; None if none of its variants can fit."""
        m = layout.num_microbatches(self.space.scenario.batch)
        of_pipeline = PipelineLayout.of(layout)
        pipeline = self._pipelines(of_pipeline, layout.tp, of_pipeline.shorten(m))
        block, state = self.peaks.block_bytes(part, kernels), pipeline.state
        allowed, known = self.allowed_bytes, left_out.limit_bytes
        limit = max(allowed, known)
        held: list[float] = []
        for beside, state_bytes in zip(self.peaks.held_bytes(block, pipeline.in_flight), state.least, strict=True):
            if beside + state_bytes > limit:  # in any way, and by more than another
                left_out.counts["does not fit"] += len(state.ways)
                return None
            held.append(beside)
        fitting: dict[Sharding, float] = {}
        smallest = inf
        for sharding, least in state.ways:
            need = max(map(add, held, least))
            if need <= allowed:
                fitting[sharding] = need
            elif need < smallest:
                smallest, too_large = need, sharding
        left_out.counts["does not fit"] += len(state.ways) - len(fitting)
        if smallest < known:
            left_out.note_oom(smallest, too_large.of(layout), kernels)
        if not fitting:
            return None
        return Candidate(place, layout, part, kernels, m, pipeline.stages, state.num_parameters, fitting)

    def _find_examples(self, tp: int, pp: int) -> dict[Sharding, Layout]:
        cp = self.space.constant.get("cp", 1)
        dp = self.space.scenario.cluster.num_gpus // (cp * tp * pp)
        plain = Layout(tp=tp, pp=pp, cp=cp, dp_shard=dp)
        return {sharding: sharding.of(plain) for sharding in self.space.shardings(tp, dp)}

    def _find_pipeline(self, pipeline: PipelineLayout, tp: int, m: int) -> Pipeline:
        stages, phase = self.peaks.stages(pipeline), gradient_phase(pipeline, m)
        state = self._states(tp, pipeline.pp, tuple([group.counts for group in stages.groups]), phase)
        return Pipeline(stages, self.peaks.in_flight(pipeline, m), state)

    def _find_states(self, tp: int, pp: int, counts: tuple[Counts, ...], phase: int) -> State:
        sizes = [self.peaks.sizes(each, tp) for each in counts]
        least = [self._group_states(tp, pp, *size, phase) for size in sizes]
        ways = tuple(zip(self.examples(tp, pp), zip(*least, strict=True), strict=True))
        return State(tuple([n for n, _ in sizes]), ways, tuple([min(each, default=inf) for each in least]))

    def _find_group_states(self, tp: int, pp: int, n: float, unit: float, phase: int) -> list[float]:
        ways = [part_of(example, StateLayout) for example in self.examples(tp, pp).values()]
        return [self.peaks.state_bytes(way, n, unit, phase) for way in ways]

    def _find_kernels(self, tp: int, recompute: str) -> list[Kernels]:
        return [kernels for kernels in self.space.kernels if self.space.allows_kernels(kernels, tp, recompute)]

    def _find_undominated(self, part: StageLayout) -> list[Kernels]:
        """Kernels but those that are no faster in any direction than others, and keep no less, in the same layout."""
        kernels = self._kernels(part.tp, part.recompute)
        if len(kernels) < 2:
            return kernels
        costs, of_block = [], part_of(part, BlockLayout)
        for k in kernels:
            block, head = self.estimator.block(of_block, k), self.estimator.head(of_block, k)
            waits = max(0.0, block.host_s - block.forward_s - block.backward_s)
            sizes = self.peaks.block_bytes(part, k)
            costs.append((block.forward_s, block.backward_s, head.forward_s + head.backward_s, *sizes, waits))
        return [
            k
            for i, (k, own) in enumerate(zip(kernels, costs, strict=True))
            if not any(
                other[-1] == 0.0 and all(o <= mine for o, mine in zip(other[:-1], own[:-1], strict=True))
                and (j < i or other != own)
                for j, other in enumerate(costs) if j != i
            )
        ]  # fmt: skip
