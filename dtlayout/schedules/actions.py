"""Actions: the steps of a pipeline rank one after the other, with the input and the result of each. No torch.

A forward of stage s makes its hidden states, which stage s + 1 takes. A backward makes the gradient of the stage's
input, which stage s - 1 takes. A backward may be split in two (zero bubble, arXiv:2401.10241). The part for the input
comes as early as it can. Nobody waits for the part for the weights, so it fills time that would be idle.
"""

import re
from enum import Enum
from typing import NamedTuple


class Kind(Enum):
    """Kind of an action, which has one stage and one microbatch; the letters are torch's."""

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
"""Kinds after which a stage keeps at most the tensors from which the gradients of its weights are made."""


_WRITTEN = re.compile(r"(\d+)(F|B|I|W)(\d+)")


class Action(NamedTuple):
    """One action of a rank. A message names the stage that sends or receives it."""

    kind: Kind
    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind.value}{self.microbatch}"

    @classmethod
    def parse(cls, text: str) -> "Action":
        """The forward or backward that `text` writes; ValueError for anything else.

        >>> Action.parse("3F0")
        Action(kind=<Kind.FORWARD: 'F'>, stage=3, microbatch=0)
        """
        found = _WRITTEN.fullmatch(text)
        if found is None:
            raise ValueError(f"{text!r} is no action such as 0F0, 0B0, 0I0 or 0W0")
        return cls(Kind(found[2]), int(found[1]), int(found[3]))

    def describe(self) -> str:
        """The action in words, such as "forward of stage 3, microbatch 0"."""
        return f"{self.kind.name.lower().replace('_', ' ')} of stage {self.stage}, microbatch {self.microbatch}"


class Result(NamedTuple):
    """Tensor that one stage makes of a microbatch for another stage."""

    is_gradient: bool
    """True for the gradient of the stage's input; False for its hidden states, or for the loss."""
    stage: int
    microbatch: int


def result_of(action: Action) -> Result | None:
    """The result of a forward or backward; None for gradients of weights, for which no action waits."""
    if action.kind is Kind.BACKWARD_WEIGHT:
        return None
    return Result(action.kind is not Kind.FORWARD, action.stage, action.microbatch)


def input_of(action: Action, num_stages: int) -> Result | None:
    """The result that a forward or backward waits for, mostly of a neighbour; None for the first stage's forward.

    The last stage's backward waits for its own forward, and gradients of weights wait for the gradient of the input.
    """
    kind, stage, microbatch = action.kind, action.stage, action.microbatch
    if kind is Kind.FORWARD:
        return Result(False, stage - 1, microbatch) if stage else None
    if kind is Kind.BACKWARD_WEIGHT:
        return Result(True, stage, microbatch)
    is_last = stage == num_stages - 1
    return Result(False, stage, microbatch) if is_last else Result(True, stage + 1, microbatch)
