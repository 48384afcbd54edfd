"""The module that the running operator belongs to, in forward, in backward and in recomputation.

In forward it is the innermost module that runs. In backward an operator runs for a node of autograd's graph. Nodes are
numbered in the order in which forward makes them, so a node belongs to the module that ran when its number was given.
So nothing is put into the graph, where it would hold memory.
"""

from bisect import bisect_right
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn
from torch._C._autograd import _get_sequence_nr
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook


class PlaceRecorder:
    """Knows the module that the running operator belongs to, while it is entered."""

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        """`modules` are the roots of the names that `module` gives."""
        self._names = {id(part): name for module in modules for name, part in module.named_modules()}
        self._running: list[str] = []
        self._numbers: list[int] = []
        self._owners: list[str] = []
        self._undo = ExitStack()

    @property
    def module(self) -> str:
        """Name of the module that the running operator belongs to; empty for a root, and outside of all modules."""
        if self._running:
            return self._running[-1]
        node = torch._C._current_autograd_node()
        if node is None:
            return ""
        place = bisect_right(self._numbers, node._sequence_nr()) - 1
        return self._owners[place] if place >= 0 else ""

    @property
    def is_forward(self) -> bool:
        """Whether a module's forward runs, for the first time or in recomputation."""
        return bool(self._running)

    def __enter__(self) -> "PlaceRecorder":
        self._undo.callback(register_module_forward_pre_hook(self._enter).remove)
        self._undo.callback(register_module_forward_hook(self._leave, always_call=True).remove)
        return self

    def __exit__(self, *exception: Any) -> None:
        self._undo.close()
        self._running.clear()

    def _enter(self, module: nn.Module, _: Any) -> None:
        self._running.append(self._names.get(id(module), ""))
        self._note()

    def _leave(self, *_: Any) -> None:
        self._running.pop()
        self._note()

    def _note(self) -> None:
        """Note that nodes made from now on belong to the innermost running module."""
        self._numbers.append(_get_sequence_nr())
        self._owners.append(self._running[-1] if self._running else "")
