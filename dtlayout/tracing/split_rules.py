"""Rules of a split: whether one rank's part of a call's result follows from its parts of what the call reads.

Two records of the same code are compared, of a whole block and of one rank's part. A tensor that is smaller in the
second is split along the one dimension that differs; the others are whole on every rank.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from dtlayout.tracing.pieces import Range, find_pieces, find_range
from dtlayout.tracing.record import BlockRecord, Call

_BAD = -1
"""Dimension of a tensor that is smaller in another way than along one dimension."""


class SplitSizes(NamedTuple):
    """A tensor in both records."""

    whole: tuple[int, ...]
    """Shape of the tensor in the whole block."""
    dim: int | None
    """The dimension along which ranks have parts of it; None where each has all."""

    @property
    def from_end(self) -> int | None:
        """The dimension, counted from the last, which is 0."""
        return None if self.dim is None else len(self.whole) - 1 - self.dim

    @property
    def outer(self) -> int:
        """Elements of the dimensions before it."""
        return math.prod(self.whole[: self.dim])


Rule = Callable[[Sequence[SplitSizes], Sequence[SplitSizes]], bool]
"""(tensors that a call reads, of which one is split at least; tensors that it makes) → whether ranks can compute it."""


def _reshapes(read: Sequence[SplitSizes], made: Sequence[SplitSizes]) -> bool:
    """The parts begin at the same elements: the split dimension becomes the first of several, or was it."""
    return all(each.dim is not None and each.outer == read[0].outer for each in made)


def _moves(read: Sequence[SplitSizes], made: Sequence[SplitSizes]) -> bool:
    """The split dimension keeps the order of its elements, wherever it goes."""
    return all(each.dim is not None for each in made)


def _cuts(read: Sequence[SplitSizes], made: Sequence[SplitSizes]) -> bool:
    """The split dimension is not the one that is cut."""
    size = read[0].whole[read[0].dim or 0]
    return all(each.dim is not None and each.whole[each.dim] == size for each in made)


def _passes(read: Sequence[SplitSizes], made: Sequence[SplitSizes]) -> bool:
    """Elements at the same place: all that is split is split along the same dimension."""
    dims = {each.from_end for each in (*read, *made) if each.dim is not None}
    return len(dims) == 1 and all(each.dim is not None for each in made)


def _joins(read: Sequence[SplitSizes], made: Sequence[SplitSizes]) -> bool:
    """Tensors are joined along another dimension than the split one."""
    return _passes(read, made) and all(each.dim is not None and _cuts([each], made) for each in read)


def _reduces(read: Sequence[SplitSizes], made: Sequence[SplitSizes]) -> bool:
    """The split dimension is not the one that is reduced."""
    return all(each.dim is not None for each in made)


def _takes_rows(read: Sequence[SplitSizes], made: Sequence[SplitSizes]) -> bool:
    """The split dimension is not the last one, of which all is needed."""
    return _passes(read[:1], made) and read[0].from_end != 0


def _multiplies(read: Sequence[SplitSizes], made: Sequence[SplitSizes]) -> bool:
    """Both factors are split along the same dimension of the batch."""
    return _passes(read, made) and all(each.dim is not None and (each.from_end or 0) >= 2 for each in read)


def _attends(read: Sequence[SplitSizes], made: Sequence[SplitSizes]) -> bool:
    """Queries, keys and values are split by heads, [batch, heads, tokens, width]; a mask may be whole."""
    return all(each.from_end == 2 for each in (*read[:3], made[0]))


def _applies(read: Sequence[SplitSizes], made: Sequence[SplitSizes]) -> bool:
    """A linear layer is split by outputs and reads what is whole, or by inputs, and its result is a term of a sum."""
    entered, weight = read[:2]
    if weight.dim == 0:
        return entered.dim is None and made[0].from_end == 0
    if weight.dim == 1:
        return entered.from_end == 0 and made[0].dim is None
    return entered.from_end not in (0, None) and made[0].from_end == entered.from_end


def _spreads(function: str, read: Sequence[SplitSizes], made: Sequence[SplitSizes]) -> bool:
    """A tensor that each rank has whole is repeated for each of its heads."""
    if function not in ("expand", "expand_as", "broadcast_to") or made[0].from_end is None:
        return False
    whole = read[0].whole
    return made[0].from_end >= len(whole) or whole[-1 - made[0].from_end] == 1


_FILLS = {
    "zeros",
    "ones",
    "empty",
    "full",
    "zeros_like",
    "ones_like",
    "empty_like",
    "full_like",
    "new_zeros",
    "new_ones",
    "new_empty",
    "new_full",
}
"""Functions whose results have one value everywhere, or are not filled yet."""
_OF_SIZES = _FILLS | {"expand", "broadcast_to"}
"""Functions that are told the sizes of their results, beside those of views and cuts."""
_FUNCTIONS: Mapping[Rule, str] = {
    _reshapes: "view reshape unflatten flatten view_as reshape_as",
    _moves: "transpose permute unsqueeze squeeze expand expand_as broadcast_to contiguous t "
    "swapaxes movedim stack clone detach repeat_interleave",
    _cuts: "split chunk getitem get narrow select unbind tensor_split split_with_sizes",
    _passes: "add iadd radd sub isub rsub mul imul rmul div truediv itruediv rtruediv neg pow rpow square sqrt rsqrt "
    "exp cos sin tanh sigmoid silu gelu relu relu6 leaky_relu elu softplus mish hardtanh clamp clip abs maximum "
    "minimum where masked_fill to float type type_as half bfloat16 dropout empty_like zeros_like ones_like "
    "new_zeros new_empty new_full copy setitem "
    "eq ne lt le gt ge logical_and logical_or logical_not and or invert erf log",
    _joins: "cat",
    _reduces: "mean sum var max min amax amin norm logsumexp",
    _takes_rows: "softmax log_softmax layer_norm rms_norm",
    _multiplies: "matmul bmm baddbmm rmatmul",
    _attends: "scaled_dot_product_attention",
    _applies: "linear",
}
RULES: Mapping[str, Rule] = {name: rule for rule, names in _FUNCTIONS.items() for name in names.split()}
"""Function of torch → its rule."""


class Comparison:
    """The records of a whole block and of one rank's part of it."""

    def __init__(self, whole: BlockRecord, local: BlockRecord, parts: int, joined: frozenset[str]):
        """`joined` are the modules that join what several linear layers make."""
        self.whole, self.local, self.parts, self.joined = whole, local, parts, joined
        self.same = {whole.enters: local.enters}
        """Tensor of the whole block → the tensor of the rank that is its part, or all of it."""
        self.results: dict[int, tuple[int, tuple[Range, ...]]] = {}
        """Tensor of the whole block that shows several pieces of a joined result → that result, and all its pieces."""

    def find_problem(self) -> str:
        """The first reason why ranks cannot compute the block in parts; empty if they can."""
        pairs = list(zip(self.whole.calls, self.local.calls, strict=False))
        if len(self.whole.calls) != len(self.local.calls):
            return _OTHER_WAY
        for call, local in pairs:
            if problem := self._find_problem(call, local):
                return f"{call.module or 'its block'} {problem}" if problem != _OTHER_WAY else problem
        if self.same.get(self.whole.leaves) != self.local.leaves:
            return _OTHER_WAY
        if self._compare(self.whole.leaves, self.local.leaves).dim is not None:
            return "it does not end with whole hidden states"
        return ""

    def _find_problem(self, call: Call, local: Call) -> str:
        if not self._is_same_call(call, local):
            return _OTHER_WAY
        read = [self._compare(*each) for each in zip(call.reads, local.reads, strict=True)]
        made = [self._compare(*each) for each in zip(call.makes, local.makes, strict=True)]
        if any(each.dim == _BAD for each in (*read, *made)):
            return f"makes tensors of fixed sizes by {call.function}"
        states_sizes = RULES.get(call.function) in (_reshapes, _cuts) or call.function in _OF_SIZES
        if call.factors != local.factors or (call.numbers != local.numbers and not states_sizes):
            return f"computes {call.function} with a number that depends on how many heads there are"
        if all(each.dim is None for each in read):
            is_made = call.function in _FILLS or all(each.dim is None for each in made)
            return (
                "" if is_made or _spreads(call.function, read, made) else f"makes a part of a tensor by {call.function}"
            )
        rule = RULES.get(call.function)
        if rule is None:
            return f"reads a part of a tensor by {call.function}, for which there is no rule"
        if call.function == "cat" and call.module in self.joined:
            result = call.makes[0]
            self.results[result] = result, find_pieces(self.whole, result)
            return ""
        if any(each in self.results for each in call.reads):
            return self._cut_joined(call, local)
        keeps = self._keeps_dims(call, read[0]) and (rule is not _takes_rows or _is_of_last(call, read[0]))
        return "" if keeps and rule(read, made) else f"needs by {call.function} what other ranks have"

    def _is_same_call(self, call: Call, local: Call) -> bool:
        """True if a rank makes the same call, and reads what it has of the same tensors."""
        if (call.function, call.module) != (local.function, local.module):
            return False
        if (len(call.reads), len(call.makes)) != (len(local.reads), len(local.makes)):
            return False
        if any(self.same.setdefault(*each) != each[1] for each in zip(call.reads, local.reads, strict=True)):
            return False
        self.same.update(zip(call.makes, local.makes, strict=True))
        return True

    def _keeps_dims(self, call: Call, read: SplitSizes) -> bool:
        """True if an index leaves the split dimension as it is; of other calls always."""
        return call.function not in ("getitem", "setitem") or read.dim is None or read.dim in call.whole_dims

    def _compare(self, whole: int, local: int) -> SplitSizes:
        sizes, parts = self.whole.shapes[whole], self.local.shapes[local]
        if len(sizes) != len(parts):
            return SplitSizes(sizes, _BAD)
        dims = [dim for dim, (one, other) in enumerate(zip(sizes, parts, strict=True)) if one != other]
        if not dims:
            return SplitSizes(sizes, None)
        is_part = len(dims) == 1 and sizes[dims[0]] == parts[dims[0]] * self.parts
        return SplitSizes(sizes, dims[0] if is_part else _BAD)

    def _cut_joined(self, call: Call, local: Call) -> str:
        """A call that reads a joined result, or a view of it, may cut it into its pieces and nothing else."""
        if len(call.reads) > 1:
            return f"computes by {call.function} with several of its parts at once"
        result, pieces = self.results[call.reads[0]]
        for one, other in zip(call.makes, local.makes, strict=True):
            shown = find_range(self.whole, one, result)
            if self.whole.places[one].memory != self.whole.places[result].memory:
                return f"computes by {call.function} with several of its parts at once"
            if shown is None or not any(piece.holds(shown) for piece in pieces):
                self.results[one] = result, pieces
                continue
            own = find_range(self.local, other, self.same[result])
            if shown not in pieces or own is None or (own.first * self.parts, own.width * self.parts) != shown:
                return f"cuts a matrix at other places than between its parts by {call.function}"
        return ""


_OTHER_WAY = "its code computes something else with a part of its heads"


def _is_of_last(call: Call, read: SplitSizes) -> bool:
    """True if a function of rows, such as softmax or layer_norm, goes along the last dimension alone."""
    if "softmax" in call.function:
        return not call.numbers or call.numbers[0] in (-1, len(read.whole) - 1)
    return len(call.numbers) == 1
