"""What an action of a rank holds, from two dry runs of stages with fewer blocks. No torch.

[Note: blocks that are alike]
A model's blocks are alike, so that between the first and the last few of a stage each one finds what the one before it
found, and leaves the same behind: what is held at one moment of an action grows by the same bytes with each further
block in the stage. The fullest moment does not: another one may become it. So two stages, one with a block more than
the other, give bytes and growth of each moment, and the highest of what the moments come to is the fullest. Moments of
blocks in the middle lie between those of the blocks at both ends. Blocks that are recomputed one in N repeat by N.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import NamedTuple

from dtlayout.dryrun.report import Place
from dtlayout.measure.ledger import Ledger
from dtlayout.mesh.axes import PP, coordinate
from dtlayout.pipelining.partition import layer_costs, partition
from dtlayout.spec.batch import Batch
from dtlayout.spec.layout import Layout
from dtlayout.spec.model_shape import ModelShape
from dtlayout.spec.recompute import Recompute


class Held:
    """What a rank held while it executed an action, beside what was there before."""

    def __init__(self, before_bytes: int) -> None:
        self.before_bytes = before_bytes
        """What was there before."""
        self.fullest_bytes = self.left_bytes = 0
        """The most, also between operators, and when it was over."""
        self.moments = defaultdict[tuple[str, bool, str], list[int]](list)
        """The module, whether it is recomputed, and the operator → bytes, each time that it runs there."""


class ActionMemory:
    """What a rank held in each action of a step, and last in its update."""

    def __init__(self) -> None:
        self.actions: list[Held] = []

    def begin(self, ledger: Ledger) -> None:
        """An action begins, at which the ledger is marked."""
        self.actions.append(Held(ledger.total_bytes))

    def finish(self, ledger: Ledger) -> None:
        """The step is over."""
        ends = [*(held.before_bytes for held in self.actions[1:]), ledger.total_bytes]
        for held, highest, end in zip(self.actions, ledger.highest_by_mark, ends, strict=True):
            held.fullest_bytes, held.left_bytes = highest.nbytes - held.before_bytes, end - held.before_bytes

    def note(self, place: Place, operator: str, ledger: Ledger) -> None:
        """What is held now that an operator has run."""
        for held in self.actions[-1:]:
            moment = place.module, place.is_again, operator
            held.moments[moment].append(ledger.total_bytes - held.before_bytes)


class ShortenedStages(NamedTuple):
    """Which blocks two shorter stages leave out."""

    of_shorter: Sequence[int]
    of_longer: Sequence[int]
    """Fewer by one repetition in each stage of the rank."""
    times: int
    """Repetitions that the shorter one leaves out."""


def find_cut(model: ModelShape, batch: Batch, layout: Layout, rank: int) -> ShortenedStages | None:
    """What to leave out of the stages of `rank`; None where two shorter runs are no less work than the whole one."""
    if len(model.kinds(range(model.num_layers))) > 1:
        return None
    slices = partition(layer_costs(model, batch), layout)
    chunks = [slices[stage].layers for stage in layout.placement.stages_of(coordinate(rank, layout)[PP])]
    period = max(1, Recompute.parse(layout.recompute).every)
    ends = period + 1  # one that is not like the others, next to what is no block, and one repetition
    times = (min(map(len, chunks)) - 2 * ends) // period
    whole, repetition = sum(map(len, chunks)), len(chunks) * period
    if 2 * (whole - times * repetition) + repetition >= whole:
        return None

    def leave_out(count: int) -> Sequence[int]:
        starts = (chunk.start + ends for chunk in chunks)
        return tuple(chain.from_iterable(range(start, start + count * period) for start in starts))

    return ShortenedStages(leave_out(times), leave_out(times - 1), times)


class Added(NamedTuple):
    """Bytes relative to those held before an action."""

    fullest: int
    """At its fullest."""
    left: int
    """When it is over."""


def add_blocks(shorter: Held, longer: Held, times: int) -> Added:
    """An action with `times` repetitions more than in `shorter`, of which `longer` has one: see the note above."""
    pairs = chain([(shorter.fullest_bytes, longer.fullest_bytes)], _align(shorter, longer))
    return Added(
        fullest=max(_extend(few, more, times) for few, more in pairs),
        left=_extend(shorter.left_bytes, longer.left_bytes, times),
    )


def _extend(few: int, more: int, times: int) -> int:
    return few + times * (more - few)


def _align(shorter: Held, longer: Held) -> Iterator[tuple[int, int]]:
    """The same moment in both; what runs once for each parameter counts where it is highest."""
    for key, few in shorter.moments.items():
        more = longer.moments[key]
        yield from zip(few, more, strict=True) if len(few) == len(more) else [(max(few), max(more))]
