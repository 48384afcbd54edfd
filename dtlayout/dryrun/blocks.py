"""Memory of each action of a rank, from two dry runs of stages with fewer blocks. No torch.

[Note: blocks that are alike]
The blocks of a model are alike. Between the first and the last few blocks of a stage, each block finds what the one
before it found, and leaves the same behind. So the bytes that are held at one moment of an action grow by the same
number with each further block of the stage. The fullest moment itself does not grow so: another moment may become the
fullest. Therefore two stages are run, and the longer has one block more than the shorter. They give the bytes and the
growth of each moment, and the fullest moment of the whole stage is the highest sum. Moments of blocks in the middle lie
between those of the blocks at both ends. Where one block in N is recomputed, N blocks are one repetition.
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
    """Bytes that a rank held while it executed one action, relative to those held before it."""

    def __init__(self, before_bytes: int) -> None:
        self.before_bytes = before_bytes
        """Bytes held when the action began."""
        self.fullest_bytes = self.left_bytes = 0
        """Most bytes held during the action, also between operators; and bytes held when it was over."""
        self.moments = defaultdict[tuple[str, bool, str], list[int]](list)
        """(module, whether it is recomputed, operator) → bytes after each run of the operator there."""


class ActionMemory:
    """Memory of each action of a rank's step, in order; the last entry is the optimizer's update."""

    def __init__(self) -> None:
        self.actions: list[Held] = []

    def begin(self, ledger: Ledger) -> None:
        """Start the record of an action; the ledger gets its mark for the action at the same time."""
        self.actions.append(Held(ledger.total_bytes))

    def finish(self, ledger: Ledger) -> None:
        """Fill in what each action held, once the step is over."""
        ends = [*(held.before_bytes for held in self.actions[1:]), ledger.total_bytes]
        for held, highest, end in zip(self.actions, ledger.highest_by_mark, ends, strict=True):
            held.fullest_bytes, held.left_bytes = highest.nbytes - held.before_bytes, end - held.before_bytes

    def note(self, place: Place, operator: str, ledger: Ledger) -> None:
        """Note the bytes that are held now, after an operator has run."""
        for held in self.actions[-1:]:
            moment = place.module, place.is_again, operator
            held.moments[moment].append(ledger.total_bytes - held.before_bytes)


class ShortenedStages(NamedTuple):
    """Blocks that each of two dry runs with shorter stages leaves out."""

    of_shorter: Sequence[int]
    of_longer: Sequence[int]
    """Blocks left out of the longer stages: fewer by one repetition in each stage of the rank."""
    times: int
    """Repetitions that each of the shorter stages leaves out."""


def shorten_stages(model: ModelShape, batch: Batch, layout: Layout, rank: int) -> ShortenedStages | None:
    """Blocks to leave out of the stages of `rank`; None where two shorter runs are no less work than one whole run."""
    if len(model.kinds(range(model.num_layers))) > 1:
        return None
    slices = partition(layer_costs(model, batch), layout)
    chunks = [slices[stage].layers for stage in layout.placement.stages_of(coordinate(rank, layout)[PP])]
    period = max(1, Recompute.parse(layout.recompute).every)
    ends = period + 1  # a block at the stage's edge, unlike the others, and one repetition
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
    """Most bytes held during the action."""
    left: int
    """Bytes held when the action is over."""


def add_blocks(shorter: Held, longer: Held, times: int) -> Added:
    """Memory of an action whose stages have `times` repetitions more than those of `shorter`.

    `longer` has one repetition more than `shorter`, see [Note: blocks that are alike].
    """
    pairs = chain([(shorter.fullest_bytes, longer.fullest_bytes)], _align(shorter, longer))
    return Added(
        fullest=max(_extend(few, more, times) for few, more in pairs),
        left=_extend(shorter.left_bytes, longer.left_bytes, times),
    )


def _extend(few: int, more: int, times: int) -> int:
    return few + times * (more - few)


def _align(shorter: Held, longer: Held) -> Iterator[tuple[int, int]]:
    """Bytes of the same moment in both runs; an operator that runs once for each parameter counts at its highest."""
    for key, few in shorter.moments.items():
        more = longer.moments[key]
        yield from zip(few, more, strict=True) if len(few) == len(more) else [(max(few), max(more))]
