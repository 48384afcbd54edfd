"""Split: whether tp can split a block, found by running it on fake tensors as one rank of several would.

The same code runs twice: with whole matrices, and with the rows and columns that a rank has. Both runs make the same
calls, and a tensor that is smaller in the second run is split along the dimension that differs. For each call a rule
says whether a rank's part of the result follows from the rank's parts of what it reads. Where the code states a number
of heads, runs with that number divided are tried.
"""

import copy
import inspect
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from itertools import combinations, islice
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from dtlayout.base.errors import InvalidConfig
from dtlayout.base.formatting import first_line
from dtlayout.models.description import Operation
from dtlayout.models.operations import Linear, Norm, SelfAttention
from dtlayout.models.traced import Divided
from dtlayout.tracing.record import BlockRecord, Recorder
from dtlayout.tracing.refit import divide, find_values, list_numbers, refit_linears
from dtlayout.tracing.shell import Stub, cut_heads, replace
from dtlayout.tracing.split_rules import Comparison

_MOST_TRIES = 100
_FAILS = "its code does not run with a part of its heads"
_OTHER = 999983
"""A number that is no size of anything."""


class Split(NamedTuple):
    """How tp splits a block."""

    divided: Divided = Divided()
    """Numbers and arguments of its code that are divided."""
    problem: str = ""
    """The reason why tp cannot split it; empty if it can."""


class Rehearsal:
    """Runs copies of a block on the fake tensors that it was given in its model."""

    def __init__(
        self, block: nn.Module, operations: Sequence[Operation], inputs: tuple[tuple[Any, ...], dict[str, Any]],
        recorder: Recorder, attending: Callable[[Recorder], AbstractContextManager[None]],
    ):  # fmt: skip
        """`inputs` are the block's arguments by place and by name, in the run that `recorder` has recorded; calls of
        attention are recorded inside of `attending`."""
        assert recorder.fake is not None, "the model has run"
        self.block, self.operations, self.attending = block, operations, attending
        self.num_tokens, self.fake = recorder.num_tokens, recorder.fake
        names = inspect.signature(inspect.unwrap(type(block).forward)).parameters
        self.inputs = {**dict(zip([*names][1:], inputs[0], strict=False)), **inputs[1]}

    def list_arguments(self, num_heads: int) -> list[str]:
        """Names of the tensors that the block is given beside hidden states, with a part for each head."""
        return [
            name for name, each in [*self.inputs.items()][1:]
            if isinstance(each, Tensor) and num_heads in each.shape[:2]
        ]  # fmt: skip

    def record(self, parts: int = 1, divided: Divided = Divided(), changed: str = "") -> BlockRecord:  # noqa: B008
        """The calls of a copy that is one of `parts` ranks, with another value of the number `changed`.

        InvalidConfig if it fails.
        """
        recorder, named = Recorder(), dict(self.inputs)
        with self.fake, torch.no_grad():
            block = self._copy()
            refit_linears(block, self.operations)
            for each in self.operations:
                if isinstance(each, Norm) and each.over_ranks:
                    replace(block, each.module, Stub(lambda x: x * 1))
                if isinstance(each, Linear) and parts > 1:
                    _keep_part(block.get_submodule(each.module), each, parts)
            if changed:
                values, name = find_values(block, changed)
                values[name] = _OTHER
            divide(block, divided.numbers, parts)
            for name in divided.arguments:
                named[name] = cut_heads(named[name], self.num_heads, parts, 0, 1)
        recorder.watch([block])
        recorder.num_tokens = self.num_tokens
        try:
            with self.fake, torch.no_grad(), self.attending(recorder), recorder:
                block(**named)
        except Exception as error:  # whatever a model's own code raises
            raise InvalidConfig(first_line(error)) from None
        return recorder.blocks[0]

    def _copy(self) -> nn.Module:
        """A copy of the block with new tensors: copies of fake ones crash now and then."""
        memo: dict[int, Any] = {}
        for parameter in self.block.parameters():
            memo[id(parameter)] = nn.Parameter(torch.empty(parameter.shape, dtype=parameter.dtype))
        for buffer in self.block.buffers():
            memo[id(buffer)] = torch.empty(buffer.shape, dtype=buffer.dtype)
        return copy.deepcopy(self.block, memo)

    @property
    def num_heads(self) -> int:
        """Query heads of the whole block."""
        return next(each.num_heads for each in self.operations if isinstance(each, SelfAttention))

    def reads(self, number: str, whole: BlockRecord) -> bool:
        """True if what the block computes depends on a number; `whole` is its record with the number as it is."""
        try:
            other = self.record(changed=number)
        except InvalidConfig:
            return True
        calls = [
            [(each.function, each.numbers, [one.shapes[made] for made in each.makes]) for each in one.calls]
            for one in (whole, other)
        ]
        return calls[0] != calls[1]


def _keep_part(layer: nn.Module, linear: Linear, parts: int) -> None:
    """Leave a linear layer the rows or columns of one of `parts` ranks."""
    if linear.style == "replicated":
        return
    dim = 0 if linear.style == "colwise" else 1
    for name in ("weight", "bias") if dim == 0 else ("weight",):
        own = getattr(layer, name)
        if own is not None:
            setattr(layer, name, nn.Parameter(own.narrow(dim, 0, own.shape[dim] // parts)))


def find_split(rehearsal: Rehearsal) -> Split:
    """How tp splits a block, or why it cannot; nothing is tried where no number of ranks divides its sizes."""
    linears = [each for each in rehearsal.operations if isinstance(each, Linear)]
    attention = next(each for each in rehearsal.operations if isinstance(each, SelfAttention))
    sizes = {attention.num_heads, attention.num_kv_heads} | {
        each.outputs if each.style == "colwise" else each.inputs for each in linears if each.is_split
    }
    together = math.gcd(*sizes)
    if together == 1:
        return Split()
    fewest = next(each for each in range(2, together + 1) if together % each == 0)
    whole = rehearsal.record()
    joined = frozenset(each.part_of for each in linears if each.part_of not in ("", each.module))

    def find_problem(divided: Divided) -> str:
        """The first problem of the fewest ranks, and of the most."""
        for parts in dict.fromkeys((fewest, together)):
            try:
                local = rehearsal.record(parts, divided)
            except InvalidConfig as error:
                return f"{_FAILS}: {error}"
            if problem := Comparison(whole, local, parts, joined).find_problem():
                return problem
        return ""

    said = find_problem(Divided())
    if not said:
        return Split()
    numbers = list_numbers(rehearsal.block, sizes | {each.rows for each in linears} - {0, 1})
    read = [name for name in numbers if rehearsal.reads(name, whole)]
    tries = _list_counts(read, rehearsal.list_arguments(attention.num_heads))
    for divided in islice(tries, _MOST_TRIES):
        problem = find_problem(divided)
        if not problem:
            return Split(divided)
        if said.startswith(_FAILS) and not problem.startswith(_FAILS):  # it got further
            said = problem
    return Split(problem=said)


def _list_counts(numbers: Sequence[str], arguments: Sequence[str]) -> Iterator[Divided]:
    """Choices of what is changed, small ones first."""
    each = [*((name, True) for name in numbers), *((name, False) for name in arguments)]
    for size in range(1, len(each) + 1):
        for chosen in combinations(each, size):
            yield Divided(
                tuple(name for name, is_number in chosen if is_number),
                tuple(name for name, is_number in chosen if not is_number),
            )
