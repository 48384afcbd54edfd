"""Operators of ours that torch.compile and recomputation take for one, and whoever measures for all that is inside.

torch.compile would break its graph at what sends messages while it computes, and selective recomputation keeps results
by their operator's name: both want one operator. A tracker of memory or of messages wants to see each operator that it
is made of: `call_seen` calls the operator's body under its mode.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

_BODIES: dict[Any, Callable[..., Any]] = {}
"""Operator → the function that it is made of."""


def composite(name: str) -> Callable[[Callable[..., Any]], Any]:
    """A decorator as `torch.library.custom_op`, for an operator that changes none of its inputs."""

    def define(body: Callable[..., Any]) -> Any:
        operator = torch.library.custom_op(name, body, mutates_args=())
        _BODIES[operator._opoverload] = body
        return operator

    return define


def call_seen(mode: TorchDispatchMode, operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """An operator's result; for the mode that it came to, which also gets what a composite one is made of."""
    if (body := _BODIES.get(operator)) is None:
        return operator(*args, **kwargs)
    TorchDispatchMode.__enter__(mode)  # and nothing that a mode of its own does when a user enters it
    try:
        return body(*args, **kwargs)
    finally:
        TorchDispatchMode.__exit__(mode, None, None, None)
