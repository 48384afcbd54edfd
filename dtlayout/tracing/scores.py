"""Scores: how a model computes attention in training, measured on fake tensors.

The model's first blocks run forward and backward, with the attention that the trainer gives them. The sequence's length
is a prime number that divides no other size. So a tensor has numbers for each pair of tokens if and only if its
elements are a multiple of the square of that length.

Legend: B batch, H query heads, S sequence.
"""

import weakref
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import chain, pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from dtlayout.base.errors import InvalidConfig
from dtlayout.models.description import Description, Operation
from dtlayout.models.operations import Activation, Norm, SelfAttention
from dtlayout.models.routed_experts import RoutedExperts
from dtlayout.models.scores import NONE, ScoreBytes, SequenceScores
from dtlayout.models.tape import PLAIN, join
from dtlayout.tracing.block_runs import BlockRunner, BlockRuns, find_key, list_saved
from dtlayout.tracing.record import list_tensors

_CHUNK = 512
"""Tokens of the longest chunk within which code of linear attention attends."""
_FEWEST = 31
"""Tokens of the shortest sequence that is run."""
_MATMULS = ("bmm", "baddbmm", "mm", "addmm", "matmul", "einsum")
_PRODUCTS = "bmm"


class _Held:
    """Bytes for each pair of tokens, of tensors with a number for each head, and of others such as masks."""

    def __init__(self) -> None:
        self.of_heads = self.of_pairs = 0

    def add(self, num_pairs: int, element_bytes: int, num_heads: int, sign: int = 1) -> None:
        """Count a tensor with so many numbers for each pair of tokens."""
        if num_pairs % num_heads == 0:
            self.of_heads += sign * num_pairs * element_bytes
        else:
            self.of_pairs += sign * num_pairs * element_bytes

    @property
    def now(self) -> tuple[int, int]:
        return self.of_heads, self.of_pairs


class ScoreWatch(TorchDispatchMode):
    """Counts the bytes of tensors with numbers for each pair of tokens, while it is entered."""

    def __init__(self, seq_len: int, num_heads: int):
        super().__init__()
        self.seq_len, self.num_heads = seq_len, num_heads
        self.held, self.moved, self.products, self.matmuls = _Held(), _Held(), _Held(), _Held()
        self.most = (0, 0)
        """Bytes at the fullest since `restart`."""
        self.known: dict[int, Any] = {}
        """Storages of such tensors."""

    def restart(self) -> None:
        """Forget what was moved and held at most until now."""
        self.moved, self.products, self.matmuls, self.most = _Held(), _Held(), _Held(), self.held.now

    def count_pairs(self, tensor: Tensor) -> int:
        """Numbers that the memory of a tensor has for each pair of tokens; 0 if it has another size.

        Sinks are one more column beside the tokens.
        """
        size = tensor.untyped_storage().nbytes() // tensor.itemsize
        pairs = (self.seq_len**2, self.seq_len * (self.seq_len + 1))
        return next((size // each for each in pairs if size % each == 0), 0)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.namespace == "prim":  # a question to a tensor
            return result
        made = [each for each in list_tensors(result) if self.count_pairs(each)]
        for each in made:
            self._meet(each)
        read = [each for each in list_tensors((args, kwargs or {})) if self.count_pairs(each)]
        shows = made and {find_key(each) for each in made} <= {find_key(each) for each in read}
        name = func._schema.name.rpartition("::")[2].strip("_")
        if name in _MATMULS:
            for each in made:
                self.matmuls.add(self.count_pairs(each), each.itemsize, self.num_heads)
                if name == _PRODUCTS:
                    self.products.add(self.count_pairs(each), each.itemsize, self.num_heads)
        elif func._schema.is_mutable or not shows:
            for each in (*read, *made):
                self.moved.add(self.count_pairs(each), each.itemsize, self.num_heads)
        return result

    def _meet(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        if id(storage) in self.known:
            return
        pairs, element_bytes = self.count_pairs(tensor), tensor.itemsize

        def forget(_: Any, key: int = id(storage)) -> None:
            del self.known[key]
            self.held.add(pairs, element_bytes, self.num_heads, -1)

        self.known[id(storage)] = weakref.ref(storage, forget)
        self.held.add(pairs, element_bytes, self.num_heads)
        if sum(self.held.now) > sum(self.most):
            self.most = self.held.now


class MeasuredBlock(NamedTuple):
    """Bytes of a block in training, as measured."""

    scores: ScoreBytes
    others: float
    """Bytes of a token in other tensors that it keeps for backward."""


class _Measurement(BlockRuns):
    """Bytes of each block of a model, in one run."""

    def __init__(self, seq_len: int, num_heads: int):
        self.watch, self.found = ScoreWatch(seq_len, num_heads), list[MeasuredBlock]()
        super().__init__(self.watch)
        self._before, self._held = (0, 0), (0, 0)
        self._masks, self._shared = set[int](), set[int]()

    def enter(self, block: nn.Module, hidden: Tensor, beside: Sequence[Tensor]) -> None:
        """Note scores and masks that there are, and the memory of weights and of arguments."""
        self._before = self.watch.held.now
        self._masks = {*self.watch.known}
        self._shared = {find_key(each) for each in (*block.parameters(), *block.buffers(), *beside)}
        self.watch.restart()

    def leave(self, left: Tensor) -> None:
        """Note what forward held, and what it keeps."""
        watch, heads = self.watch, self.watch.num_heads
        kept, keeps_mask, others = _Held(), False, 0
        for each in list_saved(left):
            key, nbytes = find_key(each), each.untyped_storage().nbytes()
            if pairs := watch.count_pairs(each):
                keeps_mask = keeps_mask or key in self._masks
                if key in watch.known and key not in self._masks:
                    kept.add(pairs, each.itemsize, heads)
            elif key not in self._shared and nbytes // each.itemsize % watch.seq_len == 0:
                others += nbytes
        scores = ScoreBytes(
            kept=kept.of_heads / heads,
            in_forward=max(0, watch.most[0] - self._before[0] - kept.of_heads) / heads,
            products=watch.products.of_heads / heads,
            matmuls=watch.matmuls.of_heads / heads,
            moved_forward=watch.moved.of_heads / heads,
            pair_kept=kept.of_pairs,
            pair_in_forward=max(0, watch.most[1] - self._before[1] - kept.of_pairs),
            mask=sum(self._before),
            keeps_mask=keeps_mask,
        )
        self.found.append(MeasuredBlock(scores, others / watch.seq_len))

    def begin_backward(self) -> None:
        """Forget what forward held."""
        self.watch.restart()
        self._held = self.watch.held.now

    def end_backward(self) -> None:
        """Note what backward held."""
        watch, heads, (scores, others) = self.watch, self.watch.num_heads, self.found[-1]
        scores = scores._replace(
            in_backward=max(0, watch.most[0] - self._held[0]) / heads,
            moved_backward=watch.moved.of_heads / heads,
            pair_in_backward=max(0, watch.most[1] - self._held[1]),
        )
        self.found[-1] = MeasuredBlock(scores, others)


class ScoreMeter:
    """Runs of a model on fake tensors that measure its blocks' attention."""

    def __init__(self, runner: BlockRunner, local_sizes: Collection[int] = ()):
        """`local_sizes` are tokens of windows and chunks: sequences that are longer have masks."""
        self.runner, self.local_sizes = runner, local_sizes
        config = getattr(runner.model, "config", None)
        self.longest = int(getattr(config, "max_position_embeddings", 0) or 1 << 20)
        self.caps_logits = False
        """True if a run has found a softcap of logits."""
        self.sizes = {size for each in runner.model.parameters() for size in each.shape}

    def measure(self, kinds: Sequence[Description], numbers: Sequence[int]) -> tuple[Description, ...]:
        """The kinds of a model's blocks with what their attention holds, and with a head that says whether it caps.

        `numbers` are the kinds of the blocks. InvalidConfig if the model does not run.
        """
        windows = {each.attention.window for each in kinds if each.attention.window}
        windows |= {each for each in self.local_sizes if each < self.longest}
        bounds = [0, *sorted(windows), self.longest]
        lengths = {above: self._find_length(above, most) for above, most in pairwise(bounds)}
        num_heads = max(each.attention.num_heads for each in kinds) or 1
        vocabulary = kinds[0].head.shape[0]
        runs = {
            each: {above: self._run(length, num_heads, vocabulary, each) for above, length in lengths.items() if length}
            for each in self.runner.formats
        }
        if not any(each.attention.window for each in kinds):
            by_length = next(iter(runs.values()))
            self._check_longer(next(iter(by_length.values()), ()), num_heads, vocabulary)
        return tuple(
            self._complete(described, [*runs.values()], numbers.index(kind)) for kind, described in enumerate(kinds)
        )

    def _check_longer(self, short: Sequence[MeasuredBlock], num_heads: int, vocabulary: int) -> None:
        """InvalidConfig if scores lie in memory in short sequences alone, as where code attends within chunks."""
        if not any(each.scores.are_in_memory for each in short):
            return
        if (length := self._find_length(_CHUNK, self.longest)) <= _CHUNK:
            return
        long = list[MeasuredBlock]()
        with suppress(InvalidConfig):  # a table that has no more rows, whatever its config calls their number
            long = self._run(length, num_heads, vocabulary, self.runner.formats[0])
        for number, (before, after) in enumerate(zip(short, long, strict=False)):
            if before.scores.are_in_memory and not after.scores.are_in_memory:
                raise InvalidConfig(f"block {number} has scores of all pairs of tokens in short sequences alone")

    def _complete(
        self, described: Description, runs: Sequence[Mapping[int, Sequence[MeasuredBlock]]], number: int
    ) -> Description:
        """The kind of the block `number` with its bytes of the runs in each format, by the length of sequences."""
        half, single = runs[0], runs[-1]
        scores = list[SequenceScores]()
        for above, found in half.items():
            new = SequenceScores(above if scores else 0, found[number].scores, single[above][number].scores)
            scores += [new] * (not scores or scores[-1][1:] != new[1:])
        if all(each.half == NONE for each in scores):
            scores = []
        first = next(iter(half.values()), ())
        more = 0
        # The trainer puts modules of its own in the places of such norms, and a trace one in the place of experts; what
        # a state keeps does not grow with so few tokens.
        is_own = not any(map(is_replaced, described.block)) and not described.mixers
        if first and is_own:
            more = count_more(described, first[number], 2 if len(runs) > 1 else 4)
        block = [_take_away(each, more) for each in described.block]
        if block == [*described.block]:
            block = [
                replace(each, held=each.held + more) if isinstance(each, SelfAttention) else each for each in block
            ]
        block = [replace(each, scores=tuple(scores)) if isinstance(each, SelfAttention) else each for each in block]
        return replace(described, block=tuple(block), caps_logits=self.caps_logits)

    def _find_length(self, above: int, most: int) -> int:
        """A prime number of tokens, more than `above` and not more than `most`; 0 where there is none.

        Neither it nor the number after it divides a size of the model.
        """
        few = range(max(above + 1, min(_FEWEST, most)), most + 1)
        fewer = range(min(_FEWEST, most), max(above, 2), -1)
        fits = (
            n for n in chain(few, fewer) if _is_prime(n) and all(size % n and size % (n + 1) for size in self.sizes)
        )
        return next(fits, 0)

    def _run(self, length: int, num_heads: int, vocabulary: int, dtype: torch.dtype) -> list[MeasuredBlock]:
        measurement = _Measurement(length, num_heads)
        with self.runner.run(length, dtype, measurement) as result:
            saved = (each for left in list_tensors(result) if left.grad_fn for each in list_saved(left))
            self.caps_logits = any(each.numel() == length * vocabulary for each in saved)
        return measurement.found


def _is_prime(n: int) -> bool:
    return n > 1 and all(n % each for each in range(2, int(n**0.5) + 1))


def count_more(described: Description, found: MeasuredBlock, element_bytes: int) -> int:
    """Elements of a token that a block keeps for backward beside what its operations say; below 0 if it keeps fewer.

    Less than a hundredth of all, such as a number more for each row of a norm, counts as none.
    """
    attention, said = described.attention, count_said(described, element_bytes)
    if found.scores.repeats_heads:
        said += element_bytes * (2 * attention.query_width + attention.output_width - attention.input_width)
    if not found.scores.are_in_memory:
        said += 4 * attention.num_heads  # a number for each row
    more = round((found.others - said) / element_bytes)
    return more if abs(more) * element_bytes > 0.01 * said else 0


def count_said(described: Description, element_bytes: int) -> float:
    """Bytes of a token that the operations of a block say that they keep; no kernel's rows of attention."""
    sizes = {"compute": element_bytes, "cast": element_bytes, "exact": 4, "index": 8}
    options = PLAIN._replace(casts_norms=element_bytes < 4)
    tape = join(entry for operation in described.block for entry in operation.record(options))
    return sum(sizes[each.format] * each.width for entry in tape for each in entry.saves)


def _take_away(operation: Operation, more: int) -> Operation:
    """An activation without the tensors that it does not keep, as where its code has a backward of its own; whatever
    else as it is."""
    if isinstance(operation, Activation) and more < 0 and -more % operation.width == 0:
        left = operation.own + more // operation.width
        return replace(operation, own=left) if left >= 0 else operation
    return operation


def is_replaced(operation: Operation) -> bool:
    """True if the block that is trained, or traced, has another module than the family's."""
    return isinstance(operation, RoutedExperts) or (isinstance(operation, Norm) and operation.over_ranks)
