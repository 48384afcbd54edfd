"""Shell: a family's base model with its blocks and ends taken out.

The forward of a base model makes what its blocks need beside hidden states: masks, tables of rotary embeddings, biases
of positions. It is run for each pipeline stage, whatever blocks the stage has. In the place of a block is a
`Delegator`, in the place of an end a `Stub`. Both ask the `Shell` what to do. The family's loop over its blocks
carries a tensor that nobody reads; the hidden states lie in the shell.

Legend: B batch, S sequence, D model width.
"""

import copy
import inspect
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

MASK = "attention_mask"
"""Name of the mask among the arguments of base models, and of blocks that look their attention up by name."""
Blocks = nn.ModuleDict | dict[str, nn.Module]
"""Blocks by their numbers in the whole model."""
RunBlock = Callable[[int, Tensor, dict[str, Any]], Any]
"""(number of a block, its first argument, its other arguments by name) → what the block returns."""


class Delegator(nn.Module):
    """Stands for a block in the family's list: it hands its arguments to a `RunBlock`.

    It has the block's plain attributes, such as `attention_type`, which loops over blocks read.
    """

    def __init__(self, number: int, block: nn.Module, step: RunBlock):
        super().__init__()
        self.number, self.step = number, step
        named = inspect.signature(inspect.unwrap(type(block).forward)).parameters.values()
        self.argument_names = [each.name for each in named if each.kind is each.POSITIONAL_OR_KEYWORD][1:]
        for name, value in vars(block).items():
            if not name.startswith("_") and not isinstance(value, Tensor | nn.Module) and name not in vars(self):
                setattr(self, name, value)

    def forward(self, *arguments: Any, **named: Any) -> Any:
        named |= dict(zip(self.argument_names, arguments, strict=False))
        return self.step(self.number, named.pop(self.argument_names[0]), named)


class Stub(nn.Module):
    """Stands for an end: it hands its arguments to a function and has no parameters."""

    def __init__(self, function: Callable[..., Any]):
        super().__init__()
        self.function = function

    def forward(self, *arguments: Any, **named: Any) -> Any:
        return self.function(*arguments, **named)


class Shell:
    """A base model whose blocks and ends lie elsewhere."""

    def __init__(
        self,
        base: nn.Module,
        blocks: str,
        *,
        before: Mapping[str, tuple[nn.Module | None, int]],
        after: list[str],
        returns_tuple: bool,
        takes_mask: bool,
    ):
        """Takes `base` apart: `blocks`, and the keys of `before` and `after`, are paths in it.

        `before` has for each end that runs before the blocks the module, None where another stage has it, and the
        width of what it returns. `after` are the ends behind the blocks, which the shell leaves out. With
        `takes_mask` the base model is told that every token is there, so that it does not look for padding.
        """
        self.base, self.returns_tuple, self.takes_mask = base, returns_tuple, takes_mask
        self.blocks: Blocks = {}
        self.entering: Tensor | None = None
        """Hidden states that come to the first block from outside; None where the base model makes them."""
        self.hidden = torch.empty(0)
        """Hidden states after the last block that ran."""
        self.is_behind = False
        """True if the first block was called."""
        self.cut: Callable[[int, str, Any], Any] = lambda _, __, value: value
        """Function (number of a block, name, argument) → what this rank's block is given in its place."""
        self.keep_apart: Callable[[Tensor | None], Tensor] | None = None
        """Function from a block's own mask to one that keeps documents apart too; None where they see each other."""
        replace(base, blocks, delegate(base.get_submodule(blocks), self._step))
        for path, (module, width) in before.items():
            replace(base, path, Stub(partial(self._run_before, module, width)))
        for path in after:
            replace(base, path, Stub(partial(self._leave_out, base.get_submodule(path))))

    def run(self, blocks: Blocks, entering: Tensor, seq_len: int, positions: Tensor | None = None) -> Tensor:
        """Hidden states behind these blocks, of those before them, `entering` [B, s, D].

        `seq_len` is the length S of the whole sequence, of which s tokens may be here; masks are of S tokens. Tables of
        positions are those of `positions`, by default of all S.
        """
        context = entering.new_zeros(()).expand(entering.shape[0], seq_len, entering.shape[2])
        return self._call(blocks, context, entering, positions)

    def embed(self, embedded: Tensor, positions: Tensor | None = None, blocks: Blocks | None = None) -> Tensor:
        """Hidden states that enter the first block, or those behind `blocks`, of embedded tokens [B, s, D].

        `positions` [s] are those of the tokens, by default from 0 on.
        """
        return self._call({} if blocks is None else blocks, embedded, None, positions)

    def _call(self, blocks: Blocks, inputs: Tensor, entering: Tensor | None, positions: Tensor | None) -> Tensor:
        options: dict[str, Any] = {}
        if self.takes_mask:
            options[MASK] = inputs.new_ones((1, 1), dtype=torch.int64).expand(inputs.shape[:2])
        if positions is not None and takes_positions(self.base):
            options["position_ids"] = positions[None]
        self.blocks, self.entering, self.hidden, self.is_behind = blocks, entering, inputs, False
        try:
            self.base(inputs_embeds=inputs, use_cache=False, **options)
            return self.hidden
        finally:
            self.blocks, self.entering, self.hidden = {}, None, torch.empty(0)

    def _step(self, number: int, h_BSD: Tensor, named: dict[str, Any]) -> Any:
        if number == 0:
            self.is_behind = True
            self.hidden = h_BSD if self.entering is None else self.entering
        if str(number) in self.blocks:
            given = {name: self.cut(number, name, value) for name, value in named.items()}
            if self.keep_apart is not None:
                given[MASK] = self.keep_apart(given[MASK])
            result = self.blocks[str(number)](self.hidden, **given)
            self.hidden = result[0] if isinstance(result, tuple | list) else result
        return (h_BSD,) if self.returns_tuple else h_BSD

    def _run_before(self, end: nn.Module | None, width: int, *arguments: Any, **named: Any) -> Any:
        """An end before the blocks; zeros of its width where it is elsewhere, or hidden states come from outside."""
        if self.entering is None and end is not None:
            return end(*arguments, **named)
        return self.hidden.new_zeros(()).expand(*self.hidden.shape[:2], width)

    def _leave_out(self, end: nn.Module, *arguments: Any, **named: Any) -> Any:
        """The first argument behind the blocks; before them the end, since a norm without parameters may be at both."""
        return arguments[0] if self.is_behind else end(*arguments, **named)


def cut_heads(tensor: Tensor, num_heads: int, parts: int, part: int, batch: int) -> Tensor:
    """The part of a tensor [heads, ...], [batch · heads, ...] or [batch, heads, ...] that one of several ranks has."""
    each = num_heads // parts
    if tensor.shape[:2] in ((batch, num_heads), (1, num_heads)):
        return tensor.narrow(1, part * each, each)
    if tensor.shape[0] == num_heads:
        return tensor.narrow(0, part * each, each)
    return tensor.unflatten(0, (-1, num_heads)).narrow(1, part * each, each).flatten(0, 1)


def delegate(blocks: nn.Module, step: RunBlock) -> nn.ModuleList:
    """A list with a `Delegator` for each of these blocks."""
    return nn.ModuleList(Delegator(number, block, step) for number, block in enumerate(blocks.children()))


def replace(root: nn.Module, path: str, new: nn.Module) -> nn.Module:
    """Put a module in the place of the one at `path`, which is returned."""
    owner, _, name = path.rpartition(".")
    old = root.get_submodule(path)
    setattr(root.get_submodule(owner), name, new)
    return old


def takes_positions(base: nn.Module) -> bool:
    """True if a base model can be given the positions of its tokens."""
    return "position_ids" in inspect.signature(inspect.unwrap(type(base).forward)).parameters


def own_tables(root: nn.Module) -> Iterator[tuple[nn.Module, str]]:
    """Each buffer below `root`: the module that has it, and its name there."""
    for module in root.modules():
        for name, buffer in module.named_buffers(recurse=False):
            if buffer is not None:
                yield module, name


def compute_tables(model: Any, module: nn.Module, fill: float = 0.0, exact: bool = False) -> dict[str, Tensor]:
    """Values on the CPU of the buffers of one module, as the family's own code computes them.

    `model` is the `PreTrainedModel` of the module. Its `_init_weights` fills the buffers of a copy of the module that
    has no parameters; what it leaves alone keeps `fill`. With `exact` floating buffers are float64.
    """
    twin = copy.copy(module)
    formats = {n: torch.float64 if exact and b.is_floating_point() else b.dtype for n, b in module.named_buffers()}
    usual = torch.get_default_dtype()
    with torch.device("cpu"), torch.no_grad():
        shapes = {name: buffer.shape for name, buffer in module.named_buffers(recurse=False)}
        tables = {name: torch.full(shape, fill).to(formats[name]) for name, shape in shapes.items()}
        vars(twin)["_buffers"] = tables
        vars(twin)["_parameters"] = {
            name: None if p is None else torch.empty_like(p, device="meta") for name, p in module._parameters.items()
        }
        torch.set_default_dtype(torch.promote_types(model.dtype, torch.float32))  # that in which models are built
        try:
            model._init_weights(twin)
        finally:
            torch.set_default_dtype(usual)
    return dict(vars(twin)["_buffers"])
