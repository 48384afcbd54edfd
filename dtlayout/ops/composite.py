"""Operators that are one operator for torch.compile and recomputation, and all inner ones for memory trackers.

torch.compile would break its graph at code that sends messages while it computes, and selective recomputation keeps
results by their operator's name: both want one operator. A tracker of memory or of messages wants to see each inner
operator: `call_seen` calls the operator's body under its mode.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

_BODIES: dict[Any, Callable[..., Any]] = {}
"""Operator → the function that is its body."""


def composite(name: str) -> Callable[[Callable[..., Any]], Any]:
    """A decorator like `torch.library.custom_op`, for an operator that changes none of its inputs."""

    def define(body: Callable[..., Any]) -> Any:
        operator = torch.library.custom_op(name, body, mutates_args=())
        _BODIES[operator._opoverload] = body
        return operator

    return define


def call_seen(mode: TorchDispatchMode, operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Result of an operator that came to `mode`; of a composite operator, `mode` also gets all inner operators."""
    if (body := _BODIES.get(operator)) is None:
        return operator(*args, **kwargs)
    TorchDispatchMode.__enter__(mode)  # only this base method, not what a mode's own __enter__ does for users
    try:
        return body(*args, **kwargs)
    finally:
        TorchDispatchMode.__exit__(mode, None, None, None)
