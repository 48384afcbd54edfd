"""Scores: how a model computes attention in training, measured on fake tensors.

The model's first blocks run forward and backward, with the attention that the trainer gives them. The sequence's length
is a prime number that divides no other size. So a tensor has numbers for each pair of tokens if and only if its
elements are a multiple of the square of that length.

Legend: B batch, H query heads, S sequence.
"""

import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import chain, pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from dtlayout.base.errors import InvalidConfig
from dtlayout.base.formatting import first_line
from dtlayout.models.description import Description, Operation
from dtlayout.models.operations import Activation, Norm, SelfAttention
from dtlayout.models.routed_experts import RoutedExperts
from dtlayout.models.scores import NONE, ScoreBytes, SequenceScores
from dtlayout.models.tape import PLAIN, join
from dtlayout.tracing.attention import NAME, bind_kernel, register
from dtlayout.tracing.record import list_tensors
from dtlayout.tracing.shell import replace as put

_KERNEL = "sdpa-flash"
"""The kernel of plain attention, which keeps no scores; it runs on fake tensors of the CPU."""
_FEWEST = 31
"""Tokens of the shortest sequence that is run."""
_FORMATS = (torch.bfloat16, torch.float32)
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
        shows = made and {_key(each) for each in made} <= {_key(each) for each in read}
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


def _key(tensor: Tensor) -> int:
    return id(tensor.untyped_storage())


def list_saved(result: Tensor) -> Iterator[Tensor]:
    """Tensors that backward of `result` reads, each memory once."""
    seen, storages, left = set[Any](), set[int](), [result.grad_fn]
    while left:
        node = left.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        left += [each for each, _ in node.next_functions]
        named = [getattr(node, name) for name in dir(node) if name.startswith("_saved_")]
        for each in list_tensors([*named, *getattr(node, "saved_tensors", ())]):
            if _key(each) not in storages:
                storages.add(_key(each))
                yield each


class MeasuredBlock(NamedTuple):
    """Bytes of a block in training, as measured."""

    scores: ScoreBytes
    others: float
    """Bytes of a token in other tensors that it keeps for backward."""


class _Measurement:
    """Bytes of each block of a model, in one run.

    A block's backward runs when the next one begins: by then nobody holds what the block returned beside hidden states.
    """

    def __init__(self, seq_len: int, num_heads: int):
        self.watch, self.found = ScoreWatch(seq_len, num_heads), list[MeasuredBlock]()
        self._before = (0, 0)
        self._masks, self._shared = set[int](), set[int]()
        self._left: Tensor | None = None

    @contextmanager
    def around(self, blocks: Sequence[nn.Module]) -> Iterator[None]:
        """Inside, each block that runs is measured."""
        hooks = [each.register_forward_pre_hook(self._begin, with_kwargs=True) for each in blocks]
        hooks += [each.register_forward_hook(self._end) for each in blocks]
        try:
            yield
        finally:
            for each in hooks:
                each.remove()

    def _begin(self, block: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]) -> Any:
        """Cut the block off what came before it, whose backward runs first."""
        self.finish()
        hidden = next(list_tensors((inputs, named.get("hidden_states"), named)))
        entered = hidden.detach().requires_grad_()
        self._before = self.watch.held.now
        self._masks = {*self.watch.known}
        beside = [each for each in list_tensors([*inputs, *named.values()]) if each is not hidden]
        self._shared = {_key(each) for each in (*block.parameters(), *block.buffers(), *beside)}
        self.watch.restart()
        given = tuple(entered if each is hidden else each for each in inputs)
        return given, {name: entered if each is hidden else each for name, each in named.items()}

    def _end(self, _: nn.Module, __: Any, result: Any) -> Any:
        """Note what forward held, and give back hidden states alone."""
        watch, heads = self.watch, self.watch.num_heads
        left = self._left = next(list_tensors(result))
        kept, keeps_mask, others = _Held(), False, 0
        for each in list_saved(left):
            key, nbytes = _key(each), each.untyped_storage().nbytes()
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
        return (left, *[None for _ in result[1:]]) if isinstance(result, tuple) else left

    def finish(self) -> None:
        """Run the backward of the block that ran last, and note what it held."""
        if self._left is None:
            return
        watch, heads, (scores, others) = self.watch, self.watch.num_heads, self.found[-1]
        watch.restart()
        held = watch.held.now
        torch.autograd.backward(self._left, torch.empty_like(self._left))
        self._left = None
        scores = scores._replace(
            in_backward=max(0, watch.most[0] - held[0]) / heads,
            moved_backward=watch.moved.of_heads / heads,
            pair_in_backward=max(0, watch.most[1] - held[1]),
        )
        self.found[-1] = MeasuredBlock(scores, others)


class ScoreMeter:
    """Runs of a model on fake tensors that measure its blocks' attention."""

    def __init__(
        self,
        model: nn.Module,
        blocks_name: str,
        fake: FakeTensorMode | None,
        inputs: Mapping[str, Tensor] | None = None,
    ):
        """`model` has run in `fake`; `inputs` as for `record.record`. Its list of blocks is cut short."""
        assert fake is not None, "the model has run"
        self.model, self.fake, self.inputs = model, fake, inputs
        self.blocks_name = blocks_name
        config = getattr(model, "config", None)
        self.longest = int(getattr(config, "max_position_embeddings", 0) or 1 << 20)
        self.asks = inputs is None and getattr(model, "_supports_attention_backend", False)
        if self.asks:
            register()
            model.config._attn_implementation = NAME  # type: ignore[union-attr]
            for block in self.blocks:
                bind_kernel(block, _KERNEL)
        self.caps_logits = False
        """True if a run has found a softcap of logits."""
        self.sizes = {size for each in model.parameters() for size in each.shape}

    @property
    def blocks(self) -> list[nn.Module]:
        """The model's blocks."""
        return list(self.model.get_submodule(self.blocks_name).children())

    def measure(self, kinds: Sequence[Description], numbers: Sequence[int]) -> tuple[Description, ...]:
        """The kinds of a model's blocks with what their attention holds, and with a head that says whether it caps.

        `numbers` are the kinds of the blocks. InvalidConfig if the model does not run.
        """
        last = max(numbers.index(kind) for kind in range(len(kinds)))
        put(self.model, self.blocks_name, nn.ModuleList(self.blocks[: last + 1]))
        bounds = [0, *sorted({each.attention.window for each in kinds if each.attention.window}), self.longest]
        lengths = {above: self._find_length(above, most) for above, most in pairwise(bounds)}
        dtype = next(self.model.parameters()).dtype
        runs = {
            each: {above: self._run(length, kinds[0], each) for above, length in lengths.items() if length}
            for each in ((dtype,) if dtype is _FORMATS[1] else _FORMATS)
        }
        return tuple(
            self._complete(described, [*runs.values()], numbers.index(kind)) for kind, described in enumerate(kinds)
        )

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
        # The trainer puts modules of its own in the places of such norms, and a trace one in the place of experts.
        is_own = not any(map(_is_replaced, described.block))
        if first and is_own:
            more = count_more(described, first[number], 2 if len(runs) > 1 else 4)
        block = [_take_away(each, more) for each in described.block]
        if block == [*described.block]:
            block = [
                replace(each, held=each.held + more) if isinstance(each, SelfAttention) else each for each in block
            ]
        block = [replace(each, scores=tuple(scores)) if isinstance(each, SelfAttention) else each for each in block]
        return replace(described, block=tuple(block), caps_logits=self.caps_logits)

    def _put_weights(self, dtype: torch.dtype) -> None:
        """Give the model weights of a number format; tables, such as rotary frequencies, keep theirs."""
        made = dict[int, nn.Parameter]()
        with self.fake:
            for module in self.model.modules():
                for name, own in module._parameters.items():
                    if own is not None and own.is_floating_point():
                        new = made.setdefault(id(own), nn.Parameter(torch.empty(own.shape, dtype=dtype)))
                        module._parameters[name] = new

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

    def _run(self, length: int, described: Description, dtype: torch.dtype) -> list[MeasuredBlock]:
        measurement = _Measurement(length, described.attention.num_heads)
        self._put_weights(dtype)
        self.model.train(self.inputs is None)  # a module of one's own may have dropout
        with self.fake:
            if self.inputs is None:
                named: dict[str, Any] = {"input_ids": torch.zeros(1, length, dtype=torch.long), "use_cache": False}
                if self.asks:
                    named["attention_mask"] = torch.ones(1, length, dtype=torch.long)
            else:
                first = next(iter(self.inputs.values()))
                named = {
                    name: torch.zeros(tuple(length if n == first.shape[1] else n for n in each.shape), dtype=each.dtype)
                    for name, each in self.inputs.items()
                }
        try:
            with measurement.around(self.blocks), self.fake, measurement.watch, torch.enable_grad():
                result = self.model(**named)
                size = length * described.head.shape[0]
                saved = (each for left in list_tensors(result) if left.grad_fn for each in list_saved(left))
                self.caps_logits = any(each.numel() == size for each in saved)
                measurement.finish()
        except Exception as error:  # whatever a model's own code raises
            raise InvalidConfig(f"its training fails: {first_line(error)}") from None
        return measurement.found


def _is_prime(n: int) -> bool:
    return n > 1 and all(n % each for each in range(2, int(n**0.5) + 1))


def count_more(described: Description, found: MeasuredBlock, element_bytes: int) -> int:
    """Elements of a token that a block keeps for backward beside what its operations say; below 0 if it keeps fewer.

    Less than a hundredth of all, such as a number more for each row of a norm, counts as none.
    """
    attention, options = described.attention, PLAIN._replace(casts_norms=element_bytes < 4)
    sizes = {"compute": element_bytes, "cast": element_bytes, "exact": 4, "index": 8}
    tape = join(entry for operation in described.block for entry in operation.record(options))
    said = sum(sizes[each.format] * each.width for entry in tape for each in entry.saves)
    if found.scores.repeats_heads:
        said += element_bytes * (2 * attention.query_width + attention.output_width - attention.input_width)
    if not found.scores.are_in_memory:
        said += 4 * attention.num_heads  # a number for each row
    more = round((found.others - said) / element_bytes)
    return more if abs(more) * element_bytes > 0.01 * said else 0


def _take_away(operation: Operation, more: int) -> Operation:
    """An activation without the tensors that it does not keep, as where its code has a backward of its own; whatever
    else as it is."""
    if isinstance(operation, Activation) and more < 0 and -more % operation.width == 0:
        left = operation.own + more // operation.width
        return replace(operation, own=left) if left >= 0 else operation
    return operation


def _is_replaced(operation: Operation) -> bool:
    """True if the block that is trained, or traced, has another module than the family's."""
    return isinstance(operation, RoutedExperts) or (isinstance(operation, Norm) and operation.over_ranks)
