"""A run of a base model without its blocks and ends: what it calls when, and what its blocks get.

Tensors that weights would make require gradients, so that it is seen where they go. Whatever else than one stream of
hidden states goes from part to part is refused.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from dtlayout.base.errors import InvalidConfig
from dtlayout.base.formatting import first_line
from dtlayout.tracing.attention import NAME
from dtlayout.tracing.record import list_tensors
from dtlayout.tracing.shell import Stub, compute_tables, delegate, own_tables, replace


class BaseRun:
    """Runs of a base model without its blocks and ends, on a few tokens, which note what is called when."""

    def __init__(self, model: Any, base: str, blocks: str, ends: list[str]):
        """`ends` are the outermost modules beside the blocks, with parameters or without."""
        self.model, self.base, self.blocks, self.ends = model, base, blocks, ends
        self.returns_tuple = False
        self.width = model.get_input_embeddings().embedding_dim
        self._forget()

    def _forget(self) -> None:
        self.blocks_seen, self.widths, self.after = list[int](), dict[str, int](), list[str]()
        self.last: Any = None
        self.reads_positions = False
        """True if an end before the blocks reads something else than embedded tokens."""

    def find_order(self) -> tuple[bool, dict[str, int], tuple[str, ...]]:
        """True if blocks return tuples, the ends before them with their widths, and the ends behind them."""
        for self.returns_tuple in (True, False):
            self._forget()
            try:
                self._run()
            except InvalidConfig:
                raise
            except Exception as error:
                if not self.returns_tuple:
                    raise self._refuse(f"does not run without its blocks: {first_line(error)}") from error
            else:
                break
        num_blocks = len(self.model.get_submodule(self.blocks))
        if self.blocks_seen != [*range(num_blocks)]:
            raise self._refuse("does not run each of its blocks once, in their order")
        unused = [
            path
            for path in self.ends
            if path not in self.widths and path not in self.after and has_parameters(self.model.get_submodule(path))
        ]
        if unused:
            raise self._refuse(f"has parameters that its base model does not read: {', '.join(unused)}")
        return self.returns_tuple, self.widths, tuple(self.after)

    def _run(self) -> None:
        """One forward on the CPU; each tensor is checked to be the one that the part before has returned."""
        originals: list[tuple[str, nn.Module]] = []
        tables = [(part, name, part._buffers[name]) for part, name in self._list_tables()]
        try:
            blocks = self.model.get_submodule(self.blocks)
            originals.append((self.blocks, replace(self.model, self.blocks, delegate(blocks, self._step))))
            for path in self.ends:
                end = self.model.get_submodule(path)
                originals.append((path, replace(self.model, path, Stub(self._make_end(path, end)))))
            for part in {id(part): part for part, _, _ in tables}.values():
                part._buffers.update(compute_tables(self.model, part))
            with torch.device("cpu"), torch.enable_grad():
                inputs = torch.zeros(2, 3, self.width, requires_grad=True).clone()
                options = {}
                if self.model.config._attn_implementation == NAME:
                    options["attention_mask"] = torch.ones(2, 3, dtype=torch.int64)
                base = self.model.get_submodule(self.base)
                version = inputs._version
                result = base(inputs_embeds=inputs, use_cache=False, **options)[0]
            if inputs._version != version:
                raise self._refuse("changes embedded tokens in place")
            if result is not self.last and getattr(result, "_base", None) is not self.last:
                raise self._refuse("changes hidden states behind its final norm")
        finally:
            for path, module in originals:
                replace(self.model, path, module)
            for part, name, buffer in tables:
                part._buffers[name] = buffer

    def _list_tables(self) -> Iterator[tuple[nn.Module, str]]:
        """Buffers outside of blocks and of ends with parameters."""
        paths = [self.blocks, *(path for path in self.ends if has_parameters(self.model.get_submodule(path)))]
        inside = {id(part) for path in paths for part in self.model.get_submodule(path).modules()}
        return ((part, name) for part, name in own_tables(self.model) if id(part) not in inside)

    def _step(self, number: int, h: Any, named: dict[str, Any]) -> Any:
        if not isinstance(h, Tensor):
            raise TypeError("blocks return no tuples")
        if self.after:
            raise self._refuse(f"runs {self.after[0]} neither before nor behind all of its blocks")
        if number != len(self.blocks_seen):
            raise self._refuse("does not run each of its blocks once, in their order")
        if number > 0 and h is not self.last:
            raise self._refuse("changes hidden states between its blocks")
        if number == 0 and not h.requires_grad:
            raise self._refuse("gives its blocks something else than embedded tokens")
        for name, value in named.items():
            if any(each.requires_grad for each in list_tensors(value)):
                raise self._refuse(f"gives its blocks more than hidden states that weights make: {name}")
            if hasattr(value, "update") and not any(True for _ in list_tensors(value)):
                raise self._refuse(f"carries state from block to block: {name}")
        self.blocks_seen.append(number)
        self.last = h.clone()
        return (self.last,) if self.returns_tuple else self.last

    def _make_end(self, path: str, end: nn.Module) -> Any:
        def run_before(*arguments: Any, **named: Any) -> Tensor:
            shape = end(*map(_on_meta, arguments), **{k: _on_meta(v) for k, v in named.items()}).shape
            self.widths[path] = shape[-1]
            self.reads_positions |= not any(each.requires_grad for each in list_tensors([*arguments, *named.values()]))
            return torch.zeros(shape, device="cpu", requires_grad=True).clone()  # families add in place

        def run(*arguments: Any, **named: Any) -> Any:
            if not self.blocks_seen and not has_parameters(end):
                return end(*arguments, **named)
            if not self.blocks_seen:
                return run_before(*arguments, **named)
            if not has_parameters(end) and not (arguments and arguments[0] is self.last):
                return end(*arguments, **named)
            if arguments[0] is not self.last or path in self.after or path in self.widths:
                raise self._refuse(f"runs {path} neither before nor behind all of its blocks")
            self.after.append(path)
            self.last = arguments[0].clone()
            return self.last

        return run

    def _refuse(self, what: str) -> InvalidConfig:
        return InvalidConfig(f"{type(self.model).__name__} {what}")


def _on_meta(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    return value.to("meta", torch.get_default_dtype()) if value.is_floating_point() else value.to("meta")


def has_parameters(module: nn.Module) -> bool:
    """True if a module, or one inside of it, has a parameter."""
    return next(module.parameters(), None) is not None
