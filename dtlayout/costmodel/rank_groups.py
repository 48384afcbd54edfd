"""Groups of pipeline ranks: those with the same stages are alike, but for when a microbatch comes to them."""

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from dtlayout.costmodel.cache_keys import PipelineLayout, StageClass
from dtlayout.pipelining.partition import StageSlice
from dtlayout.schedules.schedules import find_schedule
from dtlayout.spec.recompute import Recompute

Counts = tuple[tuple[StageClass, int], ...]
"""Classes of stages, and how many of each."""


class RankGroup(NamedTuple):
    """Pipeline ranks whose stages are of the same classes."""

    ranks: tuple[int, ...]
    """The ranks, first to last."""
    classes: tuple[StageClass, ...]
    """The class of each of their stages."""
    counts: Counts
    """Different classes with recomputation left out, on which its parameters depend, and how many of each."""
    before: Counts
    """Classes of the first chunks of all ranks before the last of these, and how many of each."""
    recomputes: bool
    """Whether any of its blocks are computed again."""
    has_head: bool
    """Whether it holds the head."""


class Stages(NamedTuple):
    """The stages of a pipeline, and which of its ranks are alike."""

    classes: tuple[StageClass, ...]
    """Stage by stage."""
    kinds: tuple[StageClass, ...]
    """The different classes."""
    groups: tuple[RankGroup, ...]
    """All ranks in groups."""

    def list_fullest(self, schedule: str) -> list[int]:
        """Ranks of which one holds most: of a group the first one warms up longest.

        Of a schedule that nobody looked at that is not known.
        """
        num_looked_at = 1 if find_schedule(schedule).fast else None
        return sorted(rank for group in self.groups for rank in group.ranks[:num_looked_at])


def group_stages(stages: Sequence[StageSlice], pipeline: PipelineLayout, num_first: int = 0) -> Stages:
    """Put the ranks of a pipeline with these stages into groups; `num_first` as in `StageClass.of`."""
    every, number = pipeline.recomputed
    recompute = Recompute(every, number=number)
    classes = tuple([StageClass.of(stage, recompute, num_first) for stage in stages])
    placement, ranks = pipeline.placement, dict[tuple[StageClass, ...], list[int]]()
    for rank in range(pipeline.pp):
        ranks.setdefault(placement.take(classes, rank), []).append(rank)
    groups = []
    for group, members in ranks.items():
        above = classes[: members[-1]]
        before = tuple(Counter(above).items())
        recomputes, has_head = any(c.num_recomputed for c in group), any(c.head for c in group)
        counts = tuple(Counter(c._replace(num_recomputed=0, phase=0) for c in group).items())
        groups.append(RankGroup(tuple(members), group, counts, before, recomputes, has_head))
    return Stages(classes, tuple(dict.fromkeys(classes)), tuple(groups))
