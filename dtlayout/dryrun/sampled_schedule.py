"""The peak of a rank from dry runs of an excerpt of its step: fewer actions, of stages with fewer blocks. No torch.

[Note: folding]
Microbatches repeat each other. A rank has as many in flight as its schedule lets it, at most one for each pipeline rank
and chunk; once all of those, one more and the last have passed, another one in the middle changes no peak, and sends
and computes what its neighbour does. So a long step is run with fewer microbatches, and what the middle one sent and
computed counts for all that were left out. GPipe has them all in flight, and is not folded.

[Note: actions that are alike]
What an action adds to what a rank holds depends on its stage, on whether that does it for the first or the last time,
and on what the rank did just before (`fsdp2_steps.Step`), to the byte; so do messages, of which the first ones stay
under way. So a few of a step's microbatches, on a few of the rank's stages, have all kinds of actions that it has. They
are executed, in the step's order, and the step is put together: each of its actions adds what the one of its kind has
added. That needs the update of all stages to be lower than the rest, which the update of a few, times as many as there
are stages, says. Where it may not be, or two actions of a kind differ after all, all are executed.
"""

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any, NamedTuple

from dtlayout.costmodel.cache_keys import StageClass
from dtlayout.costmodel.fsdp2.steps import follow_steps
from dtlayout.dryrun.blocks import ActionMemory, ShortenedStages, add_blocks, find_cut
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


class Excerpt(NamedTuple):
    """What is run of a step, and what that stands for."""

    schedule: Schedule
    """The whole step's, but for the rank's actions that are left out."""
    cut: ShortenedStages | None
    """Blocks that two runs leave out; None for a single run with all of them."""
    kinds: tuple[Hashable, ...]
    """What each action that is run is like, and last the update."""
    of_whole: tuple[Hashable, ...]
    """As `kinds`, of the whole step."""
    share: float
    """The part of the rank's stages that have an action in the excerpt: the update has no gradients of the others."""

    @property
    def cases(self) -> list[dict[str, Any]]:
        """What `dry_run` is told in each of the runs, beside what all of them have."""
        left_out = [self.cut.of_shorter, self.cut.of_longer] if self.cut else [()]
        return [{"schedule": self.schedule, "left_out": each, "heights": ActionMemory()} for each in left_out]


def fold(layout: Layout, batch: Batch) -> Batch:
    """The batch with no more microbatches than show all that happens: [Note: folding]."""
    m = layout.num_microbatches(batch)
    enough = find_schedule(layout.schedule).shorten(layout.pp, layout.virtual_stages, m)
    return replace(batch, global_batch=enough * layout.micro_batch * layout.dp)


def find_excerpt(model: ModelShape, batch: Batch, layout: Layout, rank: int, *, leaves_out: bool = True) -> Excerpt:
    """A few actions of a step of `rank` of all kinds that it has, and of no other; or all, and fewer blocks alone."""
    pp_rank, placement = coordinate(rank, layout)[PP], layout.placement
    schedule = make_schedule(layout, fold(layout, batch))
    stages = _find_alike(model, batch, layout, pp_rank)
    own = placement.stages_of(pp_rank)
    is_linked = any(stage + 1 in own for stage in own)  # one hands on to the next, and both do a microbatch or neither

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
    return Excerpt(
        replace(schedule, ranks=tuple(ranks)),
        find_cut(model, batch, layout, rank),
        tuple(_list_kinds(actions, layout, stages)),
        of_whole,
        len({action.stage for action in actions}) / len(own),
    )


def put_together(excerpt: Excerpt, runs: Sequence[ActionMemory]) -> int | None:
    """The peak of the whole step; None where all of its actions have to be run: see the note above."""
    few, more, times = runs[0].actions, runs[-1].actions, excerpt.cut.times if excerpt.cut else 0
    executed = [add_blocks(*both, times) for both in zip(few, more, strict=True)]
    *actions, update = executed
    if len(excerpt.kinds) < len(excerpt.of_whole):
        added = dict(zip(excerpt.kinds, executed, strict=True))
        if any(added[kind] != each for kind, each in zip(excerpt.kinds, executed, strict=True)):
            return None
        *actions, update = [added[kind] for kind in excerpt.of_whole]
    start = few[0].before_bytes + times * (more[0].before_bytes - few[0].before_bytes)
    *before, last = accumulate((each.left for each in actions), initial=start)
    highest = max(held + each.fullest for held, each in zip(before, actions, strict=True))
    updated = last + update.fullest
    if excerpt.share < 1 and last + update.fullest / excerpt.share >= highest:
        return None
    return max(highest, updated)


def _find_alike(model: ModelShape, batch: Batch, layout: Layout, pp_rank: int) -> list[Hashable]:
    """For each stage of a rank what it has in common with those that do the same."""
    recompute = Recompute.parse(layout.recompute)

    def find_class(stage: StageSlice) -> Hashable:
        return StageClass.of(stage, recompute, model.num_first), stage.layers.start % max(1, recompute.every)

    return [find_class(stage) for stage in layout.placement.take(partition(layer_costs(model, batch), layout), pp_rank)]


def _list_kinds(actions: Sequence[Action], layout: Layout, stages: Sequence[Hashable]) -> Iterator[Hashable]:
    """What each action of a rank is like, and last the update; `stages` says which of the rank's are alike."""
    placement, num_sent, has_reduced = layout.placement, Counter[int](), False
    works = [action for action in actions if action.kind in COMPUTE]
    steps = follow_steps(works, placement, offloads=layout.offloads_activations)
    for action in actions:
        stage = stages[placement.chunk_of(action.stage)]
        if action.kind in COMPUTE:
            _, step, _ = next(steps)
            before = step.reduced and (stages[step.reduced.chunk], *step.reduced[1:])
            # A stage's first forward lets go of what another's backward has left.
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
) -> list[tuple[int, int]]:  # fmt: skip
    """What is left when as many as can be have gone, many neighbours at a time first (delta debugging)."""
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
