"""Peak bytes of a pipeline rank under FSDP2: its schedule played in phases, the fullest moment taken.

What a block holds is in fsdp2_blocks.py, what a unit of FSDP2 does in fsdp2_units.py. Here they become a stage's
forward and backward, of which the first gathers parameters and finds no gradients, and the last reduces them; and those
are played in the schedule's order. The optimizer needs nothing
beside what the last backward leaves.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property, lru_cache
from itertools import groupby

from dtlayout.costmodel.fsdp2_blocks import (
    Sizes,
    block_backward,
    block_forward,
    embedding_backward,
    head_backward,
    head_forward,
    sizes_of,
)
from dtlayout.costmodel.fsdp2_units import Sharding, Unit, stage_units
from dtlayout.costmodel.phase import IDLE, Bytes, Part, Phase, changes, fullest_of, sequence
from dtlayout.costmodel.scenario import Scenario
from dtlayout.kernels import Kernels
from dtlayout.layout import Layout
from dtlayout.model_shape import ModelShape
from dtlayout.pipelining.partition import StageSlice
from dtlayout.pipelining.schedule import Action, Kind, make_order
from dtlayout.precision import BYTES
from dtlayout.recompute import Recompute

_P, _A, _B = Part.PARAMETERS, Part.ACTIVATIONS, Part.BUFFERS
_STEP_BYTES = 4
"""Adam's step counter of a tensor."""
_TOKEN_BYTES = 16
"""A token and its target, int64."""
_SENDS_IN_FLIGHT = 2
"""Messages to one neighbour that the runtime keeps until they have gone."""


_Step = tuple[int, bool, bool, bool]
"""Which of a rank's stages, whether it goes forward, and whether it is the stage's first or last."""


def fullest_bytes(
    scenario: Scenario, layout: Layout, kernels: Kernels, stages: Sequence[StageSlice], ranks: Iterable[int]
) -> Iterator[Bytes]:
    """What each of these pipeline ranks holds at its fullest moment, by part."""
    m = max(1, layout.num_microbatches(scenario.batch))
    to_stage = _StageMaker(scenario, layout, kernels)
    for rank in ranks:
        own = [to_stage(chunk) for chunk in stages[rank :: layout.pp]]
        phases, order = _play_gpipe(own[0], m) if layout.schedule == "gpipe" else _play_1f1b(own, layout, m, rank)
        yield fullest_of(sequence(stage.state for stage in own).left, phases, order)


def action_bytes(
    scenario: Scenario, layout: Layout, kernels: Kernels, stages: Sequence[StageSlice], rank: int, m: int
) -> Iterator[tuple[Action | None, float, float]]:
    """What a pipeline rank holds in each forward and backward of m microbatches, at the fullest and in the end.

    First, with None for the action, what is there before the step.
    """
    p, v = layout.pp, layout.virtual_stages
    to_stage = _StageMaker(scenario, layout, kernels)
    own = [to_stage(chunk) for chunk in stages[rank::p]]
    held = sum(sequence(stage.state for stage in own).left)
    yield None, held, held
    num_sent = Counter[int]()
    for action in make_order(layout.schedule, rank, p, v, m):
        phase = own[action.stage // p].play(action, m)
        before, held = held, held + sum(phase.left)
        if (peer := _receiver(action, rank, p, v)) is not None and num_sent[peer] < _SENDS_IN_FLIGHT:
            num_sent[peer] += 1
            held += own[0].size.share
        yield action, before + sum(phase.fullest), held


def table_bytes(scenario: Scenario, layout: Layout) -> float:
    """RoPE's exact tables, which each stage of a rank has."""
    model = scenario.model
    one = 2 * scenario.batch.seq_len * model.head_dim * max(4, BYTES[scenario.precision.params])
    return layout.virtual_stages * float(one)


def token_bytes(scenario: Scenario, layout: Layout) -> float:
    """The step's tokens and targets."""
    return _TOKEN_BYTES * scenario.batch.num_tokens / (layout.dp * layout.cp)


def _play_gpipe(stage: "_Stage", m: int) -> tuple[list[Phase], Sequence[int]]:
    """All forwards, then all backwards, with the messages that have not gone yet."""
    message = changes((_B, stage.size.share))
    sent_forward, sent_backward = message.times(stage.sends_forward), message.times(stage.sends_backward)
    forward, backward = stage.forward(is_first=False), stage.backward(is_first=False, is_last=False)
    phases = [stage.forward(is_first=True), sent_forward]
    if m > 1:
        phases += [forward, sent_forward, forward.times(m - _SENDS_IN_FLIGHT)]
    phases += [stage.backward(is_first=True, is_last=m == 1), sent_backward]
    if m > 2:
        phases += [backward, sent_backward, backward.times(m - _SENDS_IN_FLIGHT - 1)]
    if m > 1:
        phases.append(stage.backward(is_first=False, is_last=True))
    return phases, range(len(phases))


def _play_1f1b(stages: Sequence["_Stage"], layout: Layout, m: int, rank: int) -> tuple[list[Phase], Sequence[int]]:
    """Plain or interleaved, with the messages that have not gone yet."""
    steps, order = _order(layout.schedule, rank, layout.pp, layout.virtual_stages, m)
    played = [changes((_B, stages[0].size.share))]
    for stage, is_forward, is_first, is_last in steps:
        if is_forward:
            played.append(stages[stage].forward(is_first=is_first))
        else:
            played.append(stages[stage].backward(is_first=is_first, is_last=is_last))
    return played, order


@lru_cache(maxsize=1024)
def _order(schedule: str, rank: int, p: int, v: int, m: int) -> tuple[list[_Step], list[int]]:
    """The different steps of a rank, and their order: i is the i-th of them, 0 a message that has not gone.

    Those are the first ones to each neighbour. Of a long step a part is enough: once every stage has had a backward, a
    pipeline that goes on holds again what it held, after one microbatch more (1f1b) or a round of p (interleaved-1f1b).
    """
    m = min(m, p + 2 if schedule == "1f1b" else 3 * p)
    steps: dict[_Step, int] = {}
    order: list[int] = []
    num_sent = Counter[int]()
    for action in make_order(schedule, rank, p, v, m):
        step = (action.stage // p, action.kind is Kind.FORWARD, action.microbatch == 0, action.microbatch == m - 1)
        order.append(steps.setdefault(step, len(steps) + 1))
        if (peer := _receiver(action, rank, p, v)) is not None and num_sent[peer] < _SENDS_IN_FLIGHT:
            num_sent[peer] += 1
            order.append(0)
    return list(steps), order


def _receiver(action: Action, rank: int, p: int, v: int) -> int | None:
    """The pipeline rank that gets what an action makes; None at the pipeline's ends."""
    is_forward = action.kind is Kind.FORWARD
    if action.stage == (p * v - 1 if is_forward else 0):
        return None
    return (rank + (1 if is_forward else -1)) % p


class _StageMaker:
    """Makes the stages of a layout; most are like others."""

    def __init__(self, scenario: Scenario, layout: Layout, kernels: Kernels):
        self.model, self.layout = scenario.model, layout
        self.size, self.sharding = sizes_of(scenario, layout, kernels), Sharding(scenario, layout)
        self.recompute = Recompute.parse(layout.recompute)
        self.known: dict[tuple[bool, bool, int, int], _Stage] = {}

    def __call__(self, chunk: StageSlice) -> "_Stage":
        phase = chunk.layers.start % self.recompute.every if self.recompute.every else 0
        key = chunk.embedding, chunk.head, len(chunk.layers), phase
        if key not in self.known:
            self.known[key] = _Stage(self.model, self.layout, chunk, self.size, self.sharding)
        return self.known[key]


class _Stage:
    """One stage's forward and backward."""

    def __init__(self, model: ModelShape, layout: Layout, chunk: StageSlice, size: Sizes, sharding: Sharding):
        recompute = Recompute.parse(layout.recompute)
        self.has_embedding, self.has_head = chunk.embedding, chunk.head
        self.sends_forward, self.sends_backward = not chunk.head, not chunk.embedding
        self.size = size
        self.sharding = sharding
        self.units = stage_units(model, layout.tp, has_embedding=chunk.embedding, has_head=chunk.head)
        runs = [list(run) for _, run in groupby(chunk.layers, recompute.covers)]
        self.runs = [(size.kept(recompute, run[0]), size.recomputed(recompute, run[0]), len(run)) for run in runs]
        is_kept = size.keeps_stream or any(recompute.covers(layer) for layer in chunk.layers[:1])
        keeps_mask = size.keeps_mask or any(recompute.covers(layer) for layer in chunk.layers)
        self.kept_mask = size.mask if keeps_mask else 0.0
        self.received = 0.0 if chunk.embedding or is_kept else size.share
        ends = [unit for unit in (self.units.embedding, self.units.head, self.units.root) if unit]
        self.counts = dict.fromkeys(ends, 1) | {self.units.block: len(chunk.layers)}
        self._known: dict[tuple[str, bool, bool], Phase] = {}

    @cached_property
    def _blocks(self) -> dict[float, Phase]:
        """A block's forward by what it keeps."""
        return {kept: block_forward(self.size, kept) for kept, _, _ in self.runs}

    @cached_property
    def state(self) -> Phase:
        """Masters and what Adam keeps of them."""
        shards = self.sharding.params * sum(n * unit.count(self.sharding.shards) for unit, n in self.counts.items())
        steps = _STEP_BYTES * sum(n * unit.num_tensors for unit, n in self.counts.items())
        return changes((_P, shards), (Part.OPTIMIZER, 2 * shards + steps))

    def play(self, action: Action, m: int) -> Phase:
        """An action of m microbatches."""
        is_first, is_last = action.microbatch == 0, action.microbatch == m - 1
        if action.kind is Kind.FORWARD:
            return self.forward(is_first=is_first)
        return self.backward(is_first=is_first, is_last=is_last)

    def forward(self, *, is_first: bool) -> Phase:
        """One microbatch; the first one gathers what ZeRO-1 and -2 keep."""
        gathers = is_first or self.sharding.zero == 3
        key = ("forward", gathers, False)
        if key not in self._known:
            self._known[key] = sequence(self._gather_and_forward() if gathers else self._forward())
        return self._known[key]

    def backward(self, *, is_first: bool, is_last: bool) -> Phase:
        """One microbatch; gradients are there from the first one on, the last one leaves shards."""
        key = ("backward", is_first, is_last)
        if key not in self._known:
            self._known[key] = sequence(self._backward(is_first=is_first, is_last=is_last))
        return self._known[key]

    def _forward(self) -> Iterator[Phase]:
        yield changes((_A, self.received + self.size.mask))
        yield from (self._blocks[kept].times(count) for kept, _, count in self.runs)
        yield changes((_A, self.kept_mask - self.size.mask))
        if self.has_head:
            yield head_forward(self.size)

    def _gather_and_forward(self) -> Iterator[Phase]:
        sharding, units = self.sharding, self.units

        def run(unit: Unit, work: Phase, before: Unit | None) -> Phase:
            return sequence((sharding.gather(unit, before), work, sharding.drop(unit) if sharding.zero == 3 else IDLE))

        before = units.root
        if units.root:
            yield sharding.gather(units.root, None)
        yield changes((_A, self.received))
        if units.embedding:
            yield run(units.embedding, IDLE, before)
            before = units.embedding
        yield changes((_A, self.size.mask))
        for kept, _, count in self.runs:
            work = self._blocks[kept]
            yield run(units.block, work, before)
            yield run(units.block, work, units.block).times(count - 1)
            before = units.block
        yield changes((_A, self.kept_mask - self.size.mask))
        if self.has_head:
            work = head_forward(self.size)
            yield run(units.head, work, before) if units.head else work
        yield changes((_B, -sharding.buffer(units.head or before)))
        if units.root and sharding.zero == 3:
            yield sharding.drop(units.root)

    def _backward(self, *, is_first: bool, is_last: bool) -> Iterator[Phase]:
        size, sharding, units = self.size, self.sharding, self.units
        reduces = sharding.zero > 1 or is_last

        def run(unit: Unit, work: Phase, ahead: Unit | None, reduced: Unit | None) -> Phase:
            begin = sharding.begin_backward(unit, ahead) if sharding.zero == 3 else IDLE
            finish = sharding.finish_backward(unit, reduced if reduces else None, is_first=is_first, is_last=is_last)
            return sequence((begin, work, finish))

        reduced = (units.root or units.embedding or units.block) if sharding.zero > 1 and not is_first else None
        if sharding.zero == 3:
            ahead = units.head or units.block
            yield changes((_P, sharding.gathered(units.root) if units.root else 0), (_B, sharding.buffer(ahead)))
        if self.has_head:
            work = head_backward(size, sharding.gradients_of(units.with_head, is_first=is_first))
            yield run(units.head, work, units.block, reduced) if units.head else work
            reduced = units.head or reduced
        else:
            yield changes((_B, size.share))  # the gradient that is received
        weights = sharding.gradients_of(units.block, is_first=is_first)
        blocks = {(kept, again): block_backward(size, weights, kept, again) for kept, again, _ in self.runs}
        for i, (kept, again, count) in enumerate(reversed(self.runs), start=1):
            work = blocks[kept, again]
            after = units.embedding if i == len(self.runs) else units.block
            yield run(units.block, work, units.block if count > 1 else after, reduced)
            if i == 1 and not self.has_head:
                yield changes((_A, size.share))  # from here on there is a gradient of its own
            yield run(units.block, work, units.block, units.block).times(count - 2)
            if count > 1:
                yield run(units.block, work, after, units.block)
            reduced = units.block
        yield changes((_A, -self.kept_mask))
        if self.has_embedding:
            work = embedding_backward(size, sharding.embedding_gradient(units.with_embedding, is_first=is_first))
            yield run(units.embedding, work, None, reduced) if units.embedding else work
            reduced = units.embedding or reduced
        if units.root:
            yield sharding.finish_backward(units.root, reduced if reduces else None, is_first=is_first, is_last=is_last)
            reduced = units.root
        summed = sum(n * sharding.summed(unit) for unit, n in self.counts.items())
        yield changes(
            (_B, -sharding.reduction(reduced) - summed if is_last else 0.0),
            (_B, 0.0 if self.has_head else -size.share),
            (_A, 0.0 if self.has_embedding else -size.share - self.received),
        )
