"""Timeline: when each pipeline rank works on what, as it is predicted or as a run has recorded it. Pure Python."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, NamedTuple

from dtlayout.pipelining.timing import Span
from dtlayout.schedules.actions import Action, Kind

_SLOW = 1.25
"""Times as long as the other stages let expect, from which on a stage is called slow."""
_LEGIBLE = 1 / 3
"""Of the longest timeline's time, from which on a shorter one is drawn on the same scale."""


class Transfer(NamedTuple):
    """What comes to a rank or goes through it beside its actions."""

    name: str
    """gather, of parameters, or reduce, of gradients, or message, from another stage."""
    start: float
    end: float


class SlowStage(NamedTuple):
    """A stage that takes longer than the others let expect."""

    stage: int
    rank: int
    measured_s: float
    """Forward and backward of a microbatch, the median of a step."""
    expected_s: float
    """The prediction, times what the other stages took of theirs."""


def find_scales(timelines: Mapping[str, "Timeline"]) -> dict[str, float]:
    """Seconds that the width of each picture stands for: the longest's for all on which something can be seen."""
    longest_s = max((timeline.total_s for timeline in timelines.values() if timeline.knows_time), default=0.0)
    return {
        name: longest_s if timeline.knows_time and timeline.total_s >= _LEGIBLE * longest_s else timeline.total_s
        for name, timeline in timelines.items()
    }


@dataclass(frozen=True)
class Timeline:
    """One step's forwards and backwards of a pipeline; its first one begins at 0 s."""

    spans: Sequence[Sequence[Span]]
    """Of each pipeline rank, in their order."""
    transfers: Sequence[Sequence[Transfer]] = ()
    """Of each pipeline rank, where they were recorded."""
    knows_time: bool = True
    """Whether its numbers are seconds; else they are shares of the whole."""

    @property
    def total_s(self) -> float:
        """From the beginning of the first action to the end of the last one."""
        return max(rank[-1].end for rank in self.spans)

    @property
    def waits_s(self) -> list[float]:
        """How long each rank does nothing of them."""
        return [self.total_s - sum(span.end - span.start for span in rank) for rank in self.spans]

    @property
    def bubble(self) -> float:
        """The share of the time in which the busiest rank waits."""
        return min(self.waits_s) / self.total_s

    def describe(self) -> str:
        """How long it is, where that is known, and its bubble."""
        whole = f"{self.total_s:.3g} s, of which " if self.knows_time else "of it "
        return f"{whole}the busiest rank waits {self.bubble:.1%}"

    def without_time(self) -> "Timeline":
        """The same timeline with shares of the whole in the place of seconds."""
        whole = self.total_s
        spans = [
            [each._replace(start=each.start / whole, end=each.end / whole) for each in rank] for rank in self.spans
        ]
        return Timeline(spans, knows_time=False)

    def stage_s(self) -> dict[int, float]:
        """Seconds of a microbatch on each stage: the median of its forwards and of each part of its backwards."""
        taken = defaultdict[tuple[int, Kind], list[float]](list)
        for span in (span for rank in self.spans for span in rank):
            taken[span.action.stage, span.action.kind].append(span.end - span.start)
        found = defaultdict[int, float](float)
        for (stage, _), seconds in sorted(taken.items(), key=lambda each: each[0][0]):
            found[stage] += median(seconds)
        return dict(found)

    def find_slow_stages(self, predicted: "Timeline") -> list[SlowStage]:
        """Stages that take much longer than `predicted` of the same order, measured by the others; the slowest first.

        What is wrong with all stages alike is no stage's fault, so each one's measure is the median of the others.
        """
        expected, measured = predicted.stage_s(), self.stage_s()
        shares = {stage: seconds / expected[stage] for stage, seconds in measured.items()}
        rank_of = {span.action.stage: span.rank for rank in self.spans for span in rank}
        slow = []
        for stage, share in shares.items():
            others = [each for other, each in shares.items() if rank_of[other] != rank_of[stage]]
            if others and share > _SLOW * median(others):
                slow.append(SlowStage(stage, rank_of[stage], measured[stage], median(others) * expected[stage]))
        return sorted(slow, key=lambda each: each.expected_s / each.measured_s)

    def to_rows(self) -> list[list[list[Any]]]:
        """As JSON has it: for each rank its actions as [name, start, end]."""
        return [[[str(span.action), span.start, span.end] for span in rank] for rank in self.spans]

    @classmethod
    def of_rows(
        cls, rows: Sequence[Sequence[Sequence[Any]]], transfers: Sequence[Sequence[Sequence[Any]]] = ()
    ) -> "Timeline":
        """What `to_rows` has made, and transfers alike, from any beginning on; ValueError or TypeError for others."""
        spans = [
            [Span(rank, Action.parse(name), float(start), float(end)) for name, start, end in row]
            for rank, row in enumerate(rows)
        ]
        if not spans or not all(spans):
            raise ValueError("each rank has actions")
        first = min(rank[0].start for rank in spans)
        return cls(
            [[span._replace(start=span.start - first, end=span.end - first) for span in rank] for rank in spans],
            tuple([Transfer(str(name), start - first, end - first) for name, start, end in row] for row in transfers),
        )
