"""Runs of a model on fake tensors, forward and backward, in which each block is measured by itself."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from dtlayout.base.errors import InvalidConfig
from dtlayout.base.formatting import first_line
from dtlayout.tracing.attention import NAME, bind_kernel, register
from dtlayout.tracing.record import list_tensors

_KERNEL = "sdpa-flash"
"""The kernel of plain attention, which keeps no scores; it runs on fake tensors of the CPU."""
_FORMATS = (torch.bfloat16, torch.float32)


class BlockRuns:
    """Hooks that cut each block off what came before it; a kind of measurement says what it notes.

    A block's backward runs when the next one begins: by then nobody holds what the block returned beside hidden states.
    """

    def __init__(self, mode: TorchDispatchMode) -> None:
        self.mode = mode
        """Entered while blocks run."""
        self._left: Tensor | None = None

    def enter(self, block: nn.Module, hidden: Tensor, beside: Sequence[Tensor]) -> None:
        """Note what there is before a block's forward, which reads hidden states and other tensors `beside`."""
        raise NotImplementedError

    def leave(self, left: Tensor) -> None:
        """Note what a block's forward has held, and keeps for the backward of `left`."""
        raise NotImplementedError

    def begin_backward(self) -> None:
        """Note what there is before a block's backward."""
        raise NotImplementedError

    def end_backward(self) -> None:
        """Note what a block's backward has held."""
        raise NotImplementedError

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
        self.finish()
        hidden = next(list_tensors((inputs, named.get("hidden_states"), named)))
        entered = hidden.detach().requires_grad_()
        self.enter(block, hidden, [each for each in list_tensors([*inputs, *named.values()]) if each is not hidden])

        def cut(value: Any) -> Any:
            if value is hidden:
                return entered
            if isinstance(value, tuple):
                return tuple(map(cut, value))
            return value.detach() if isinstance(value, Tensor) and value.requires_grad else value

        return tuple(map(cut, inputs)), {name: cut(value) for name, value in named.items()}

    def _end(self, _: nn.Module, __: Any, result: Any) -> Any:
        left = self._left = next(list_tensors(result))
        self.leave(left)
        if not isinstance(result, tuple):
            return left
        # What has no gradient, such as the tokens that were chosen, goes on to the next block.
        rest = [each if isinstance(each, Tensor) and not each.requires_grad else None for each in result[1:]]
        return (left, *rest)

    def finish(self) -> None:
        """Run the backward of the block that ran last."""
        if self._left is None:
            return
        self.begin_backward()
        torch.autograd.backward(self._left, torch.empty_like(self._left))
        self._left = None
        self.end_backward()


class BlockRunner:
    """A model on fake tensors, with the attention that the trainer gives it."""

    def __init__(
        self,
        model: nn.Module,
        blocks_name: str,
        fake: FakeTensorMode | None,
        inputs: Mapping[str, Tensor] | None = None,
    ):
        """`model` has run in `fake`; `inputs` as for `record.record`."""
        assert fake is not None, "the model has run"
        self.model, self.blocks_name, self.fake, self.inputs = model, blocks_name, fake, inputs
        dtype = next(model.parameters()).dtype
        self.formats = (dtype,) if dtype is _FORMATS[1] else _FORMATS
        """Number formats that the model's code computes in."""
        self.asks = inputs is None and getattr(model, "_supports_attention_backend", False)
        if self.asks:
            register()
            model.config._attn_implementation = NAME  # type: ignore[union-attr]
            for block in self.blocks:
                bind_kernel(block, _KERNEL)

    @property
    def blocks(self) -> list[nn.Module]:
        """The model's blocks."""
        return list(self.model.get_submodule(self.blocks_name).children())

    def shorten(self, num_blocks: int) -> None:
        """Leave out all blocks but the first ones."""
        blocks: Any = self.model.get_submodule(self.blocks_name)
        del blocks[num_blocks:]

    @contextmanager
    def run(self, seq_len: int, dtype: torch.dtype, measurement: BlockRuns) -> Iterator[Any]:
        """Result of the model for one sequence, with weights of a number format; after it, its blocks are measured.

        InvalidConfig if the model does not run.
        """
        self._put_weights(dtype)
        self.model.train(self.inputs is None)  # a module of one's own may have dropout
        with self.fake:
            named = self._make_inputs(seq_len)
        try:
            with measurement.around(self.blocks), self.fake, measurement.mode, torch.enable_grad():
                yield self.model(**named)
                measurement.finish()
        except Exception as error:  # whatever a model's own code raises
            raise InvalidConfig(f"its training fails: {first_line(error)}") from None

    def _make_inputs(self, seq_len: int) -> dict[str, Any]:
        if self.inputs is not None:
            first = next(iter(self.inputs.values()))
            return {
                name: torch.zeros(tuple(seq_len if n == first.shape[1] else n for n in each.shape), dtype=each.dtype)
                for name, each in self.inputs.items()
            }
        named: dict[str, Any] = {"input_ids": torch.zeros(1, seq_len, dtype=torch.long), "use_cache": False}
        if self.asks:
            named["attention_mask"] = torch.ones(1, seq_len, dtype=torch.long)
        return named

    def _put_weights(self, dtype: torch.dtype) -> None:
        """Give the model weights of a number format; tables, such as rotary frequencies, keep theirs."""
        made = dict[int, nn.Parameter]()
        with self.fake:
            for module in self.model.modules():
                for name, own in module._parameters.items():
                    if own is not None and own.is_floating_point():
                        new = made.setdefault(id(own), nn.Parameter(torch.empty(own.shape, dtype=dtype)))
                        module._parameters[name] = new


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
            if find_key(each) not in storages:
                storages.add(find_key(each))
                yield each


def find_key(tensor: Tensor) -> int:
    """A number of the memory of a tensor, while that is there."""
    return id(tensor.untyped_storage())
