"""The head split over the vocabulary: each rank computes its columns of the logits and their part of the loss.

Megatron's scheme (arXiv:1909.08053, sec. 3). Legend: T tokens, V local vocabulary.
"""

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle

from dtlayout.ops.loss import Columns, Head


class VocabParallelHead(ParallelStyle):
    """Splits a `Head` by columns; its hidden states come whole, or sharded along the sequence."""

    def __init__(self, input_layout: Replicate | Shard):
        super().__init__()
        self.input_layout = input_layout

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        assert isinstance(module, Head), "only the head has a loss"
        module.columns = _LocalColumns(device_mesh)
        return distribute_module(module, device_mesh, _split_rows, partial(_gather_input, self.input_layout))


class _LocalColumns(Columns):
    """This rank's columns; two all-reduces, of one and of two numbers a token, join what the ranks know."""

    def __init__(self, mesh: DeviceMesh):
        self.group = mesh.get_group()
        self.rank = mesh.get_local_rank()
        self.num_columns = 0
        """Known with the weight."""

    def local(self, weight: Tensor) -> Tensor:
        assert isinstance(weight, DTensor), "tensor parallelism splits the weight"
        local = weight.to_local()
        self.num_columns = local.shape[0]
        return local

    def locate(self, targets_T: Tensor) -> tuple[Tensor, Tensor]:
        index_T = targets_T - self.num_columns * self.rank  # an IGNORED one is below 0
        is_here_T = (index_T >= 0) & (index_T < self.num_columns)
        return index_T.masked_fill(~is_here_T, 0), is_here_T

    def join(self, log_sums_T: Tensor, wanted_T: Tensor) -> tuple[Tensor, Tensor]:
        largest_T = log_sums_T.clone()
        dist.all_reduce(largest_T, dist.ReduceOp.MAX, group=self.group)
        sums = torch.stack(((log_sums_T - largest_T).exp(), wanted_T))
        dist.all_reduce(sums, group=self.group)
        return largest_T + sums[0].log(), sums[1]


def _split_rows(_: str, module: nn.Module, mesh: DeviceMesh) -> None:
    weight = module.get_parameter("weight")
    module.register_parameter("weight", nn.Parameter(distribute_tensor(weight, mesh, [Shard(0)])))


def _gather_input(layout: Replicate | Shard, _: nn.Module, inputs: tuple[Any, ...], mesh: DeviceMesh) -> Any:
    """The hidden states whole on every rank, each of which then knows a part of their gradient."""
    h_BSD, *rest = inputs
    if not isinstance(h_BSD, DTensor):
        h_BSD = DTensor.from_local(h_BSD, mesh, [layout], run_check=False)
    whole = h_BSD.redistribute(placements=[Replicate()])
    return whole.to_local(grad_placements=[Partial()]), *rest
