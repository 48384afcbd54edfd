"""Peaks: the least that many layouts need, from what they share, and what one of them needs exactly.

What a rank *holds* (activations, logits) depends on the microbatch, recomputation and the schedule; its *state*
(parameters, gradients, optimizer) on how data-parallel ranks share it. So h ways to hold and s ways to share cost h + s
evaluations. Their sum is a lower bound of the rank's need: the need itself where `costmodel.memory` adds components up
(distributed optimizer), and what is there at the end of a forward where it plays the step (fsdp2). Pipeline ranks with
the same blocks are one group: of a group the first rank, which warms up longest, holds most.
"""

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from math import inf
from typing import Any, NamedTuple, TypeVar

from dtlayout.costmodel import memory
from dtlayout.costmodel.estimate import Estimator
from dtlayout.costmodel.fsdp2_blocks import sizes_of
from dtlayout.costmodel.scenario import count_state_shards
from dtlayout.kernels import Kernels
from dtlayout.layout import Layout
from dtlayout.pipelining.partition import StageSlice
from dtlayout.pipelining.placement import Placement
from dtlayout.pipelining.schedules import find_schedule
from dtlayout.pipelining.timing import in_flight_peaks, weigh_moments
from dtlayout.precision import BYTES
from dtlayout.recompute import Recompute

T = TypeVar("T")
StageClass = tuple[int, int, bool, bool]
"""Blocks, those of them that are recomputed, embedding, head: stages of one class take the same time."""


@dataclass(frozen=True)
class RankGroup:
    """Pipeline ranks whose stages are of the same classes."""

    ranks: tuple[int, ...]
    """The ranks, first to last."""
    chunks: tuple[StageSlice, ...]
    """The stages of the first of them."""
    classes: tuple[StageClass, ...]
    """Of each chunk."""
    before: tuple[tuple[StageClass, int], ...]
    """Classes of the first chunks of all ranks before the last of these, and how many of each."""
    recomputes: bool
    """Whether any of its blocks are computed again."""
    has_head: bool
    """Whether it holds the head."""


@dataclass(frozen=True)
class Stages:
    """The stages of a pipeline, and which of its ranks are alike; `Peaks` keeps one of a kind, told apart by id."""

    slices: tuple[StageSlice, ...]
    """Stage by stage."""
    classes: tuple[StageClass, ...]
    """Of each."""
    groups: tuple[RankGroup, ...]
    """Of all ranks."""
    examples: tuple[tuple[StageSlice, ...], tuple[StageClass, ...]]
    """A stage of each class, and the classes."""


class BlockBytes(NamedTuple):
    """Bytes that one microbatch holds."""

    whole: float
    """In a block, for its backward."""
    kept: float
    """In a block that is recomputed."""
    again: float
    """Added to it, for one block at a time."""
    logits: float
    """Logits and what the loss makes of them."""


def group_stages(slices: Sequence[StageSlice], placement: Placement, recompute: Recompute) -> Stages:
    """Put the ranks of a pipeline into groups."""
    classes = tuple((len(s.layers), sum(map(recompute.covers, s.layers)), s.embedding, s.head) for s in slices)
    ranks: dict[tuple[StageClass, ...], list[int]] = {}
    for rank in range(placement.num_ranks):
        ranks.setdefault(placement.take(classes, rank), []).append(rank)
    groups = []
    for group, members in ranks.items():
        above = classes[: members[-1]]
        counts = tuple((c, above.count(c)) for c in dict.fromkeys(above))
        recomputes, has_head = any(c[1] for c in group), any(c[3] for c in group)
        chunks = placement.take(slices, members[0])
        groups.append(RankGroup(tuple(members), chunks, group, counts, recomputes, has_head))
    examples = dict(zip(reversed(classes), reversed(slices), strict=True))
    return Stages(tuple(slices), classes, tuple(groups), (tuple(examples.values()), tuple(examples)))


class Peaks:
    """Peak bytes of many layouts of one scenario."""

    def __init__(self, estimator: Estimator):
        """`estimator` says how the model is cut."""
        self.estimator = estimator
        self.scenario = estimator.scenario
        self._is_fsdp2 = self.scenario.engine.habits.sharding == "fsdp2"
        self._known: dict[Hashable, Any] = {}

    def stages(self, layout: Layout) -> Stages:
        """The stages of a layout in groups."""
        recompute = self.remember(layout.recompute, lambda: Recompute.parse(layout.recompute))
        place = find_schedule(layout.schedule).place
        key = ("stages", place, layout.pp, layout.virtual_stages, layout.stage_layers, recompute.every)
        return self.remember(key, lambda: group_stages(self.estimator.stages(layout), layout.placement, recompute))

    def block_bytes(self, layout: Layout, kernels: Kernels) -> "BlockBytes":
        """What blocks and head hold of a microbatch."""
        key = ("block", layout.tp, layout.sequence_parallel, layout.micro_batch, layout.recompute)
        return self.remember((*key, kernels), lambda: self._block_bytes(layout, kernels))

    def _block_bytes(self, layout: Layout, kernels: Kernels) -> "BlockBytes":
        if not self._is_fsdp2:
            tokens = memory.tokens_of(self.scenario, layout)
            whole, kept = memory.block_bytes_per_token(self.scenario, layout, kernels)
            logits = memory.logit_bytes(self.scenario, layout)
            return BlockBytes(tokens * whole, tokens * kept, tokens * (whole - kept), logits)
        size, recompute = sizes_of(self.scenario, layout, kernels), Recompute.parse(layout.recompute)
        kept = size.kept(recompute, recompute.every - 1) if recompute.every else size.block
        # A backward begins where most is in flight, with a block that is surely recomputed only if all are.
        again = size.recomputed(recompute, 0) if recompute.every == 1 else 0.0
        # So does the loss, if there is one chunk alone.
        logits = size.loss if layout.virtual_stages == 1 else 0.0
        return BlockBytes(size.block, kept, again, logits)

    def held_bytes(self, layout: Layout, kernels: Kernels, stages: Stages, m: int) -> tuple[float, ...]:
        """What each group of ranks holds at least beside its state."""
        block = self.block_bytes(layout, kernels)
        blocks = self.remember(("blocks", layout.schedule, m, id(stages)), lambda: _count_blocks(layout, stages, m))
        held = []
        for group, moments in zip(stages.groups, blocks, strict=True):
            in_flight = max([n * block.whole + covered * block.kept for n, covered in moments])
            again = block.again if group.recomputes else 0.0
            logits = block.logits if group.has_head else 0.0
            held.append(in_flight + (max(again, logits) if self._is_fsdp2 else again + logits))
        return tuple(held)

    def state_bytes(self, layouts: Sequence[Layout], stages: Stages, phase: int) -> list[tuple[float, ...]]:
        """For each of several layouts with these stages what each group of ranks has at least whatever it computes.

        `phase` is the `gradient_phase` of the schedule that they share, whatever these examples say.
        """
        if not layouts:
            return []
        overhead = self.scenario.engine.constants.overhead_bytes
        ways = tuple([(layout.dp_shard, layout.dp_replicate, layout.zero) for layout in layouts])
        by_group = []
        for group in stages.groups:
            size = self.sizes(layouts[0], group)
            key = (layouts[0].tp, layouts[0].pp, ways, phase, size)
            if key not in self._known:
                self._known[key] = [overhead + self.least_state_bytes(layout, *size, phase) for layout in layouts]
            by_group.append(self._known[key])
        return list(zip(*by_group, strict=True))

    def sizes(self, layout: Layout, group: RankGroup) -> tuple[float, float]:
        """Parameters of a rank, and of its largest unit."""

        def count() -> tuple[float, float]:
            model = self.scenario.model
            n = sum(memory.count_stage_parameters(model, chunk, layout.tp) for chunk in group.chunks)
            return n, memory.largest_unit(model, group.chunks, layout.tp)

        return self.remember(("sizes", layout.tp, id(group)), count)

    def exact(
        self, layout: Layout, kernels: Kernels, stages: Stages, allowed_bytes: float = inf
    ) -> tuple[float, float]:
        """What the fullest rank needs, and its peak; no rank is looked at after one that needs more than allowed."""
        ranks: Iterable[memory.MemoryEstimate]
        if not self._is_fsdp2:
            ranks = self.estimator.memory(layout, kernels)
        else:
            # Of a schedule that nobody looked at it is not known that the first rank of a group holds most.
            num_looked_at = 1 if find_schedule(layout.schedule).fast else None
            members = [rank for group in stages.groups for rank in group.ranks[:num_looked_at]]
            ranks = memory.estimate_ranks(self.scenario, layout, kernels, stages.slices, members)
        needed = peak = 0.0
        for rank in ranks:
            needed, peak = max(needed, rank.needed), max(peak, rank.total)
            if needed > allowed_bytes:
                break
        return needed, peak

    def least_state_bytes(self, layout: Layout, n: float, unit: float, phase: int) -> float:
        """What a rank has of n parameters at least, whatever it computes.

        Under fsdp2 masters with their moments, what is computed with where it stays, and accumulated gradients.
        """
        if self._is_fsdp2:
            precision, shards = self.scenario.precision, count_state_shards(layout)
            params, compute, reduce = (BYTES[f] for f in (precision.params, precision.compute, precision.reduce))
            gradients = reduce * n if layout.zero == 1 else min(reduce, params) * n / shards
            state = 3 * params * n / shards + (compute * n if layout.zero < 3 else 0.0)
            return state + (gradients if phase == 2 else 0.0)
        return (
            memory.parameter_bytes(self.scenario, layout, n)
            + memory.gradient_bytes(self.scenario, layout, n)
            + memory.optimizer_bytes(self.scenario, layout, n)
            + memory.gathered_bytes(self.scenario, layout, n, unit)
        )

    def remember(self, key: Hashable, compute: Callable[[], T]) -> T:
        """What was computed for this key before, or is now."""
        if key not in self._known:
            self._known[key] = compute()
        found: T = self._known[key]
        return found


def gradient_phase(layout: Layout, m: int) -> int:
    """0: one microbatch, nothing accumulates; 2: gradients of all stages are there when most is in flight; else 1.

    They are where a step repeats itself, whose last microbatch alone does something else.
    """
    if m == 1:
        return 0
    enough = find_schedule(layout.schedule).enough
    return 2 if enough and m + 1 >= enough(layout.pp, layout.virtual_stages) else 1


def _count_blocks(layout: Layout, stages: Stages, m: int) -> list[set[tuple[float, float]]]:
    """For each group, at its fullest moments, blocks in flight that keep all and that are recomputed."""
    found, pipeline = [], (layout.schedule, layout.pp, layout.virtual_stages, m)
    for group in stages.groups:
        whole, covered = [c[0] - c[1] for c in group.classes], [c[1] for c in group.classes]
        moments = in_flight_peaks(*pipeline, group.ranks[0])
        found.append(set(zip(weigh_moments(moments, whole), weigh_moments(moments, covered), strict=True)))
    return found
