"""Parts of a layout and of its stages: all that a result reads which many layouts share.

[Note: results that are remembered]
Many layouts have the same blocks, stages and states, so `Estimator` and `planner.peaks` compute those once. What they
remember is a function of nothing but its arguments (`functools.cache`), and these arguments are the whole key: a
function that is written for a `Layout` gets the part of it that is named here, with the same attributes and no others.
A formula that begins to read more fails at once, naming what its part lacks, and no result can depend on something that
is not in its key. tests/planner/test_remembered.py holds that every field of every part matters.
"""

from operator import attrgetter
from typing import Any, NamedTuple, TypeVar

from dtlayout.pipelining.partition import StageSlice
from dtlayout.schedules.placement import Placement
from dtlayout.schedules.schedules import find_schedule
from dtlayout.spec.layout import Layout
from dtlayout.spec.recompute import Recompute


class BlockLayout(NamedTuple):
    """The part of a layout on which one microbatch's time in a block and in the head depends."""

    tp: int
    cp: int
    cp_method: str
    ep: int
    micro_batch: int
    shards_sequence: bool
    overlaps_tp: bool
    overlaps_ep: bool
    sends_tokens_once: bool
    world_size: int


class ComputeLayout(NamedTuple):
    """The part of a layout on which one microbatch's time in a block depends where nothing is sent."""

    tp: int
    cp: int
    ep: int
    micro_batch: int
    shards_sequence: bool


class TensorLayout(NamedTuple):
    """The part of a layout on which the time of tp's collectives in a block depends, for one microbatch."""

    tp: int
    cp: int
    micro_batch: int
    shards_sequence: bool
    overlaps_tp: bool


class StageLayout(NamedTuple):
    """The part of a layout on which one microbatch's time in a stage and the bytes that it holds there depend."""

    tp: int
    cp: int
    cp_method: str
    ep: int
    micro_batch: int
    shards_sequence: bool
    overlaps_tp: bool
    overlaps_ep: bool
    sends_tokens_once: bool
    is_pipelined: bool
    world_size: int
    recompute: str
    offloads_activations: bool


class CutLayout(NamedTuple):
    """The part of a layout on which the cut into stages depends."""

    num_stages: int
    stage_layers: tuple[int, ...]


class PipelineLayout(NamedTuple):
    """The part of a layout on which its stages and, with their number, the microbatches in flight depend."""

    pp: int
    schedule: str
    virtual_stages: int
    stage_layers: tuple[int, ...]
    recomputed: tuple[int, int]
    """`every` and `number` of its Recompute: blocks of each period, and how many of them are computed again."""

    @classmethod
    def of(cls, layout: Layout) -> "PipelineLayout":
        """The part of a layout."""
        period = cls.find_period(layout.recompute)
        return cls(layout.pp, layout.schedule, layout.virtual_stages, layout.stage_layers, period)

    @staticmethod
    def find_period(recompute: str) -> tuple[int, int]:
        """The value of `recomputed` for a `layout.recompute`."""
        parsed = Recompute.parse(recompute)
        return parsed.every, parsed.number

    @property
    def num_stages(self) -> int:
        """Pieces that the model is cut into."""
        return self.pp * self.virtual_stages

    @property
    def placement(self) -> Placement:
        """Stages that each pipeline rank holds."""
        return find_schedule(self.schedule).place(self.pp, self.virtual_stages)

    def shorten(self, m: int) -> int:
        """`PipelineSchedule.shorten`: microbatches of the shortest step that holds as much as one of m."""
        return find_schedule(self.schedule).shorten(self.pp, self.virtual_stages, m)


class StateLayout(NamedTuple):
    """The part of a layout on which, with the number of parameters, the bytes of their whole state depend."""

    pp: int
    dp: int
    dp_shard: int
    cp: int
    tp: int
    ep: int
    zero: int
    state_place: str

    @property
    def offloads_state(self) -> bool:
        """`Layout.offloads_state`."""
        return self.state_place != "device"

    @property
    def has_state_on_disk(self) -> bool:
        """`Layout.has_state_on_disk`."""
        return self.state_place == "disk"


class StageClass(NamedTuple):
    """All of a stage that its work and its parameters depend on: stages of one class are alike."""

    num_layers: int
    """Blocks of the stage."""
    num_recomputed: int
    """Blocks that are computed again."""
    embedding: bool
    """Whether it turns tokens into vectors."""
    head: bool
    """Whether it holds the final norm, the head and the loss."""
    first: int = 0
    """Index of its first block, but at most the number of a model's first blocks that differ from the others."""

    phase: int = 0
    """Place of its first block among the blocks of a period, where several of each are recomputed."""

    @classmethod
    def of(cls, stage: StageSlice, recompute: Recompute, num_first: int = 0) -> "StageClass":
        """The class of a stage of a model whose first blocks, so many, differ from the others."""
        first = min(stage.layers.start, num_first)
        phase = stage.layers.start % recompute.every if recompute.number > 1 else 0
        return cls(len(stage.layers), recompute.count(stage.layers), stage.embedding, stage.head, first, phase)

    @property
    def example(self) -> StageSlice:
        """A stage with as many blocks of each kind and the same ends."""
        return StageSlice(range(self.first, self.first + self.num_layers), self.embedding, self.head)


P = TypeVar("P", BlockLayout, ComputeLayout, TensorLayout, StageLayout, CutLayout, StateLayout)
_READ = {part: attrgetter(*part._fields) for part in P.__constraints__}


def key_of(layout: Any, part: type[P]) -> P:
    """The part of a layout, or of another part that has all of its attributes."""
    return tuple.__new__(part, _READ[part](layout))  # as part._make does, in half of its time
