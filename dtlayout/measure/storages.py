"""Storages behind the values that an operator sees.

Views share a storage. A wrapper (DTensor, AsyncCollectiveTensor) has the storages of the tensors inside it. Sparse and
other non-strided tensors have none.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import is_traceable_wrapper_subclass, is_traceable_wrapper_subclass_type


def any_wraps(types: tuple[type, ...]) -> bool:
    """Whether one of an operator's tensor types wraps other tensors, for which operators of their own will run."""
    return any(is_traceable_wrapper_subclass_type(t) for t in types)


def each_tensor(value: Any) -> Iterator[torch.Tensor]:
    """Tensors among an operator's arguments or results; wrappers are not unpacked."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple, dict)):
        for item in value.values() if isinstance(value, dict) else value:
            yield from each_tensor(item)


def each_local_tensor(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """The plain tensors inside `tensor`; `tensor` itself if it wraps nothing."""
    if is_traceable_wrapper_subclass(tensor):
        names, _ = tensor.__tensor_flatten__()
        for name in names:
            if isinstance(inner := getattr(tensor, name), torch.Tensor):  # DTensor names its mesh too
                yield from each_local_tensor(inner)
    else:
        yield tensor


def each_storage(
    tensor: torch.Tensor, device_type: str, fake_mode: FakeTensorMode | None
) -> Iterator[torch.UntypedStorage]:
    """The storages of `tensor` on `device_type`.

    Fake tensors count only where `fake_mode` made them: DTensor works out shapes with fake tensors of its own.
    """
    for local in each_local_tensor(tensor):
        is_ours = not isinstance(local, FakeTensor) or local.fake_mode is fake_mode
        if is_ours and local.layout is torch.strided and local.device.type == device_type:
            yield local.untyped_storage()
