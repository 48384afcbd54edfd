"""Peak bytes of a pipeline rank under FSDP2: the fullest moment of its schedule, played in phases.

What a block holds is in fsdp2_blocks.py, what a unit of FSDP2 does in fsdp2_units.py. Here they become a stage's
forward and backward, of which the first gathers parameters and finds no gradients, and the last reduces them; and those
are played in the schedule's order. The optimizer needs nothing beside what the last backward leaves.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache, cached_property, lru_cache, partial
from itertools import groupby
from typing import NamedTuple

from dtlayout.costmodel import fsdp2_blocks as autograd
from dtlayout.costmodel.fsdp2_sizes import Sizes
from dtlayout.costmodel.fsdp2_units import Sharding, Unit, block_unit, stage_units
from dtlayout.costmodel.phase import IDLE, NOTHING, Bytes, Part, Phase, changes, fullest_of, sequence
from dtlayout.costmodel.scenario import Scenario
from dtlayout.kernels import Kernels
from dtlayout.layout import Layout
from dtlayout.model_shape import ModelShape
from dtlayout.pipelining.actions import RELEASE, Action, Kind, result_of
from dtlayout.pipelining.partition import StageSlice
from dtlayout.pipelining.placement import Placement
from dtlayout.pipelining.schedule import SENDS_IN_FLIGHT
from dtlayout.pipelining.schedules import PipelineSchedule, find_schedule
from dtlayout.precision import BYTES
from dtlayout.recompute import Recompute

_P, _A, _B = Part.PARAMETERS, Part.ACTIVATIONS, Part.BUFFERS
_TOKEN_BYTES = 16
"""A token and its target, int64."""


class _Step(NamedTuple):
    """One action of a rank."""

    chunk: int
    """Which of the rank's stages."""
    kind: Kind
    is_first: bool
    """Whether it is the stage's first of its direction."""
    is_last: bool
    """Whether it is the stage's last."""
    follows_forward: bool
    """Whether the stage's last action was a forward, after which norm and head are still gathered."""


_PLAYED_IN_ROWS = 4
"""Microbatches of a breadth-first step: two whose messages have not gone, one in the middle, and the last."""


def fullest_bytes(
    scenario: Scenario, layout: Layout, kernels: Kernels, stages: Sequence[StageSlice], ranks: Iterable[int]
) -> Iterator[Bytes]:
    """Bytes that each of these pipeline ranks holds at its fullest moment, by part."""
    m = max(1, layout.num_microbatches(scenario.batch))
    to_stage = _stage_maker(scenario, layout, kernels)
    for rank in ranks:
        own = [to_stage(chunk) for chunk in layout.placement.take(stages, rank)]
        rows = _rows(find_schedule(layout.schedule), layout.placement, m, rank)
        places = {row: place for place, row in enumerate(dict.fromkeys(rows))}
        message = changes((_B, own[0].size.stream))
        phases = [own[step.chunk].play(step).times(count) if step else message for step, count in places]
        yield fullest_of(sequence(stage.state for stage in own).left, phases, [places[row] for row in rows])


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
    for action, step, leaves_message in _steps(find_schedule(layout.schedule), placement, m, rank):
        phase = own[step.chunk].play(step)
        before, held = held, held + sum(phase.left) + leaves_message * own[0].size.stream
        yield action, before + sum(phase.fullest), held


def table_bytes(scenario: Scenario, layout: Layout) -> float:
    """RoPE's exact tables, which each stage of a rank has."""
    model = scenario.model
    one = 2 * scenario.batch.seq_len * model.head_width * max(4, BYTES[scenario.precision.params])
    return layout.virtual_stages * float(one)


def overhead_bytes(scenario: Scenario, layout: Layout) -> float:
    """What the allocator holds whatever the layout, and the step's tokens and targets."""
    tokens = scenario.batch.num_tokens / (layout.dp * layout.cp)
    return _TOKEN_BYTES * tokens + scenario.engine.constants.overhead_bytes


def _steps(schedule: PipelineSchedule, placement: Placement, m: int, rank: int) -> Iterator[tuple[Action, _Step, bool]]:
    """A rank's actions as steps of its stages, and whether a message is left that has not gone.

    Those are the first ones to each neighbour.
    """
    actions = schedule.order(placement, rank, m)
    last = {action.stage: action for action in actions if action.kind in RELEASE}
    begun: set[tuple[bool, int]] = set()
    forwarded: set[int] = set()
    num_sent = Counter[int | None]()
    for action in actions:
        chunk, kind = placement.chunk_of(action.stage), action.kind
        is_forward = kind is Kind.FORWARD
        is_first, is_last = (is_forward, chunk) not in begun, action == last.get(action.stage)
        step = _Step(chunk, kind, is_first, is_last, chunk in forwarded)
        if kind is not Kind.BACKWARD_INPUT:
            begun.add((is_forward, chunk))
            (forwarded.add if is_forward else forwarded.discard)(chunk)
        receiver = None if (result := result_of(action)) is None else placement.receiver_of(result)
        num_sent[receiver] += 1
        yield action, step, receiver is not None and num_sent[receiver] <= SENDS_IN_FLIGHT


@lru_cache(maxsize=256)
def _rows(schedule: PipelineSchedule, placement: Placement, m: int, rank: int) -> list[tuple[_Step | None, int]]:
    """The steps of a rank, each with how often it is done in a row; None is a message that has not gone.

    Of a long step a part is enough, see `PipelineSchedule`.
    """
    p, v = placement.num_ranks, placement.virtual_stages
    shorter = min(m, _PLAYED_IN_ROWS) if schedule.is_breadth_first else schedule.shorten(p, v, m)
    played = _steps(schedule, placement, shorter, rank)
    steps = (each for _, step, leaves_message in played for each in ((step, None) if leaves_message else (step,)))
    rows: list[tuple[_Step | None, int]] = [(step, len(list(run))) for step, run in groupby(steps)]
    if schedule.is_breadth_first:  # the last row of each kind is that of the microbatches in the middle
        longest = {
            step: place for place, (step, _) in enumerate(rows) if step and not step.is_first and not step.is_last
        }
        for step, place in longest.items():
            rows[place] = (step, rows[place][1] + m - shorter)
    return rows


def _stage_maker(scenario: Scenario, layout: Layout, kernels: Kernels) -> "Callable[[StageSlice], _Stage]":
    """What makes the stages of a layout; of those that are alike it makes one."""
    sizes = {kind: Sizes(of_kind, layout, kernels) for kind, of_kind in scenario.kinds.items()}
    make = cache(partial(_Stage, scenario.model, layout, sizes, Sharding(scenario, layout)))
    every = Recompute.parse(layout.recompute).every or 1
    num_first = scenario.model.num_first

    def to_stage(chunk: StageSlice) -> _Stage:
        start = chunk.layers.start
        if start >= num_first:  # where blocks begin then says no more than which are recomputed
            start = num_first + (start - num_first) % every
        return make(StageSlice(range(start, start + len(chunk.layers)), chunk.embedding, chunk.head))

    return to_stage


class _Run(NamedTuple):
    """Blocks of a stage that follow each other and are alike."""

    size: Sizes
    unit: Unit
    kept: float
    """Left by each for its backward."""
    recomputed: float
    """Added to that when it is computed again."""
    num_blocks: int


class _Stage:
    """One stage's forward and backward."""

    def __init__(
        self,
        model: ModelShape,
        layout: Layout,
        sizes: Mapping[ModelShape, Sizes],
        sharding: Sharding,
        chunk: StageSlice,
    ):
        recompute, layers = Recompute.parse(layout.recompute), chunk.layers
        self.has_embedding, self.has_head = chunk.embedding, chunk.head
        self.size, self.sharding = sizes[model], sharding
        size, ends = self.size, {"has_embedding": chunk.embedding, "has_head": chunk.head}
        self.units = stage_units(model, layout.tp, sums_embedding=sharding.sums_embedding, **ends)
        self.runs = []
        for (_, is_first), run in groupby(layers, lambda layer: (recompute.covers(layer), layer < model.num_first)):
            (layer, *others), kind = run, model.without_experts if is_first else model
            own = sizes[kind]
            kept, again = own.kept(recompute, layer), own.recomputed(recompute, layer)
            self.runs.append(_Run(own, block_unit(kind, layout.tp, layout.ep), kept, again, 1 + len(others)))
        is_kept = size.keeps_stream or any(map(recompute.covers, layers[:1]))
        self.kept_mask = size.mask if size.keeps_mask or recompute.count(layers) else 0.0
        self.received = 0.0 if chunk.embedding or is_kept else size.stream
        self.counts = Counter(unit for unit in (self.units.embedding, self.units.head, self.units.root) if unit)
        for each in self.runs:
            self.counts[each.unit] += each.num_blocks
        self.keeps_head = chunk.head and sharding.zero == 3
        self.forward = cache(lambda *how: sequence(self._forward(*how)))
        """One microbatch; the first one gathers what ZeRO-1 and -2 keep, and none what lies there."""
        self.backward = cache(lambda *how: sequence(self._backward(*how)))
        """One microbatch; gradients are there from the first one on, the last one leaves shards."""

    @cached_property
    def state(self) -> Phase:
        """Masters and what the optimizer keeps of them."""
        params, optimizer = self.sharding.params, self.sharding.optimizer
        num_parameters = sum(n * self.sharding.shard(unit) for unit, n in self.counts.items())
        steps = optimizer.step_bytes * sum(n * len(unit.weights) for unit, n in self.counts.items())
        kept = optimizer.state_bytes(params) * num_parameters + steps
        return changes((_P, params * num_parameters), (Part.OPTIMIZER, kept))

    def play(self, step: _Step) -> Phase:
        """A step of this stage; what a backward in two parts holds is held until the second one is over."""
        head_is_gathered = self.keeps_head and step.follows_forward
        if step.kind is Kind.FORWARD:
            return self.forward(step.is_first or self.sharding.zero == 3, head_is_gathered)
        whole = self.backward(step.is_first, step.is_last, head_is_gathered)
        return Phase(whole.fullest, NOTHING) if step.kind is Kind.BACKWARD_INPUT else whole

    def _forward(self, gathers: bool, head_is_gathered: bool) -> Iterator[Phase]:
        sharding, units = self.sharding, self.units

        def run(unit: Unit, work: Phase, before: Unit | None) -> Phase:
            if not gathers or (head_is_gathered and unit is units.head):
                return work
            drops = sharding.zero == 3 and unit is not units.head
            return sequence((sharding.gather(unit, before), work, sharding.drop(unit) if drops else IDLE))

        block_forward = cache(autograd.block_forward)
        before = None if head_is_gathered else units.root
        if before and gathers:
            yield sharding.gather(before, None)
        yield changes((_A, self.received))
        if units.embedding:
            yield run(units.embedding, IDLE, before)
            before = units.embedding
        yield changes((_A, self.size.mask))
        for each in self.runs:
            work = block_forward(each.size, each.kept)
            yield run(each.unit, work, before)
            yield run(each.unit, work, each.unit).times(each.num_blocks - 1)
            before = each.unit
        yield changes((_A, self.kept_mask - self.size.mask))
        if self.has_head:
            work = autograd.head_forward(self.size)
            yield run(units.head, work, before) if units.head else work
        if gathers:
            yield changes((_B, -sharding.buffer(before if head_is_gathered else units.head or before)))
        if units.root and sharding.zero == 3 and not self.has_head:
            yield sharding.drop(units.root)

    def _backward(self, is_first: bool, is_last: bool, head_is_gathered: bool) -> Iterator[Phase]:
        size, sharding, units, runs = self.size, self.sharding, self.units, self.runs
        first_block, last_block = (runs[0].unit, runs[-1].unit) if runs else (None, None)
        reduces = sharding.zero > 1 or is_last

        def run(unit: Unit, work: Phase, ahead: Unit | None, reduced: Unit | None) -> Phase:
            begin = sharding.begin_backward(unit, ahead) if sharding.zero == 3 else IDLE
            if head_is_gathered and unit is units.head:
                begin = changes((_B, sharding.buffer(ahead)))
            finish = sharding.finish_backward(unit, reduced if reduces else None, is_first=is_first, is_last=is_last)
            return sequence((begin, work, finish))

        reduced = (units.root or units.embedding or first_block) if sharding.zero > 1 and not is_first else None
        if sharding.zero == 3:
            ahead = (None if head_is_gathered else units.head) if units.head else last_block
            gathered = sharding.gathered(units.root) if units.root and not head_is_gathered else 0
            yield changes((_P, gathered), (_B, sharding.buffer(ahead)))
        if self.has_head:
            with_head = units.head or units.root
            assert with_head, "a stage with a head has its weight in a unit"
            work = autograd.head_backward(size, sharding.gradients_of(with_head, is_first=is_first))
            yield run(units.head, work, last_block, reduced) if units.head else work
            reduced = units.head or reduced
        else:
            yield changes((_B, size.stream))  # the gradient that is received
        block_backward = cache(self._block_backward)
        for i, each in reversed(list(enumerate(runs))):
            unit, work = each.unit, block_backward(each._replace(num_blocks=1), is_first)
            after = runs[i - 1].unit if i else units.embedding
            yield run(unit, work, unit if each.num_blocks > 1 else after, reduced)
            if each is runs[-1] and not self.has_head:
                yield changes((_A, size.stream))  # from here on there is a gradient of its own
            yield run(unit, work, unit, unit).times(each.num_blocks - 2)
            if each.num_blocks > 1:
                yield run(unit, work, after, unit)
            reduced = unit
        yield changes((_A, -self.kept_mask))
        if self.has_embedding:
            with_embedding = units.embedding or units.root
            assert with_embedding, "a stage with an embedding has its weight in a unit"
            gradient = sharding.embedding_gradient(with_embedding, is_first=is_first)
            work = autograd.embedding_backward(size, gradient)
            yield run(units.embedding, work, None, reduced) if units.embedding else work
            reduced = units.embedding or reduced
        if units.root:
            yield sharding.finish_backward(units.root, reduced if reduces else None, is_first=is_first, is_last=is_last)
            reduced = units.root
        summed = sum(n * sharding.summed(unit) for unit, n in self.counts.items())
        yield changes(
            (_B, -sharding.reduction(reduced) - summed if is_last else 0.0),
            (_B, 0.0 if self.has_head else -size.stream),
            (_A, 0.0 if self.has_embedding else -size.stream - self.received),
        )

    def _block_backward(self, run: _Run, is_first: bool) -> Phase:
        weights = self.sharding.gradients_of(run.unit, is_first=is_first)
        return autograd.block_backward(run.size, weights, run.kept, run.recomputed)
