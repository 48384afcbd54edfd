"""The curve of memory over steps: the largest total while each action of the schedule was executed. No torch."""

from dataclasses import dataclass

UPDATE = "update"
"""The part of a step after its last action: norm, clipping and optimizer."""


@dataclass(frozen=True)
class Highest:
    """The largest total while an action was executed."""

    action: str
    """The action as a schedule prints it, such as 3F0; UPDATE after the last."""

    nbytes: int
