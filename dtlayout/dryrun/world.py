"""A simulated cluster: this process acts as any rank of any number of ranks, with tensors that have no memory."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_impls import register_op_impl
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.testing._internal.distributed.fake_pg import FakeStore


@contextmanager
def fake_world(rank: int, world_size: int) -> Iterator[None]:
    """Inside, torch.distributed believes that this is one of `world_size` ranks; receives leave buffers as they are."""
    dist.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


@register_op_impl(torch.ops._c10d_functional.wait_tensor.default)
def _wait_for_fake(mode: FakeTensorMode, operator: Any, tensor: Tensor) -> Tensor:
    """The tensor itself: waiting keeps its storage, while torch's own fake of this operator makes another storage."""
    return tensor


@contextmanager
def fake_tensors() -> Iterator[FakeTensorMode]:
    """Make the mode in which tensors have no memory; enter it around the code whose tensors shall have none.

    DTensor works out global shapes with fake tensors, in the fake mode that is active. Here it finds no active mode and
    makes one of its own, so that tensors as large as the whole cluster's are not counted as this rank's.
    """
    propagate = ShardingPropagator._propagate_tensor_meta_non_cached

    def propagate_alone(*arguments: Any) -> Any:
        with unset_fake_temporarily():
            return propagate(*arguments)

    with patch.object(ShardingPropagator, "_propagate_tensor_meta_non_cached", propagate_alone):
        yield FakeTensorMode(allow_non_fake_inputs=True)
