"""Timeline: the times at which each pipeline rank works on each action, predicted or recorded in a run. Pure Python."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, NamedTuple

from dtlayout.pipelining.timing import Span
from dtlayout.schedules.actions import Action, Kind

_SLOW = 1.25
"""A stage is called slow from this multiple on of the time that the other stages let expect."""
_LEGIBLE = 1 / 3
"""Share of the longest timeline's time. A timeline that is shorter than that is drawn on a scale of its own."""


class Transfer(NamedTuple):
    """Communication of a rank that runs beside its actions."""

    name: str
    """gather (of parameters), reduce (of gradients) or message (from another stage)."""
    start: float
    end: float


class SlowStage(NamedTuple):
    """A stage that takes longer than the others let expect."""

    stage: int
    rank: int
    measured_s: float
    """Seconds of forward and backward of a microbatch, the median over a step."""
    expected_s: float
    """Predicted seconds, times the ratio of measured to predicted seconds of the other stages."""


def find_scales(timelines: Mapping[str, "Timeline"]) -> dict[str, float]:
    """Seconds that a picture's full width stands for: the longest timeline's, if this one stays legible."""
    longest_s = max((timeline.total_s for timeline in timelines.values() if timeline.knows_time), default=0.0)
    return {
        name: longest_s if timeline.knows_time and timeline.total_s >= _LEGIBLE * longest_s else timeline.total_s
        for name, timeline in timelines.items()
    }


@dataclass(frozen=True)
class Timeline:
    """Forwards and backwards of one step of a pipeline; the first one begins at 0 s."""

    spans: Sequence[Sequence[Span]]
    """Actions of each pipeline rank, in their order."""
    transfers: Sequence[Sequence[Transfer]] = ()
    """Transfers of each pipeline rank; empty where they were not recorded."""
    knows_time: bool = True
    """Whether the numbers are seconds; else they are shares of the whole step."""

    @property
    def total_s(self) -> float:
        """Time from the beginning of the first action to the end of the last one."""
        return max(rank[-1].end for rank in self.spans)

    @property
    def waits_s(self) -> list[float]:
        """Idle time of each rank."""
        return [self.total_s - sum(span.end - span.start for span in rank) for rank in self.spans]

    @property
    def bubble(self) -> float:
        """Share of the time in which the busiest rank is idle."""
        return min(self.waits_s) / self.total_s

    def describe(self) -> str:
        """A sentence with the length of the step, where that is known, and its bubble."""
        whole = f"{self.total_s:.3g} s, of which " if self.knows_time else "of it "
        return f"{whole}the busiest rank waits {self.bubble:.1%}"

    def without_time(self) -> "Timeline":
        """A timeline whose times are shares of the whole step."""
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
        """Stages that take much longer than `predicted`, measured by the other stages; the slowest first.

        `predicted` has the same order of actions. Slowness that all stages share is no stage's fault, so each stage is
        measured by the median of the stages on other ranks.
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
        """Actions of each rank as JSON has them: [name, start, end]."""
        return [[[str(span.action), span.start, span.end] for span in rank] for rank in self.spans]

    @classmethod
    def of_rows(
        cls, rows: Sequence[Sequence[Sequence[Any]]], transfers: Sequence[Sequence[Sequence[Any]]] = ()
    ) -> "Timeline":
        """The timeline that `to_rows` has written, and transfers alike; ValueError or TypeError for anything else.

        Times may start anywhere: the first action is moved to 0.
        """
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
