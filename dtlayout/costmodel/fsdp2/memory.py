"""Peak bytes of a pipeline rank under FSDP2: the fullest moment of its schedule, played in phases.

Bytes of a block are in blocks.py, work of a unit of FSDP2 in units.py, and a schedule as steps of stages in steps.py.
Here they become a stage's forward and backward, which are played in the schedule's order. The first of these gathers
parameters and finds no gradients; the last reduces them. An optimizer needs nothing beside what the last backward
leaves, but for Muon, which has a bucket of matrices.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import cache, cached_property, partial

from dtlayout.costmodel.forward_only import find_differentiated
from dtlayout.costmodel.fsdp2 import blocks as autograd
from dtlayout.costmodel.fsdp2.blocks import WeightGradients
from dtlayout.costmodel.fsdp2.phase import IDLE, Bytes, MemoryKind, Phase, changes, fullest_of, sequence
from dtlayout.costmodel.fsdp2.runs import BlockRun, SizesOfKind, find_runs
from dtlayout.costmodel.fsdp2.sizes import Sizes
from dtlayout.costmodel.fsdp2.steps import Reduced, Step, find_rows, find_steps
from dtlayout.costmodel.fsdp2.units import Unit, UnitBytes, stage_units
from dtlayout.costmodel.muon import workspace_bytes
from dtlayout.costmodel.scenario import Scenario
from dtlayout.pipelining.partition import StageSlice
from dtlayout.schedules.actions import Action, Kind
from dtlayout.schedules.schedules import find_schedule
from dtlayout.spec.kernels import Kernels
from dtlayout.spec.layout import Layout
from dtlayout.spec.model_shape import ModelShape
from dtlayout.spec.precision import BYTES
from dtlayout.spec.recompute import Recompute

_P, _A, _B = MemoryKind.PARAMETERS, MemoryKind.ACTIVATIONS, MemoryKind.BUFFERS
_TOKEN_BYTES = 16
"""A token and its target, int64."""


def fullest_finder(
    scenario: Scenario, layout: Layout, kernels: Kernels, stages: Sequence[StageSlice]
) -> Callable[[int], Bytes]:
    """A function from a pipeline rank to the bytes that it holds at its fullest moment, by `MemoryKind`."""
    schedule, m = find_schedule(layout.schedule), max(1, layout.num_microbatches(scenario.batch))
    if not schedule.is_breadth_first:  # of a long step a part is enough, see `PipelineSchedule`
        m = schedule.shorten(layout.pp, layout.virtual_stages, m)
    to_stage = _stage_maker(scenario, layout, kernels)

    def find(rank: int) -> Bytes:
        own = [to_stage(chunk) for chunk in layout.placement.take(stages, rank)]
        rows, order = find_rows(schedule, layout.placement, m, rank, layout.offloads_activations)
        message = changes((_B, own[0].size.stream))
        phases = [_play(own, step).times(count) if step else message for step, count in rows]
        if workspace := workspace_bytes(scenario, layout, layout.placement.take(stages, rank)):
            phases, order = [*phases, changes((_B, workspace), (_B, -workspace))], [*order, len(phases)]
        return fullest_of(sequence(stage.state for stage in own).left, phases, order)

    return find


def fragment_bytes(
    scenario: Scenario, layout: Layout, kernels: Kernels, held: Sequence[float], *, has_head: bool
) -> float:
    """Bytes that the allocator has reserved and cannot give out, where `held` is what it has, by `MemoryKind`.

    Tensors that come and go leave holes. The largest tensor of the loss fits none, so there is room for one more.
    """
    share, comes_and_goes = (
        scenario.engine.constants.fragment_share,
        (MemoryKind.GRADIENTS, MemoryKind.ACTIVATIONS, MemoryKind.BUFFERS),
    )
    largest = Sizes(scenario, layout, kernels).largest_of_loss if has_head else 0.0
    return largest + share * sum(held[part] for part in comes_and_goes)


def estimate_curve(
    scenario: Scenario, layout: Layout, kernels: Kernels, stages: Sequence[StageSlice], rank: int, m: int
) -> Iterator[tuple[Action | None, float, float]]:
    """Bytes that a pipeline rank holds in each forward and backward of m microbatches, at the fullest and in the end.

    First, with None for the action, what is there before the step.
    """
    placement, to_stage = layout.placement, _stage_maker(scenario, layout, kernels)
    own = [to_stage(chunk) for chunk in placement.take(stages, rank)]
    held = sum(sequence(stage.state for stage in own).left)
    held += table_bytes(scenario, layout) + overhead_bytes(scenario, layout)
    yield None, held, held
    played = find_steps(find_schedule(layout.schedule), placement, m, rank, offloads=layout.offloads_activations)
    for action, step, leaves_message in played:
        phase = _play(own, step)
        before, held = held, held + sum(phase.left) + leaves_message * own[0].size.stream
        yield action, before + sum(phase.fullest), held


def table_bytes(scenario: Scenario, layout: Layout) -> float:
    """RoPE's exact tables of a rank's own tokens, which each of its stages has."""
    own_tokens = scenario.batch.seq_len / layout.cp
    one = 2 * own_tokens * scenario.model.head_width * max(4, BYTES[scenario.precision.params])
    return layout.virtual_stages * one


def overhead_bytes(scenario: Scenario, layout: Layout) -> float:
    """Bytes that the allocator holds for any layout, and those of a step's tokens and targets."""
    tokens = scenario.batch.num_tokens / (layout.dp * layout.cp)
    return _TOKEN_BYTES * tokens + scenario.engine.constants.overhead_bytes


def _play(own: Sequence["_Stage"], step: Step) -> Phase:
    """Phase of a step of a rank that has these stages."""
    reduced = step.reduced
    return own[step.chunk].play(step, own[reduced.chunk].last_reduced(reduced) if reduced else None)


def _stage_maker(scenario: Scenario, layout: Layout, kernels: Kernels) -> "Callable[[StageSlice], _Stage]":
    """A function that makes the stages of a layout, and one stage for all that are alike."""

    @cache
    def sizes(kind: ModelShape, ends_gradients: bool) -> Sizes:
        return Sizes(scenario.kinds.get(kind, scenario), layout, kernels, ends_gradients=ends_gradients)

    make = cache(partial(_Stage, scenario.model, layout, sizes, UnitBytes(scenario, layout, kernels)))
    every, is_alike = Recompute.parse(layout.recompute).every or 1, len({*scenario.model.block_kinds}) < 2
    num_first = scenario.model.num_first

    def to_stage(chunk: StageSlice) -> _Stage:
        start = chunk.layers.start
        if is_alike and start >= num_first:  # where blocks begin then says no more than which are recomputed
            start = num_first + (start - num_first) % every
        return make(StageSlice(range(start, start + len(chunk.layers)), chunk.embedding, chunk.head))

    return to_stage


class _Stage:
    """One stage's forward and backward."""

    def __init__(
        self,
        model: ModelShape,
        layout: Layout,
        sizes: SizesOfKind,
        sharding: UnitBytes,
        chunk: StageSlice,
    ):
        recompute, layers = Recompute.parse(layout.recompute), chunk.layers
        self.has_embedding, self.has_head = chunk.embedding, chunk.head
        self.size, self.sharding = sizes(model.usual, False), sharding
        size, ends = self.size, {"has_embedding": chunk.embedding, "has_head": chunk.head}
        self.units = stage_units(model, layout.tp, sums_embedding=sharding.sums_embedding, **ends)
        self.runs = find_runs(model, layout, sizes, chunk, sharding)
        self.differentiated = [each for each in self.runs if each.has_backward]
        self.offloads = layout.offloads_activations
        is_kept = not self.offloads and (size.keeps_stream or any(map(recompute.covers, layers[:1])))
        num_recomputed = recompute.count(find_differentiated(model, chunk))
        keeps_mask = size.keeps_mask and bool(self.differentiated or not layers)
        self.kept_mask = size.mask if keeps_mask or num_recomputed else 0.0
        self.received = 0.0 if chunk.embedding or is_kept else size.stream
        self.counts = Counter(unit for unit in (self.units.embedding, self.units.head, self.units.root) if unit)
        for each in self.runs:
            self.counts.update(dict.fromkeys(each.units, each.num_blocks))
        self.ends = tuple(unit for unit in (self.units.embedding, self.units.head, self.units.root) if unit)
        """Units beside the blocks'."""
        self.is_frozen_first = chunk.embedding and not sharding.description.embedding.trains
        """True if the embedding is frozen, so that gradients end at the first block with a backward."""
        self.end = size.first_end if self.is_frozen_first and not self.differentiated else size.end
        """Steps of the final norm."""
        self.keeps_head = chunk.head and sharding.zero == 3
        self.forward = cache(lambda *how: sequence(self._forward(*how)))
        """One microbatch; the first one gathers what ZeRO-1 and -2 keep, and none what lies there."""
        self.backward = cache(lambda is_first, is_last, *how: sequence(self._backward(is_first, *how, is_last=is_last)))
        """One microbatch; gradients are there from the first one on, the last one leaves shards."""
        self.backward_input = cache(lambda *how: sequence(self._backward(*how, is_last=False, splits=True)))
        self.backward_weight = cache(lambda *how: sequence(self._backward_weight(*how)))
        """The parts of one that is split."""
        self._block_backward = cache(self._find_block_backward)
        """A block's backward, from its run, whether it is the first microbatch's, and whether it is split."""

    @property
    def last_kept(self) -> float:
        """Left by the last block for its backward."""
        return self.runs[-1].kept if self.runs else 0.0

    @cached_property
    def state(self) -> Phase:
        """Masters and what the optimizer keeps of them."""
        if self.sharding.on_host:
            return changes((_P, sum(n * self.sharding.frozen_bytes(unit) for unit, n in self.counts.items())))
        masters = sum(n * self.sharding.shard_bytes(unit) for unit, n in self.counts.items())
        kept = sum(n * self.sharding.optimizer_bytes(unit) for unit, n in self.counts.items())
        buckets = sum(n * self.sharding.all_gradients(unit) for unit, n in self.counts.items())
        return changes((_P, masters), (MemoryKind.OPTIMIZER, kept), (_B, buckets))

    def last_reduced(self, reduced: Reduced) -> Unit | None:
        """The unit whose buffer a backward of this stage has left, [Note: a unit's reduction]."""
        if reduced.kind is Kind.BACKWARD_WEIGHT:
            *_, last = self._reduced_late(ends_wait=reduced.kind_changed)
            return last
        units, differentiated = self.units, self.differentiated
        if self.is_frozen_first:
            return differentiated[0].unit if differentiated else units.head or units.root
        return units.root or units.embedding or (differentiated[0].unit if differentiated else units.head)

    def _reduced_late(self, *, ends_wait: bool) -> list[Unit | None]:
        """Units in the order in which the second part of a backward reduces them, that of the modules.

        In the end None where the last one has no gradients, and so only lets go of the buffer before its own.
        """
        units = self.units
        first = [unit for unit in (units.root, units.embedding) if unit and ends_wait]
        blocks = [unit for each in self.runs for unit in each.num_blocks * each.units]
        last = [units.head if ends_wait else None] if units.head or not (blocks or ends_wait) else []
        return [*first, *blocks, *last]

    def play(self, step: Step, reduced: Unit | None) -> Phase:
        """A step of this stage; what a backward in two parts holds is held until the second one is over.

        `reduced` is the unit of any of the rank's stages whose buffer is still there, [Note: a unit's reduction].
        """
        head_is_gathered = self.keeps_head and step.follows_forward
        around = (step.beside_own_pass, step.prev_block_still_copying, step.prefetches_next)
        if step.kind is Kind.FORWARD:
            return self.forward(step.is_first or self.sharding.zero == 3, head_is_gathered, *around)
        late = self.sharding.sums_late
        reduced = None if late else reduced
        if step.kind is Kind.BACKWARD_WEIGHT:
            ends_wait = step.is_last if late else step.kind_changed
            return self.backward_weight(step.is_first, step.is_last, ends_wait, reduced)
        if step.kind is Kind.BACKWARD_INPUT:
            return self.backward_input(step.is_first if late else step.kind_changed, None, head_is_gathered)
        return self.backward(step.is_first, step.is_last, reduced, head_is_gathered, *around)

    def _forward(
        self,
        gathers: bool,
        head_is_gathered: bool,
        beside_own_pass: bool,
        prev_block_still_copying: bool,
        prefetches_next: bool,
    ) -> Iterator[Phase]:
        """Phases of one microbatch's forward.

        With activations on the host the device has what the running block keeps, and what the one before it has kept;
        `prev_block_still_copying` if that was of another action. With `prefetches_next` the first block of the next
        action comes back.
        A unit's input, `reads` bytes, is there while the unit is gathered.
        """
        sharding, units = self.sharding, self.units

        def run(unit: Unit, work: Phase, before: Unit | None, reads: float = self.size.stream) -> Phase:
            if not gathers or (head_is_gathered and unit is units.head):
                return work
            drops = sharding.zero == 3 and unit is not units.head
            gather = sequence((changes((_A, reads)), sharding.gather(unit, before), changes((_A, -reads))))
            return sequence((gather, work, sharding.drop(unit) if drops else IDLE))

        def block_forward(each: BlockRun) -> Phase:
            if each.experts is None or not gathers:
                return autograd.block_forward(each.kept, each.in_forward)
            parts = autograd.forward_with_experts(each.size, each.kept, each.at_experts, each.in_forward)
            drop = sharding.drop(each.experts) if sharding.zero == 3 else IDLE
            return sequence((parts[0], sharding.gather(each.experts, each.unit), parts[1], drop))

        before = None if head_is_gathered else units.root
        if before and gathers:
            yield sharding.gather(before, None)
        yield changes((_A, self.received))
        if units.embedding:
            yield run(units.embedding, IDLE, before, reads=0.0)
            before = units.embedding
        yield changes((_A, self.size.mask))
        copied = self.last_kept if self.offloads and prev_block_still_copying else 0.0
        yield changes((_A, copied))
        reads = self.size.stream - self.received
        for each in self.runs:
            work, last_unit = block_forward(each), each.units[-1]
            if not self.offloads:
                yield run(each.unit, work, before, reads)
                yield run(each.unit, work, last_unit).times(each.num_blocks - 1)
            else:
                is_last = each is self.runs[-1]
                follows = sequence((work, changes((_A, -each.kept))))  # of the block before, when this one is over
                yield run(each.unit, work, before, reads)
                yield changes((_A, -copied))
                yield run(each.unit, follows, last_unit).times(each.num_blocks - 1 - is_last)
                if is_last and prefetches_next:
                    yield changes((_A, each.kept))
                yield run(each.unit, follows, last_unit).times(min(is_last, each.num_blocks - 1))
                copied = each.kept
            before, reads = last_unit, self.size.stream
        yield changes((_A, self.kept_mask - self.size.mask))
        if self.has_head:
            work = autograd.head_forward(self.size, self.end)
            yield run(units.head, work, before) if units.head else work
        if self.offloads:  # what is left of it here is what the next action begins with
            yield changes((_A, -copied * (not beside_own_pass) - self.last_kept * prefetches_next))
        if gathers:
            yield changes((_B, -sharding.buffer(before if head_is_gathered else units.head or before)))
        if units.root and sharding.zero == 3 and not self.has_head:
            yield sharding.drop(units.root)

    def _backward(
        self,
        is_first: bool,
        reduced: Unit | None,
        head_is_gathered: bool,
        beside_own_pass: bool = False,
        prev_block_still_copying: bool = False,
        prefetches_next: bool = False,
        *,
        is_last: bool,
        splits: bool = False,
    ) -> Iterator[Phase]:
        """Phases of one microbatch's backward.

        With activations on the host the device has what the running block kept, and what comes back for the next one.
        """
        size, sharding, units, runs = self.size, self.sharding, self.units, self.differentiated
        last_block, ends = (runs[-1].units if runs else ()), self.ends
        embedding = None if self.is_frozen_first else units.embedding
        to_embedding = (embedding,) if embedding else ()
        reduces = not splits and (not sharding.sums_late or is_last)

        def finish_unit(unit: Unit, before: Unit | None) -> Phase:
            if splits:
                return sharding.put_off(unit, is_first=is_first, is_end=unit in ends)
            return sharding.finish_backward(unit, before, is_first=is_first, is_last=is_last)

        def run(unit: Unit, work: Phase, ahead: Sequence[Unit], reduced: Unit | None) -> Phase:
            begin = sharding.begin_backward(unit, *ahead) if sharding.zero == 3 else IDLE
            if head_is_gathered and unit is units.head:
                begin = changes(*(step for each in ahead for step in sharding.fill(each)))
            finish = finish_unit(unit, reduced if reduces else None)
            return sequence((begin, work, finish))

        if sharding.zero == 3:
            ahead = ((units.head,) * (not head_is_gathered)) if units.head else last_block or to_embedding
            root = sharding.take_out(units.root) if units.root and not head_is_gathered else []
            yield changes(*root, *(step for each in ahead for step in sharding.fill(each)))
        copied = self.last_kept if self.offloads and prev_block_still_copying else 0.0
        if self.offloads:
            yield changes((_A, copied + self.last_kept * (not beside_own_pass)))
        if self.has_head:
            with_head = units.head or units.root
            assert with_head, "a stage with a head has its weight in a unit"
            work = autograd.head_backward(size, self.end, sharding.gradients_of(with_head, is_first=is_first))
            yield run(units.head, work, last_block, reduced) if units.head else work
            reduced = units.head or reduced
        else:
            yield changes((_B, size.stream))  # the gradient that is received

        def block_backward(each: BlockRun, before: Unit | None) -> Phase:
            """A block's backward; `before` is the unit whose buffer is there, which experts let go."""
            if each.experts is None:
                return self._block_backward(each, is_first, splits)
            of_units = [sharding.gradients_of(unit, is_first=is_first) for unit in each.units]
            parts = autograd.backward_with_experts(each.size, of_units, each.kept, each.recomputed, puts_off=splits)
            begin = sharding.begin_backward(each.experts) if sharding.zero == 3 else IDLE
            return sequence((begin, parts[0], finish_unit(each.experts, before if reduces else None), parts[1]))

        for i, each in reversed(list(enumerate(runs))):
            unit, first_work, work = each.unit, block_backward(each, reduced), block_backward(each, each.unit)
            last_work = work
            if self.offloads:  # and what the block that follows has kept comes back
                coming = runs[i - 1].kept if i else self.last_kept if prefetches_next else 0.0
                first = each.kept if each.num_blocks > 1 else coming
                first_work = sequence((changes((_A, first)), first_work))
                last_work = sequence((changes((_A, coming)), work))
                work = sequence((changes((_A, each.kept)), work))
            after = runs[i - 1].units if i else to_embedding
            yield run(unit, first_work, each.units if each.num_blocks > 1 else after, each.experts or reduced)
            if each is runs[-1] and not self.has_head:
                yield changes((_A, size.stream))  # from here on there is a gradient of its own
            yield run(unit, work, each.units, each.units[-1]).times(each.num_blocks - 2)
            yield changes((_A, -copied))
            copied = 0.0
            if each.num_blocks > 1:
                yield run(unit, last_work, after, each.units[-1])
            reduced = unit
        if self.offloads and prefetches_next:
            yield changes((_A, -self.last_kept))
        yield changes((_A, -self.kept_mask))
        if self.is_frozen_first:
            forward_only = [each for each in self.runs if not each.has_backward]
            frozen = sum(each.num_blocks * sharding.kept_gathered(unit) for each in forward_only for unit in each.units)
            frozen += sharding.kept_gathered(units.embedding)
            yield changes((_P, -frozen if is_last else 0.0))
            if not (runs or units.head or units.root):
                yield changes((_B, -sharding.reduction(reduced) if reduces else 0.0))
                reduced = None
        elif self.has_embedding:
            with_embedding = units.embedding or units.root
            assert with_embedding, "a stage with an embedding has its weight in a unit"
            gradient = sharding.embedding_gradient(with_embedding, is_first=is_first)
            work = autograd.embedding_backward(size, gradient)
            yield run(units.embedding, work, (), reduced) if units.embedding else work
            reduced = units.embedding or reduced
        if units.root:
            yield finish_unit(units.root, reduced if reduces else None)
            reduced = units.root
        summed = sum(n * sharding.summed(unit) for unit, n in self.counts.items())
        yield changes(
            (_B, -sharding.reduction(reduced) - summed if is_last else 0.0),
            (_B, 0.0 if self.has_head else -size.stream),
            (_A, 0.0 if self.has_embedding else -size.stream - self.received),
        )

    def _find_block_backward(self, run: BlockRun, is_first: bool, splits: bool) -> Phase:
        if splits:
            return autograd.input_backward(run.size, run.kept, run.recomputed)
        weights = self.sharding.gradients_of(run.unit, is_first=is_first)
        return autograd.block_backward(run.size, weights, run.kept, run.recomputed)

    def _backward_weight(self, is_first: bool, is_last: bool, ends_wait: bool, before: Unit | None) -> Iterator[Phase]:
        """Phases of a backward's second part: all blocks' gradients are added up before the first unit is reduced.

        `ends_wait` where embedding and head have gradients of a first part, which are reduced with them.
        """
        sharding, reduces = self.sharding, is_last or not self.sharding.sums_late
        for each in self.runs:
            weights = WeightGradients.of(sharding.gradients_of(unit, is_first=is_first) for unit in each.units)
            yield autograd.weight_backward(each.size, weights).times(each.num_blocks)
        blocks = [unit for each in self.runs for unit in each.num_blocks * each.units]
        for unit in blocks:
            yield sharding.add_up(unit, is_first=is_first or not sharding.sums_late)
        for late in self._reduced_late(ends_wait=ends_wait) if reduces else []:
            if late:
                yield sharding.finish_backward(late, before, is_first=is_first, is_last=is_last, is_late=True)
                yield changes((_B, -sharding.summed(late) if is_last else 0.0))  # a unit's backward ends by itself
            else:
                yield changes((_B, -sharding.reduction(before)))
            before = late
        if is_last:
            yield changes((_B, -sharding.reduction(before)))
