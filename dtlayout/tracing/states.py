"""States along the sequence: what they compute, move and hold, measured on fake tensors.

A model's first blocks run forward and backward on sequences of several lengths, whose differences are what a token
costs: a state's code works on chunks, and fills the last one up.
"""

import weakref
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from dtlayout.base.errors import InvalidConfig
from dtlayout.models.description import Description
from dtlayout.models.mixer import TokenElements
from dtlayout.models.operations import Norm
from dtlayout.models.scores import find_score_bytes
from dtlayout.tracing.block_runs import BlockRunner, BlockRuns, find_key, list_saved
from dtlayout.tracing.record import list_tensors
from dtlayout.tracing.scores import count_said, is_replaced

_LENGTHS = (256, 512, 768)
"""Tokens of the sequences; chunks of 64, 128 and 256 tokens divide them. The first has one chunk, and code may do with
less memory then."""
_FEW = (16, 32, 48)
"""Tokens of the sequences where code goes from token to token: each costs the same, and many would take minutes."""
_LOOPS = 1.3
"""Times as many operators for twice the tokens that such code calls at least."""
_TOLERANCE = 0.05
"""Share by which a token of the longest sequence may keep more than one of the others."""


class StateBytes(NamedTuple):
    """Work and memory of a block with a state, of one sequence or of a token."""

    flops: float = 0.0
    """FLOPs of the state's matmuls and convolutions in forward, but for those in fp32 where the model has bf16."""
    exact_flops: float = 0.0
    """FLOPs of those in fp32."""
    product_moved: float = 0.0
    """Bytes that these read and write."""
    moved: float = 0.0
    """Bytes that the state's other operations move in forward."""
    kept: float = 0.0
    """Bytes that the whole block keeps for backward."""
    in_forward: float = 0.0
    """Bytes that the state's forward holds at its fullest, beside those that are left when it ends."""
    in_backward: float = 0.0
    """Bytes that its backward holds at its fullest, beside those that are there when it begins."""


class _ByteWatch(TorchDispatchMode):
    """Counts the bytes of tensors that are made while it is entered, and the work of operators while `counts` is so."""

    def __init__(self) -> None:
        super().__init__()
        self.held = self.most = 0
        self.known: dict[int, Any] = {}
        self.counts = False
        self.num_calls = 0
        self.work: Counter[str] = Counter()

    def restart(self) -> int:
        """Bytes that are held now; the fullest begins anew."""
        self.most = self.held
        return self.held

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.namespace == "prim":  # a question to a tensor
            return result
        self.num_calls += 1
        made, read = list(list_tensors(result)), list(list_tensors((args, kwargs or {})))
        given = {find_key(each) for each in read}
        for each in made:
            if find_key(each) not in given:
                self._meet(each)
        if self.counts:
            if count := flop_registry.get(func._overloadpacket):
                word = "exact_flops" if made[0].dtype == torch.float32 else "flops"
                self.work[word] += count(*args, **(kwargs or {}), out_val=result)
                self.work["product_moved"] += sum(each.nbytes for each in (*read, *made))
            elif func._schema.is_mutable or not {find_key(each) for each in made} <= given:
                self.work["moved"] += sum(each.nbytes for each in (*read, *made))
        return result

    def _meet(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        if id(storage) in self.known:
            return

        def forget(_: Any, key: int = id(storage), nbytes: int = storage.nbytes()) -> None:
            del self.known[key]
            self.held -= nbytes

        self.known[id(storage)] = weakref.ref(storage, forget)
        self.held += storage.nbytes()
        self.most = max(self.most, self.held)


class _StateRuns(BlockRuns):
    """Work and bytes of the blocks with states, in one run."""

    def __init__(self, blocks: Sequence[nn.Module], states: Sequence[tuple[str, ...]], norms: frozenset[str]):
        """`states` are modules of each block, `norms` those of any block that count by themselves."""
        self.watch, self.found = _ByteWatch(), list[StateBytes]()
        super().__init__(self.watch)
        self._inner: list[bool] = []
        self._began, self._shared, self._in_forward = 0, set[int](), 0
        self._hooks = [
            hook for block, names in zip(blocks, states, strict=True) for hook in self._hook(block, names, norms)
        ]

    def release(self) -> None:
        """Measure nothing more."""
        for hook in self._hooks:
            hook.remove()

    def _hook(self, block: nn.Module, states: Sequence[str], norms: frozenset[str]) -> Any:
        for name, module in block.named_modules():
            if any(f"{name}.".startswith(f"{each}.") for each in states):
                counts = not isinstance(module, nn.Linear) and name not in norms
                yield module.register_forward_pre_hook(lambda _, __, counts=counts: self._push(counts=counts))
                yield module.register_forward_hook(lambda _, __, ___: self._pop())
            if name in states:
                yield module.register_forward_pre_hook(lambda _, __: (self.watch.restart(), None)[1])
                yield module.register_forward_hook(lambda _, __, result: self._leave_state(result))

    def _push(self, *, counts: bool) -> None:
        self._inner.append(counts)
        self.watch.counts = counts

    def _pop(self) -> None:
        self._inner.pop()
        self.watch.counts = bool(self._inner) and self._inner[-1]

    def _leave_state(self, result: Any) -> None:
        self._in_forward = max(self._in_forward, self.watch.most - self.watch.held)
        left = next(list_tensors(result))
        if left.requires_grad:
            left.register_hook(partial(self._begin_state))

    def _begin_state(self, _: Tensor) -> None:
        self._began = self.watch.restart()

    def enter(self, block: nn.Module, hidden: Tensor, beside: Sequence[Tensor]) -> None:
        """Note the memory of weights and of arguments."""
        self._shared = {find_key(each) for each in (*block.parameters(), *block.buffers(), *beside)}
        self.watch.work.clear()
        self._in_forward = 0

    def leave(self, left: Tensor) -> None:
        """Note what forward computed, moved and held, and what it keeps."""
        saved = (each for each in list_saved(left) if find_key(each) not in self._shared)
        kept = sum(each.untyped_storage().nbytes() for each in saved)
        work = self.watch.work
        flops = work["flops"], work["exact_flops"], work["product_moved"], work["moved"]
        self.found.append(StateBytes(*flops, kept, self._in_forward))

    def begin_backward(self) -> None:
        """Note what there is."""
        self._began = self.watch.restart()

    def end_backward(self) -> None:
        """Note what backward held."""
        self.found[-1] = self.found[-1]._replace(in_backward=self.watch.most - self._began)


def measure_states(
    runner: BlockRunner, kinds: Sequence[Description], numbers: Sequence[int]
) -> tuple[Description, ...]:
    """The kinds of a model's blocks with what their states compute and hold. `numbers` are the kinds of the blocks.

    InvalidConfig if the model does not run.
    """
    if not any(each.mixers for each in kinds):
        return tuple(kinds)
    places = [numbers.index(kind) for kind in range(len(kinds))]
    runs = [_measure_tokens(runner, kinds, numbers, each) for each in runner.formats]
    return tuple(
        _complete(kind, runs[0][place], runs[-1][place]) if kind.mixers else kind
        for kind, place in zip(kinds, places, strict=True)
    )


def _measure_tokens(
    runner: BlockRunner, kinds: Sequence[Description], numbers: Sequence[int], dtype: torch.dtype
) -> list[StateBytes]:
    """Work and memory of a token in each block."""
    found = list[list[StateBytes]]()
    blocks = runner.blocks
    states = [tuple({each.module for each in kinds[kind].mixers}) for kind in numbers[: len(blocks)]]
    norms = frozenset(each.module for kind in kinds for each in kind.block if isinstance(each, Norm))

    def run(length: int) -> _StateRuns:
        measurement = _StateRuns(blocks, states, norms)
        try:
            with runner.run(length, dtype, measurement):
                return measurement
        finally:
            measurement.release()

    few, more = (run(length).watch.num_calls for length in _FEW[:2])
    lengths = _FEW if more > _LOOPS * few else _LENGTHS
    for length in lengths:
        measurement = run(length)
        found.append([
            each._replace(kept=each.kept - _count_pairs(kinds[kind], length, dtype.itemsize))
            for each, kind in zip(measurement.found, numbers, strict=False)
        ])  # fmt: skip
    shorter, longer = (
        [
            StateBytes(*((b - a) / (end - begin) for a, b in zip(before, after, strict=True)))
            for before, after in zip(*pair, strict=True)
        ]
        for (begin, end), pair in zip(pairwise(lengths), pairwise(found), strict=True)
    )
    for kind, first, second in zip(numbers, shorter, longer, strict=False):
        if kinds[kind].mixers and second.kept > (1 + _TOLERANCE) * first.kept:
            module = kinds[kind].mixers[0].module
            raise InvalidConfig(f"a token of {module} keeps more in a longer sequence, as one of attention does")
    return longer


def _count_pairs(described: Description, seq_len: int, element_bytes: int) -> float:
    """Bytes that attention of the block keeps for pairs of tokens."""
    attention = described.attention
    found = find_score_bytes(attention.scores, seq_len, element_bytes)
    return seq_len**2 * (found.kept * attention.num_heads + found.pair_kept)


def _complete(described: Description, half: StateBytes, single: StateBytes) -> Description:
    """A kind of block whose largest state has what the block needs beside its other operations."""
    # A trace has something else in the place of experts and of some norms, which keeps nothing.
    own = replace(described, block=tuple(each for each in described.block if not is_replaced(each)))
    said = [count_said(own, size) for size in (2, 4)]
    first = max(described.mixers, key=lambda each: sum(width for _, width in each.reads))
    complete = replace(
        first,
        flops=half.flops,
        exact_flops=half.exact_flops,
        product_moves=(half.product_moved, single.product_moved),
        moves=(half.moved, single.moved),
        kept=_to_elements(half.kept - said[0], single.kept - said[1]),
        in_forward=_to_elements(half.in_forward, single.in_forward),
        in_backward=_to_elements(half.in_backward, single.in_backward),
    )
    return replace(described, block=tuple(complete if each is first else each for each in described.block))


def _to_elements(half: float, single: float) -> TokenElements:
    """Elements in the compute format and in fp32, from bytes where that format has two bytes and where it has four."""
    compute = min(max(0.0, (single - half) / 2), max(0.0, half) / 2)
    return TokenElements(compute, max(0.0, half - 2 * compute) / 4)
