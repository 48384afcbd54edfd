"""Recording: the calls of torch functions that a model makes in its blocks, with the tensors between them.

A model is built on the meta device and runs on fake tensors: shapes alone are computed, nothing has memory. A
`TorchFunctionMode` sees each call of torch, such as linear, silu or scaled_dot_product_attention, before it becomes
operators.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
)
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle

from dtlayout.base.errors import InvalidConfig
from dtlayout.base.formatting import first_line

EXPERTS = "routed experts"
"""The function of a call that stands for a module with stacks of experts."""
SEQ_LEN = 64
"""Tokens of the sequence that a model is traced with."""
ATTENTION_FUNCTION = "scaled_dot_product_attention"
"""The name of torch's function of attention."""
_INNER = {"__set__", "__delete__", "_has_torch_function"}


@dataclass(frozen=True)
class Call:
    """One call of a torch function inside a block."""

    function: str
    """Name of the function, without underscores around it."""
    module: str
    """Module that made it, by its name in the block; empty for the block's own forward."""
    reads: tuple[int, ...]
    """Tensors among its arguments, by number."""
    makes: tuple[int, ...]
    """Tensors that it returned, by number; one that it changed in place is its own result."""
    numbers: tuple[Any, ...]
    """Whole numbers among its arguments, such as the sizes of a view."""
    factors: tuple[Any, ...] = ()
    """Other numbers, flags and words among its arguments."""
    whole_dims: frozenset[int] = frozenset()
    """Dimensions that an index, of getitem or setitem, leaves as they are."""
    visit: int = 0
    """Number of the call of the module that it is part of; a module may be called several times in a block."""


class MemoryPlace(NamedTuple):
    """Memory of a tensor, which it may share with others, and the elements there that are its own."""

    memory: int
    """Number of the memory."""
    first: int
    """Element of the memory that is the tensor's first."""
    strides: tuple[int, ...]
    """Elements from an index to the next one, for each dimension."""


@dataclass(frozen=True)
class BlockRecord:
    """Calls of one block, and the tensors between them."""

    calls: tuple[Call, ...]
    enters: int
    """Number of the hidden states that came in."""
    leaves: int
    """Number of the hidden states that went out."""
    shapes: Mapping[int, tuple[int, ...]]
    """Tensor → its shape."""
    parameters: Mapping[int, str]
    """Tensor → name in the block, for each parameter that it read."""
    attention: Mapping[int, Mapping[str, Any]]
    """Result of attention → what the model asked for: window, softcap, sinks."""
    num_tokens: int
    """Tokens that the model ran on."""
    places: Mapping[int, MemoryPlace]
    """Tensor → where it lies in memory."""
    exact: frozenset[int] = frozenset()
    """Tensors of fp32 or finer; the model computes in bf16 where its code does not say another format."""
    whole_numbers: frozenset[int] = frozenset()
    """Tensors of whole numbers or flags, which have no gradient."""
    results: tuple[int, ...] = ()
    """All tensors that the block returned."""

    @property
    def code(self) -> tuple[Any, ...]:
        """All that its calls say, but for values that differ from block to block, such as a scale."""
        return tuple(
            (each.function, each.module, each.numbers, tuple(self.shapes[made] for made in each.makes))
            for each in self.calls
        )

    def count(self, tensor: int) -> int:
        """Elements of a tensor."""
        return math.prod(self.shapes[tensor])

    def is_exact(self, tensor: int) -> bool:
        """True if a tensor is of fp32 or finer."""
        return tensor in self.exact


class Recorder(TorchFunctionMode):
    """Records calls while a model runs; `watch` says which modules are its blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks: list[BlockRecord] = []
        self.num_tokens = 0
        self.local_sizes: set[int] = set()
        """Tokens of each window, and of each chunk, that masks were asked for with."""
        self.fake: FakeTensorMode | None = None
        """The mode of the tensors that the model ran on."""
        self._kept: dict[int, Tensor] = {}
        self._calls: list[Call] | None = None
        self._modules: list[tuple[str, int]] = []
        """Modules that are running, the innermost one last, and the number of each one's call."""
        self._num_visits = 0
        self._attention: dict[int, Mapping[str, Any]] = {}
        self._hooks: list[RemovableHandle] = []
        self.inputs: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
        """Arguments of each block, in the order of their calls."""
        self.ahead: str | None = None
        """Module whose attention reads later tokens, the last one; empty for a block itself."""

    def watch(self, blocks: Sequence[nn.Module]) -> None:
        """Record what each of these modules does."""
        for block in blocks:
            for name, module in block.named_modules():
                self._hooks += [
                    module.register_forward_pre_hook(lambda _, __, name=name: self._visit(name)),
                    module.register_forward_hook(lambda _, __, ___: self._leave()),
                ]
            for name, module in block.named_modules():
                if _is_stack(module):
                    module.forward = partial(self._note_experts, name)
            self._hooks += [
                block.register_forward_pre_hook(self._begin, with_kwargs=True),
                block.register_forward_hook(self._end, with_kwargs=True, always_call=False),
            ]

    @property
    def module(self) -> str:
        """The module that is running, by its name in its block; empty outside of modules."""
        return self._modules[-1][0] if self._modules else ""

    def release(self) -> None:
        """Record nothing more of the blocks that were watched."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def _visit(self, name: str) -> None:
        self._num_visits += 1
        self._modules.append((name, self._num_visits))

    def _leave(self) -> None:
        self._modules.pop()

    def _begin(self, block: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]) -> None:
        self._calls, self._attention = [], {}
        self.inputs.append((inputs, named))
        self._parameters = {id(parameter): name for name, parameter in block.named_parameters()}

    def _end(self, block: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any], result: Any) -> None:
        entered = next(list_tensors((inputs, named.get("hidden_states"), named)), None)
        results = list(list_tensors(result))
        left = next(iter(results), None)
        if entered is None or left is None or self._calls is None:
            raise InvalidConfig("a block takes or returns no hidden states")
        ends = {id(each): each for each in (entered, *results)}
        seen = {*ends, *(each for call in self._calls for each in (*call.reads, *call.makes))}
        self._kept |= ends
        shapes = {each: tuple(self._kept[each].shape) for each in seen}
        places = {each: _find_place(self._kept[each]) for each in seen}
        parameters = {each: self._parameters[each] for each in seen if each in self._parameters}
        self.blocks.append(
            BlockRecord(
                tuple(self._calls),
                id(entered),
                id(left),
                shapes,
                parameters,
                dict(self._attention),
                self.num_tokens,
                places,
                frozenset(each for each in seen if self._kept[each].dtype in (torch.float32, torch.float64)),
                frozenset(each for each in seen if not _has_gradients(self._kept[each])),
                tuple(id(each) for each in results),
            )
        )
        self._calls = None

    def _note_experts(self, name: str, tokens: Tensor, *inputs: Any, **named: Any) -> Tensor:
        """In the place of experts, whose tokens' ways depend on values: a call that reads and makes hidden states."""
        made = torch.empty_like(tokens)
        others = list(list_tensors((inputs, named)))
        self._kept |= {id(each): each for each in (tokens, made, *others)}
        if self._calls is not None:
            self._calls.append(Call(EXPERTS, name, tuple(map(id, (tokens, *others))), (id(made),), ()))
        return made

    def note_attention(self, result: Tensor, asked: Mapping[str, Any]) -> None:
        """Note what a model asked of the attention that made `result`."""
        self._kept[id(result)] = result
        self._attention[id(result)] = asked

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        name = getattr(function, "__name__", str(function))
        if name == ATTENTION_FUNCTION and self._calls is not None and _reads_ahead(*args, **(kwargs or {})):
            self.ahead = self._modules[-1][0] if self._modules else ""
        made = list(list_tensors(args[0] if name == "__setitem__" else result))
        if self._calls is not None and made and name not in _INNER:
            read = list(list_tensors((args, kwargs)))
            self._kept |= {id(each): each for each in (*read, *made)}  # a tensor that is freed would lend its number
            numbers, factors = (tuple(_list_values((args, kwargs), kind)) for kind in (int, float | bool | str))
            dims = _find_whole_dims(*args[:2]) if name in ("__getitem__", "__setitem__") else frozenset[int]()
            module, visit = self._modules[-1] if self._modules else ("", 0)
            ids = tuple(map(id, read)), tuple(map(id, made))
            self._calls.append(Call(name.strip("_"), module, *ids, numbers, factors, dims, visit))
        return result


def _reads_ahead(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
    is_causal: bool = False, **_: Any,
) -> bool:  # fmt: skip
    """Whether a call of `scaled_dot_product_attention` lets each token read all others."""
    return attn_mask is None and not is_causal


def list_tensors(value: Any) -> Iterator[Tensor]:
    """Tensors in a value, also inside of lists, tuples and tables."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for each in value:
            yield from list_tensors(each)
    elif isinstance(value, dict):
        yield from list_tensors(list(value.values()))


def _has_gradients(tensor: Tensor) -> bool:
    """True if a tensor is of a format in which there are gradients."""
    return tensor.is_floating_point() or tensor.is_complex()


def _is_stack(module: nn.Module) -> bool:
    """True for a module with matrices of several experts, each of whose parameters has a part for each of them."""
    shapes = [each.shape for each in module.parameters(recurse=False)]
    has_inner = any(True for child in module.children() for _ in child.parameters())
    if isinstance(module, nn.Conv1d) or has_inner or not any(len(shape) == 3 for shape in shapes):
        return False
    return len({shape[0] for shape in shapes}) == 1


def _list_values(value: Any, kind: Any) -> Iterator[Any]:
    """Values of one kind among arguments; a flag is no whole number."""
    if isinstance(value, bool):
        if kind is not int:
            yield value
    elif isinstance(value, kind):
        yield value
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _list_values(each, kind)
    elif isinstance(value, dict):
        yield from _list_values(list(value.values()), kind)


def _find_whole_dims(tensor: Tensor, index: Any) -> frozenset[int]:
    """Dimensions of a tensor of which an index takes all, in their order."""
    parts = list(index) if isinstance(index, tuple) else [index]
    if any(isinstance(each, Tensor) for each in parts):  # which takes elements in any order
        return frozenset()
    places = [each for each in parts if each is not None]
    if Ellipsis in places:
        at = places.index(Ellipsis)
        places[at : at + 1] = [slice(None)] * (tensor.dim() - len(places) + 1)
    places += [slice(None)] * (tensor.dim() - len(places))
    sizes = zip(places, tensor.shape, strict=True)
    return frozenset(
        dim for dim, (each, size) in enumerate(sizes) if isinstance(each, slice) and each.indices(size) == (0, size, 1)
    )


def _find_place(tensor: Tensor) -> MemoryPlace:
    return MemoryPlace(tensor.untyped_storage()._cdata, int(tensor.storage_offset()), tensor.stride())


def record(
    model: nn.Module, blocks: Sequence[nn.Module], recorder: Recorder, inputs: Mapping[str, Tensor] | None = None
) -> list[BlockRecord]:
    """A record of each block of a model on the meta device, which runs once.

    `inputs` are arguments by name, of which the first is a batch of tokens [B, S]; by default it is one sequence of
    `SEQ_LEN` tokens, as a model of transformers takes it. InvalidConfig if the model reads values of its tensors, which
    fake ones do not have.
    """
    recorder.watch(blocks)
    recorder.fake = FakeTensorMode(allow_non_fake_inputs=True)
    with recorder.fake as fake:
        model.to_empty(device="cpu")
        given = inputs or {"input_ids": torch.zeros(1, SEQ_LEN, dtype=torch.long)}
        named: dict[str, Any] = {name: torch.zeros_like(each, device="cpu") for name, each in given.items()}
        recorder.num_tokens = next(iter(named.values())).shape.numel()
    try:
        with fake, torch.no_grad(), recorder:
            model(**named, **({} if inputs else {"use_cache": False}))
    except (DataDependentOutputException, DynamicOutputShapeException) as error:
        function = str(error.func).removeprefix("aten.").partition(".")[0].strip("_")
        module = f" in {recorder.module}" * bool(recorder.module)
        raise InvalidConfig(
            f"its code goes on by values of tensors{module}, as {function} reads them, and a trace has shapes alone"
        ) from None
    except (InvalidConfig, RuntimeError):
        raise
    except Exception as error:  # whatever a model's own code raises
        raise InvalidConfig(f"its forward fails: {first_line(error)}") from None
    return recorder.blocks
