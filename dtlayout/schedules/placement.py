"""Placement: which pipeline rank holds which stage. Whole numbers, no torch.

p ranks hold v virtual stages each, n = p·v in all. A lap is p stages in a row, which lie on p different ranks. The
first lap's stages lie on ranks 0 to p - 1 in that order. So the c-th stage of a rank, its chunk c, belongs to lap c:

    looped    0 1 2 3      V-shaped  0 1 2 3
              4 5 6 7                7 6 5 4
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

from dtlayout.schedules.actions import Result

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Placement(ABC):
    """Maps each stage to its rank and chunk, and back."""

    num_ranks: int
    """Pipeline ranks, p."""
    virtual_stages: int = 1
    """Stages on each rank, v."""

    @property
    def num_stages(self) -> int:
        """All stages, n = p·v."""
        return self.num_ranks * self.virtual_stages

    @abstractmethod
    def rank_of(self, stage: int) -> int:
        """The rank that holds a stage."""

    def stages_of(self, rank: int) -> Sequence[int]:
        """The stages that a rank holds, chunk by chunk."""
        return tuple(stage for stage in range(self.num_stages) if self.rank_of(stage) == rank)

    def chunk_of(self, stage: int) -> int:
        """Index of a stage among the stages of its rank."""
        return stage // self.num_ranks

    def take(self, of_stages: Sequence[T], rank: int) -> tuple[T, ...]:
        """The entries for a rank's stages, from a sequence with one entry for each stage of the model."""
        return tuple([of_stages[stage] for stage in self.stages_of(rank)])

    def receiver_of(self, result: Result) -> int | None:
        """Rank to which a stage's result is sent; None at the pipeline's ends, and if the next stage is here too."""
        stage = result.stage + (-1 if result.is_gradient else 1)
        if not 0 <= stage < self.num_stages:
            return None
        rank = self.rank_of(stage)
        return None if rank == self.rank_of(result.stage) else rank


class Looped(Placement):
    """Stages of each lap lie in the order of the ranks, first to last (arXiv:2104.04473, sec. 2.2)."""

    __slots__ = ()

    def rank_of(self, stage: int) -> int:
        """The rank that holds a stage: ranks take turns."""
        return stage % self.num_ranks

    def stages_of(self, rank: int) -> range:
        """The stages of a rank: every p-th."""
        return range(rank, self.num_stages, self.num_ranks)


class VShaped(Placement):
    """Laps go down the ranks and up again (arXiv:2401.10241, sec. 6): both ends lie on rank 0 at v = 2."""

    __slots__ = ()

    def rank_of(self, stage: int) -> int:
        """The rank that holds a stage: even laps go down the ranks, odd laps go up."""
        lap, place = divmod(stage, self.num_ranks)
        return self.num_ranks - 1 - place if lap % 2 else place
