"""Search: the fastest layouts that fit, out of all that a space holds.

    legal → not dominated by faster kernels → may fit → lower bound of its step time → fits → simulated

A *skeleton* is all of a layout but how its data-parallel ranks share the state (dp_shard, dp_replicate, zero): its
pipeline is played once. The lower bound is that of all work shared out evenly, then that of the pipeline's busiest
rank, then with its reduction and update too.
The last two go in the order of bounds and end where none lies below the k-th best step time, so no layout that was left
out is among the best k; whether one fits that is slower anyway is then known from the least that it needs alone.
Of layouts that differ in nothing but that and kernels only the best is ranked: five ways to share the same state would
hide what else there is.

Step times within 0.5 % of each other are a tie: free memory decides, in whole percents of the capacity, then less model
parallelism (tp · pp), then time.
"""

from collections import Counter
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from heapq import heapify, heappop, heappush, nsmallest
from itertools import product
from math import inf
from operator import add
from typing import Literal, NamedTuple

from dtlayout.costmodel.estimate import Estimate, Estimator, StageWork
from dtlayout.costmodel.update import update_times
from dtlayout.kernels import Kernels
from dtlayout.layout import Layout
from dtlayout.pipelining.partition import StageSlice
from dtlayout.pipelining.schedules import find_schedule
from dtlayout.planner.peaks import Peaks, RankGroup, StageClass, Stages, gradient_phase
from dtlayout.planner.space import Order, Pipeline, Sharding, Space

TIE = 0.005
"""Relative difference of step times below which two layouts are equally fast."""

Reason = Literal["not legal", "slower kernels", "does not fit", "bounded", "slower", "shared otherwise", "ranked"]
"""What became of a layout; "bounded" may fit, but is slower by its lower bound alone, "slower" was simulated, and
"shared otherwise" differs from a ranked one in nothing but kernels and how its ranks share the state."""


def needed_bytes(estimate: Estimate) -> float:
    """What the fullest rank cannot run without, to be compared with what is allowed."""
    return max(rank.needed for rank in estimate.memory)


@dataclass(frozen=True)
class SearchResult:
    """The best layouts of a space, and what became of the others."""

    ranked: tuple[Estimate, ...]
    """The best, best first; empty if none is legal and fits."""
    counts: dict[Reason, int]
    """How many layouts ended for each reason; they add up to the space."""
    allowed_bytes: float
    """What a rank may hold."""
    smallest_misfit: Estimate | None
    """Where none fits, the one that misses by least."""

    @property
    def num_layouts(self) -> int:
        """All that were looked at."""
        return sum(self.counts.values())


@dataclass
class _Skeleton:
    """Layouts that differ only in how they share the state; `variants` are those that may fit, with what they need.

    Skeletons of one family differ in their kernels.
    """

    layout: Layout
    kernels: Kernels
    m: int
    stages: Stages
    work: dict[StageClass, StageWork] = field(default_factory=dict)
    bound_s: float = 0.0
    variants: list[tuple[Sharding, float]] = field(default_factory=list)
    finished_s: tuple[float, ...] = ()
    unfit: set[Sharding] = field(default_factory=set)

    @cached_property
    def stage_work(self) -> list[StageWork]:
        """Stage by stage."""
        return [self.work[c] for c in self.stages.classes]


class _States(NamedTuple):
    """Bytes of the state of each group of ranks."""

    ways: list[tuple[Sharding, tuple[float, ...]]]
    """For each way to share it."""
    least: tuple[float, ...]
    """The least in any of them."""


@dataclass(frozen=True)
class _Timed:
    """A layout that was simulated."""

    time_s: float
    peak_bytes: float
    layout: Layout
    kernels: Kernels
    family: int


class Search:
    """Searches one space; what its layouts share is computed once."""

    def __init__(self, space: Space, max_memory: float = 1.0):
        """`max_memory` is the share of the capacity that a rank may fill."""
        self.space = space
        self.estimator = Estimator(space.scenario)
        self.allowed_bytes = max_memory * self.estimator.capacity_bytes
        self._peaks = Peaks(self.estimator)
        self._whole = StageSlice(0, range(space.scenario.model.num_layers), embedding=True, head=True)
        self._work: dict[Hashable, StageWork] = {}
        self._states: dict[Hashable, _States] = {}
        self._counts: Counter[Reason] = Counter()
        # Of those that don't fit: the one with the least need at least, and all that were asked, with a rank's need.
        self._least: tuple[float, Layout, Kernels] | None = None
        self._misfits: list[tuple[float, Layout, Kernels, Stages]] = []

    def run(self, top: int = 5) -> SearchResult:
        """The best `top` layouts, best first."""
        self._counts, self._least, self._misfits = Counter(), None, []
        skeletons = [s for s in self._skeletons() if self._keep_fitting(s)]
        simulated = self._simulate(skeletons, top)
        ranked = rank(simulated, top, self.estimator.capacity_bytes)
        taken = {timed.family for timed in ranked}
        behind = sum(timed.family in taken for timed in simulated) - len(ranked)
        others = [s for s in skeletons if id(s.layout) in taken]
        num_left_out = sum(len(s.variants) for s in skeletons) - len(simulated)
        left_out = sum(len(s.variants) for s in others) - len(ranked) - behind
        self._counts["shared otherwise"] += left_out + behind
        self._counts["slower"] += len(simulated) - len(ranked) - behind
        self._counts["bounded"] += num_left_out - left_out
        self._counts["ranked"] += len(ranked)
        missed = None if ranked else self._find_smallest_misfit()
        return SearchResult(
            ranked=tuple(self.estimator.estimate(timed.layout, timed.kernels) for timed in ranked),
            counts={reason: self._counts[reason] for reason in Reason.__args__},  # type: ignore[attr-defined]
            allowed_bytes=self.allowed_bytes,
            smallest_misfit=self.estimator.estimate(*missed) if missed else None,
        )

    def share(self, layout: Layout, kernels: Kernels) -> Layout:
        """A legal layout with its state shared in the fastest way that fits, or the smallest if none does."""
        m = layout.num_microbatches(self.space.scenario.batch)
        skeleton = _Skeleton(layout, kernels, m, self._peaks.stages(layout))
        if not self._keep_fitting(skeleton):
            ways = self._states[_state_key(skeleton)].ways
            if not ways:  # what was fixed leaves no way at these degrees
                return layout
            held = self._peaks.held_bytes(layout, kernels, skeleton.stages, m)
            return _share(layout, min(ways, key=lambda way: max(map(add, held, way[1])))[0])
        self._bound(skeleton)
        first = skeleton.stages.groups[0]
        timed = []
        for sharding, _ in skeleton.variants:
            time_s = self._time_s(skeleton, sharding, self._update_s(skeleton, first, sharding))
            timed.append((time_s, sharding))
        fitting = (found for time_s, sharding in sorted(timed) if (found := self._fit(skeleton, sharding, time_s)))
        if (fastest := next(fitting, None)) is None:
            return _share(layout, min(skeleton.variants, key=lambda v: v[1])[0])
        return fastest.layout

    def finds_any(self) -> bool:
        """Whether any layout is legal and fits; those that need least are tried first."""
        skeletons = [s for s in self._skeletons() if self._keep_fitting(s)]
        least = [(needed, i, sharding) for i, s in enumerate(skeletons) for sharding, needed in s.variants]
        return any(self._fit(skeletons[i], sharding, 0.0) is not None for _, i, sharding in sorted(least))

    def _skeletons(self) -> Iterator[_Skeleton]:
        """All that are legal and have kernels that nothing dominates; the others are counted."""
        space = self.space
        for tp, pp, dp in space.degrees:
            num_shardings = len(space.shardings(tp, dp))
            # The list of kernels for each kind of recomputation.
            kernels = {r: [k for k in space.kernels if space.allows_kernels(k, tp, r)] for r in space.recompute}
            num_kernels = sum(map(len, kernels.values()))
            num_each = len(space.recompute) * num_shardings * len(space.kernels)
            tensor = [sp for sp in space.sequence_parallel(tp) if space.allows_tensor(tp, sp)]
            num_tensor = len(space.sequence_parallel(tp))
            for order, micro_batch in product(space.orders(pp), space.micro_batches):
                is_legal = tensor and space.allows_pipeline(Pipeline(pp, *order, dp, micro_batch))
                num_legal = len(tensor) * num_shardings * num_kernels if is_legal else 0
                self._counts["not legal"] += num_tensor * num_each - num_legal
                if num_legal:
                    for sp, recompute in product(tensor, space.recompute):
                        layout = self._layout(tp, pp, dp, order, micro_batch, sp, recompute)
                        best = self._undominated(layout, kernels[recompute])
                        self._counts["slower kernels"] += (len(kernels[recompute]) - len(best)) * num_shardings
                        m = layout.num_microbatches(space.scenario.batch)
                        yield from (_Skeleton(layout, k, m, self._peaks.stages(layout)) for k in best)

    def _layout(
        self, tp: int, pp: int, dp: int, order: Order, micro_batch: int, sequence_parallel: bool, recompute: str
    ) -> Layout:
        return Layout(
            tp=tp, pp=pp, dp_shard=dp, schedule=order[0], virtual_stages=order[1], micro_batch=micro_batch,
            sequence_parallel=sequence_parallel, recompute=recompute, **self.space.constant,
        )  # fmt: skip

    def _undominated(self, layout: Layout, kernels: Sequence[Kernels]) -> list[Kernels]:
        """Kernels but those that are no faster in any direction than others, and keep no less, in the same layout."""
        if len(kernels) < 2:
            return list(kernels)
        key = ("kernels", layout.tp, layout.sequence_parallel, layout.micro_batch, layout.recompute)
        return self._peaks.remember(key, lambda: self._find_undominated(layout, kernels))

    def _find_undominated(self, layout: Layout, kernels: Sequence[Kernels]) -> list[Kernels]:
        costs = []
        for k in kernels:
            block = self.estimator.block(layout, k)
            sizes = self._peaks.block_bytes(layout, k)
            waits = max(0.0, block.host_s - block.forward_s - block.backward_s)
            head = self.estimator.head(layout, k)
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

    def _bound_roughly_s(self, skeleton: _Skeleton) -> float:
        """A lower bound of its step that any stages would have: all work, shared out evenly over the pipeline."""
        work = self._stage_work(skeleton, self._whole, None)
        busy_s = skeleton.m * (work.forward_s + work.backward_s) / skeleton.layout.pp
        return busy_s + self.estimator.fixed_s(skeleton.m, peak_bytes=0.0)

    def _bound(self, skeleton: _Skeleton) -> None:
        """Give a skeleton the work of its stages and a lower bound of its step."""
        stages = skeleton.stages
        for stage, stage_class in zip(*stages.examples, strict=True):
            skeleton.work[stage_class] = self._stage_work(skeleton, stage, stage_class)
        delay_s = self.estimator.delay_s(skeleton.layout)
        skeleton.bound_s = max([_bound_group_s(skeleton, group, delay_s) for group in stages.groups])
        skeleton.bound_s += self.estimator.fixed_s(skeleton.m, peak_bytes=0.0)

    def _stage_work(self, skeleton: _Skeleton, stage: StageSlice, stage_class: StageClass | None) -> StageWork:
        """One microbatch on a stage of this class; None is the whole model."""
        layout, kernels = skeleton.layout, skeleton.kernels
        key = (
            layout.tp, layout.sequence_parallel, layout.micro_batch, layout.recompute, id(kernels), layout.pp > 1,
            stage_class,
        )  # fmt: skip
        if key not in self._work:
            self._work[key] = self.estimator.stage_work(stage, layout, kernels)
        return self._work[key]

    def _keep_fitting(self, skeleton: _Skeleton) -> bool:
        """Keep the ways to share the state that fit; whether there are any."""
        layout, m, stages = skeleton.layout, skeleton.m, skeleton.stages
        held = self._peaks.held_bytes(layout, skeleton.kernels, stages, m)
        key = _state_key(skeleton)
        if key not in self._states:
            examples = self._examples(layout)
            found = self._peaks.state_bytes(list(examples.values()), stages, gradient_phase(layout, m))
            least_of_each = tuple(map(min, zip(*found, strict=True)))
            self._states[key] = _States(list(zip(examples, found, strict=True)), least_of_each)
        states, variants = self._states[key], skeleton.variants
        allowed, smallest, known = self.allowed_bytes, inf, self._least[0] if self._least else inf
        if max(map(add, held, states.least), default=inf) > max(allowed, known):  # in any way, and by more than another
            self._counts["does not fit"] += len(states.ways)
            return False
        for sharding, state in states.ways:
            peak = max(map(add, held, state))
            if peak <= allowed:
                variants.append((sharding, peak))
            elif peak < smallest:
                smallest, least = peak, sharding
        self._counts["does not fit"] += len(states.ways) - len(variants)
        if smallest < known:
            self._least = smallest, _share(layout, least), skeleton.kernels
        return bool(skeleton.variants)

    def _examples(self, layout: Layout) -> dict[Sharding, Layout]:
        """Every way to share the state at these degrees, with a layout that does."""
        key = ("shared", layout.tp, layout.pp)
        return self._peaks.remember(
            key, lambda: {sharding: _share(layout, sharding) for sharding in self.space.shardings(layout.tp, layout.dp)}
        )

    def _simulate(self, skeletons: Sequence[_Skeleton], top: int) -> list[_Timed]:
        """Exact times and needs, cheapest question first, until no bound can reach the best `top`.

        The heap holds skeletons by their rough bound, then by their bound, then layouts by a bound with their own
        update, then by their time; only a layout that is the next fastest is asked whether it fits.
        """
        heap: list[tuple[float, int, int, float, int]]
        heap = [(self._bound_roughly_s(s), i, -1, 0.0, 0) for i, s in enumerate(skeletons)]
        heapify(heap)
        found: list[_Timed] = []
        fastest: dict[int, float] = {}  # of each family
        limit_s = inf
        while heap and heap[0][0] <= limit_s:
            bound_s, index, variant, update_s, num_asked = heappop(heap)
            skeleton = skeletons[index]
            if num_asked == 0:
                self._bound(skeleton)
                heappush(heap, (skeleton.bound_s, index, -1, 0.0, 1))
                continue
            if num_asked == 1:
                for i, (sharding, _) in enumerate(skeleton.variants):
                    update_s = self._update_s(skeleton, skeleton.stages.groups[0], sharding)
                    heappush(heap, (skeleton.bound_s + update_s, index, i, update_s, 2))
                continue
            sharding = skeleton.variants[variant][0]
            if num_asked == 2:
                heappush(heap, (self._time_s(skeleton, sharding, update_s), index, variant, 0.0, 3))
                continue
            if (timed := self._fit(skeleton, sharding, bound_s)) is None:
                skeleton.unfit.add(sharding)
                continue
            found.append(timed)
            fastest[timed.family] = min(timed.time_s, fastest.get(timed.family, timed.time_s))
            if len(fastest) >= top:
                limit_s = nsmallest(top, fastest.values())[-1] * (1 + TIE)
        for skeleton in skeletons:
            skeleton.variants = [v for v in skeleton.variants if v[0] not in skeleton.unfit]
            self._counts["does not fit"] += len(skeleton.unfit)
        return found

    def _fit(self, skeleton: _Skeleton, sharding: Sharding, time_s: float) -> _Timed | None:
        """A layout with its exact peak, None if it needs more than is allowed."""
        layout = _share(skeleton.layout, sharding)
        needed, peak = self._peaks.exact(layout, skeleton.kernels, skeleton.stages, self.allowed_bytes)
        if needed <= self.allowed_bytes:
            more_s = self.estimator.fixed_s(skeleton.m, peak) - self.estimator.fixed_s(skeleton.m, 0.0)
            return _Timed(time_s + more_s, peak, layout, skeleton.kernels, id(skeleton.layout))
        self._misfits.append((needed, layout, skeleton.kernels, skeleton.stages))
        return None

    def _find_smallest_misfit(self) -> tuple[Layout, Kernels] | None:
        """What misses by least: of those that were asked, now by what all of their ranks need; else by the least."""
        found, smallest = self._least[1:] if self._least else None, inf
        for least, layout, kernels, stages in self._misfits:
            if least < smallest and (needed := self._peaks.exact(layout, kernels, stages)[0]) < smallest:
                found, smallest = (layout, kernels), needed
        return found

    def _time_s(self, skeleton: _Skeleton, sharding: Sharding, first_update_s: float) -> float:
        """`Estimator.time` with memory to spare, each group of ranks counted once."""
        stages, layout = skeleton.stages, skeleton.layout
        if not skeleton.finished_s:
            delay_s = self.estimator.delay_s(layout)
            finished_s = self.estimator.play(layout, skeleton.m, skeleton.stage_work, delay_s).finished_s
            skeleton.finished_s = tuple(max(finished_s[rank] for rank in group.ranks) for group in stages.groups)
        updates = [first_update_s] + [self._update_s(skeleton, group, sharding) for group in stages.groups[1:]]
        return max(map(add, skeleton.finished_s, updates)) + self.estimator.fixed_s(skeleton.m, 0.0)

    def _update_s(self, skeleton: _Skeleton, group: RankGroup, sharding: Sharding) -> float:
        """Reduction and optimizer of a group's ranks."""
        example = self._examples(skeleton.layout)[sharding]
        n, _ = self._peaks.sizes(skeleton.layout, group)
        own = [skeleton.work[c] for c in group.classes]
        forward_s, backward_s = sum([w.forward_s for w in own]), sum([w.backward_s for w in own])
        num_layers = sum(num_layers for num_layers, *_ in group.classes)
        scenario = self.space.scenario
        return sum(update_times(scenario, example, n, num_layers, skeleton.m, forward_s, backward_s))


def rank(timed: Sequence[_Timed], top: int, capacity_bytes: float) -> list[_Timed]:
    """The best `top`, of each family one: of all within a tie of the fastest that is left, the one with most room."""
    left = sorted(timed, key=lambda t: t.time_s)
    best: list[_Timed] = []
    while left and len(best) < top:
        ties = [t for t in left if t.time_s <= left[0].time_s * (1 + TIE)]
        best.append(min(ties, key=lambda t: _preference(t, capacity_bytes)))
        left = [t for t in left if t.family != best[-1].family]
    return best


def _preference(timed: _Timed, capacity_bytes: float) -> tuple[int, int, float]:
    return round(100 * timed.peak_bytes / capacity_bytes), timed.layout.tp * timed.layout.pp, timed.time_s


def _state_key(skeleton: _Skeleton) -> Hashable:
    """What the state depends on beside how it is shared."""
    return skeleton.layout.tp, id(skeleton.stages), gradient_phase(skeleton.layout, skeleton.m)


def _share(layout: Layout, sharding: Sharding) -> Layout:
    """The layout with its data-parallel ranks sharing the state another way."""
    shard, zero = sharding
    return replace(layout, dp_shard=shard, dp_replicate=layout.dp // shard, zero=zero)  # type: ignore[arg-type]


def _bound_group_s(skeleton: _Skeleton, group: RankGroup, delay_s: float) -> float:
    """`timing.lower_bound` of a group: its last rank is busy while the first microbatch is down there and back."""
    work, comes_back = skeleton.work, not find_schedule(skeleton.layout.schedule).splits_backward
    away_s = sum(n * (work[c].forward_s + comes_back * work[c].backward_s) for c, n in group.before)
    busy_s = sum(work[c].forward_s + work[c].backward_s for c in group.classes)
    return away_s + (1 + comes_back) * delay_s * group.ranks[-1] + skeleton.m * busy_s
