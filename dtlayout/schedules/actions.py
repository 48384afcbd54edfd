"""Actions: what a pipeline rank does one after the other, what each needs and what it makes. Whole numbers, no torch.

A forward of stage s makes its hidden states, which stage s + 1 takes; a backward makes the gradient of the stage's
input, which stage s - 1 takes. A backward may be split in two (zero bubble, arXiv:2401.10241): the part of the input
comes as early as it can, the part of the weights, for which nobody waits, fills what would be idle.
"""

import re
from enum import Enum
from typing import NamedTuple


class Kind(Enum):
    """What an action does, for one stage and one microbatch; the letters are torch's."""

    FORWARD = "F"
    BACKWARD = "B"
    BACKWARD_INPUT = "I"
    BACKWARD_WEIGHT = "W"
    SEND_FORWARD = "SEND_F"
    RECEIVE_FORWARD = "RECV_F"
    SEND_BACKWARD = "SEND_B"
    RECEIVE_BACKWARD = "RECV_B"

    __hash__ = object.__hash__  # there is one of each; Enum hashes the name, by a function in Python


SEND = {False: Kind.SEND_FORWARD, True: Kind.SEND_BACKWARD}
RECEIVE = {False: Kind.RECEIVE_FORWARD, True: Kind.RECEIVE_BACKWARD}
"""Whether a gradient travels → the kind of its sender's or receiver's action."""
COMPUTE = (Kind.FORWARD, Kind.BACKWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT)
RELEASE = (Kind.BACKWARD, Kind.BACKWARD_WEIGHT)
"""Kinds after which a stage needs nothing more of a microbatch."""
PASS_BACK = (Kind.BACKWARD, Kind.BACKWARD_INPUT)
"""Kinds after which it needs at most what gradients of weights are made of."""


_WRITTEN = re.compile(r"(\d+)(F|B|I|W)(\d+)")


class Action(NamedTuple):
    """One thing that a rank does. A message carries the name of the stage that sends or receives it."""

    kind: Kind
    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind.value}{self.microbatch}"

    @classmethod
    def parse(cls, text: str) -> "Action":
        """The forward or backward that is written so; ValueError for anything else.

        >>> Action.parse("3F0")
        Action(kind=<Kind.FORWARD: 'F'>, stage=3, microbatch=0)
        """
        found = _WRITTEN.fullmatch(text)
        if found is None:
            raise ValueError(f"{text!r} is no action such as 0F0, 0B0, 0I0 or 0W0")
        return cls(Kind(found[2]), int(found[1]), int(found[3]))

    def describe(self) -> str:
        """As people read it."""
        return f"{self.kind.name.lower().replace('_', ' ')} of stage {self.stage}, microbatch {self.microbatch}"


class Result(NamedTuple):
    """What one stage makes of a microbatch for another."""

    is_gradient: bool
    """The gradient of the stage's input; else its hidden states, or the loss."""
    stage: int
    microbatch: int


def result_of(action: Action) -> Result | None:
    """What a forward or backward makes; None for gradients of weights, for which no action waits."""
    if action.kind is Kind.BACKWARD_WEIGHT:
        return None
    return Result(action.kind is not Kind.FORWARD, action.stage, action.microbatch)


def input_of(action: Action, num_stages: int) -> Result | None:
    """What a forward or backward waits for: most often its neighbour's result, for the first forward nothing.

    The last stage's backward waits for its own forward, the gradients of weights for that of the input.
    """
    kind, stage, microbatch = action.kind, action.stage, action.microbatch
    if kind is Kind.FORWARD:
        return Result(False, stage - 1, microbatch) if stage else None
    if kind is Kind.BACKWARD_WEIGHT:
        return Result(True, stage, microbatch)
    is_last = stage == num_stages - 1
    return Result(False, stage, microbatch) if is_last else Result(True, stage + 1, microbatch)
