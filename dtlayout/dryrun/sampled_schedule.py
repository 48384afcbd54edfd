"""The peak of a rank from dry runs of a part of its step: fewer actions, and stages with fewer blocks. No torch.

[Note: folding]
Microbatches repeat each other. A rank has as many in flight as its schedule lets it, at most one for each pipeline rank
and chunk. Once all of those, one more and the last have passed, another one in the middle changes no peak: it sends and
computes what its neighbour does. So a long step is run with fewer microbatches, and the middle one counts for all that
were left out, in what is sent and computed. GPipe has all microbatches in flight, and is not folded.

[Note: actions that are alike]
The bytes that an action adds depend on its stage, on whether it is the first or the last of its stage, and on what the
rank did just before (`Step` in costmodel/fsdp2/steps.py), to the byte. The same holds for messages, of which the first
few stay under way. So a few microbatches, on a few of the rank's stages, have an action of each kind that the whole
step has. Only these are executed, in the step's order. Then the memory of the whole step is put together: each of its
actions adds the bytes that the executed action of its kind has added. This needs a peak before the update: the update
of all stages must hold less. It is estimated from the update of the executed stages, scaled to the number of all
stages. Where it may hold more, or two actions of one kind differ after all, all actions are executed.
"""

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any, NamedTuple

from dtlayout.costmodel.cache_keys import StageClass
from dtlayout.costmodel.fsdp2.steps import follow_steps
from dtlayout.dryrun.blocks import ActionMemory, ShortenedStages, add_blocks, shorten_stages
from dtlayout.measure.ledger import UPDATE
from dtlayout.mesh.axes import PP, coordinate
from dtlayout.pipelining.partition import StageSlice, layer_costs, partition
from dtlayout.pipelining.schedule import SENDS_IN_FLIGHT, Schedule, make_schedule, receive_of
from dtlayout.schedules.actions import COMPUTE, RELEASE, SEND, Action
from dtlayout.schedules.schedules import find_schedule
from dtlayout.spec.batch import Batch
from dtlayout.spec.layout import Layout
from dtlayout.spec.model_shape import ModelShape
from dtlayout.spec.recompute import Recompute


class SampledSchedule(NamedTuple):
    """A part of a rank's step that is executed, and the kinds of actions by which it stands for the whole step."""

    schedule: Schedule
    """The schedule of the whole step, without the actions of this rank that are left out."""
    shortened: ShortenedStages | None
    """Blocks that each of two runs leaves out; None for a single run with all blocks."""
    kinds: tuple[Hashable, ...]
    """Kind of each action that is executed, in order, and last of the update; equal kinds add equal bytes."""
    of_whole: tuple[Hashable, ...]
    """Kind of each action of the whole step, in order, and last of the update."""
    share: float
    """Share of the rank's stages that have an action in the sample; the update has no gradients of the other stages."""

    @property
    def cases(self) -> list[dict[str, Any]]:
        """Arguments of `dry_run` that differ between the runs, one dictionary for each run."""
        left_out = [self.shortened.of_shorter, self.shortened.of_longer] if self.shortened else [()]
        return [{"schedule": self.schedule, "left_out": each, "action_memory": ActionMemory()} for each in left_out]


def fold(layout: Layout, batch: Batch) -> Batch:
    """The batch with the fewest microbatches that show everything that happens in a step: [Note: folding]."""
    m = layout.num_microbatches(batch)
    enough = find_schedule(layout.schedule).shorten(layout.pp, layout.virtual_stages, m)
    return replace(batch, global_batch=enough * layout.micro_batch * layout.dp)


def sample_schedule(
    model: ModelShape, batch: Batch, layout: Layout, rank: int, *, leaves_out: bool = True
) -> SampledSchedule:
    """A few actions of a step of `rank`, with every kind of action that the whole step has.

    The step has the batch of `fold`. Where `leaves_out` is False all of its actions are kept, and only blocks are left
    out.
    """
    pp_rank, placement = coordinate(rank, layout)[PP], layout.placement
    schedule = make_schedule(layout, fold(layout, batch))
    stages = _find_alike(model, batch, layout, pp_rank)
    own = placement.stages_of(pp_rank)
    is_linked = any(stage + 1 in own for stage in own)  # they do the same microbatches

    def part_of(action: Action) -> tuple[int, int]:
        return 0 if is_linked else action.stage, action.microbatch

    whole = schedule.ranks[pp_rank]
    of_whole = tuple(_list_kinds(whole, layout, stages))
    wanted = set(of_whole)

    def leave(parts: Iterable[tuple[int, int]]) -> list[Action]:
        kept = set(parts)
        return [action for action in whole if part_of(action) in kept]

    def has_same(parts: Iterable[tuple[int, int]]) -> bool:
        return wanted == set(_list_kinds(leave(parts), layout, stages))

    parts = sorted(set(map(part_of, whole)), reverse=True)
    actions = leave(_leave_out(parts, has_same) if leaves_out else parts)
    ranks = [tuple(actions) if i == pp_rank else each for i, each in enumerate(schedule.ranks)]
    return SampledSchedule(
        replace(schedule, ranks=tuple(ranks)),
        shorten_stages(model, batch, layout, rank),
        tuple(_list_kinds(actions, layout, stages)),
        of_whole,
        len({action.stage for action in actions}) / len(own),
    )


def peak_of_step(sample: SampledSchedule, runs: Sequence[ActionMemory]) -> int | None:
    """Peak bytes of the whole step; None where all actions have to be executed: [Note: actions that are alike]."""
    few, more, times = runs[0].actions, runs[-1].actions, sample.shortened.times if sample.shortened else 0
    executed = [add_blocks(*both, times) for both in zip(few, more, strict=True)]
    *actions, update = executed
    if len(sample.kinds) < len(sample.of_whole):
        added = dict(zip(sample.kinds, executed, strict=True))
        if any(added[kind] != each for kind, each in zip(sample.kinds, executed, strict=True)):
            return None
        *actions, update = [added[kind] for kind in sample.of_whole]
    start = few[0].before_bytes + times * (more[0].before_bytes - few[0].before_bytes)
    *before, last = accumulate((each.left for each in actions), initial=start)
    highest = max(held + each.fullest for held, each in zip(before, actions, strict=True))
    updated = last + update.fullest
    if sample.share < 1 and last + update.fullest / sample.share >= highest:
        return None
    return max(highest, updated)


def _find_alike(model: ModelShape, batch: Batch, layout: Layout, pp_rank: int) -> list[Hashable]:
    """For each stage of a rank a value that is equal for stages that do the same."""
    recompute = Recompute.parse(layout.recompute)

    def find_class(stage: StageSlice) -> Hashable:
        return StageClass.of(stage, recompute, model.num_first), stage.layers.start % max(1, recompute.every)

    return [find_class(stage) for stage in layout.placement.take(partition(layer_costs(model, batch), layout), pp_rank)]


def _list_kinds(actions: Sequence[Action], layout: Layout, stages: Sequence[Hashable]) -> Iterator[Hashable]:
    """Kind of each action of a rank, and last of the update; `stages` has equal values for stages that are alike."""
    placement, num_sent, has_reduced = layout.placement, Counter[int](), False
    works = [action for action in actions if action.kind in COMPUTE]
    steps = follow_steps(works, placement, offloads=layout.offloads_activations)
    for action in actions:
        stage = stages[placement.chunk_of(action.stage)]
        if action.kind in COMPUTE:
            _, step, _ = next(steps)
            before = step.reduced and (stages[step.reduced.chunk], *step.reduced[1:])
            # A stage's first forward frees what another stage's backward has left.
            yield stage, step._replace(chunk=0, reduced=None), before, has_reduced and step.is_first
            has_reduced = has_reduced or action.kind in RELEASE
        elif action.kind in SEND.values():
            receiver = placement.rank_of(receive_of(action).stage)
            num_sent[receiver] += 1
            yield stage, action.kind, num_sent[receiver] <= SENDS_IN_FLIGHT
        else:
            yield stage, action.kind
    yield UPDATE


def _leave_out(
    parts: list[tuple[int, int]], is_enough: Callable[[Iterable[tuple[int, int]]], bool]
) -> list[tuple[int, int]]:
    """Few parts, in order, that are still enough: neighbours are dropped where `is_enough` holds for the rest, half of
    all parts at first, single ones last (delta debugging).

    A part is a stage and a microbatch. It is not always the smallest set.
    """
    size = len(parts) // 2
    while size:
        place = 0
        while place < len(parts):
            rest = parts[:place] + parts[place + size :]
            if is_enough(rest):
                parts = rest
            else:
                place += size
        size //= 2
    return parts
