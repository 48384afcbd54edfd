"""The styles of a plan as what PyTorch applies: its own, and those that it lacks, for norms, embedding and head.

Each rank computes norms on its part: of the sequence under sequence parallelism, or of the heads. DTensor knows
what PyTorch's operators do to shards; a kernel that is none of them gets plain tensors. No rank sees more than its
tokens or heads, so its gradient of the weight is one term of a sum over tp.

Embedding and head are split over the vocabulary: each rank looks up its rows, and computes its columns of the logits
and their part of the loss, as in Megatron (arXiv:1909.08053, sec. 3). Legend: T tokens, V local vocabulary.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
)
from torch.nn import functional as F

from dtlayout.ops.loss import Columns, Head
from dtlayout.ops.norm import RMSNorm
from dtlayout.plans.plan import TensorStyle


class SequenceNorm(SequenceParallel):
    """`SequenceParallel` that gives an `RMSNorm`, whose kernel may be any, plain tensors; other norms get DTensors."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        if isinstance(module, RMSNorm):
            # Not a forward for each instance, for which torch.compile would compile each block anew.
            module.__class__ = _ShardedRMSNorm
        return super()._apply(module, device_mesh)


class HeadNorm(ParallelStyle):
    """An `RMSNorm` of each head, whose heads come as plain tensors of this rank."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        assert isinstance(module, RMSNorm), "heads are normalised by an RMSNorm"
        module.__class__ = _ShardedRMSNorm
        return distribute_module(module, device_mesh)  # which replicates the weight


class _ShardedRMSNorm(RMSNorm):
    def forward(self, x: Tensor) -> Tensor:
        assert isinstance(self.weight, DTensor), "tensor parallelism makes it one"
        weight = self.weight.to_local(grad_placements=[Partial()])
        if not isinstance(x, DTensor):
            return self.function(x, weight, self.eps)
        local = self.function(x.to_local(), weight, self.eps)
        return DTensor.from_local(local, x.device_mesh, x.placements, run_check=False)


class VocabParallelEmbedding(ParallelStyle):
    """Splits an embedding by rows: each rank looks up its own tokens, and the sum over tp comes whole or sharded.

    So a rank's gradient is of its own rows; DTensor's would be of all of them, until they are summed over tp.
    """

    def __init__(self, output_layout: Replicate | Shard):
        super().__init__()
        self.output_layout = output_layout

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        module.__class__ = _SplitEmbedding
        assert isinstance(module, _SplitEmbedding), "the style is for an nn.Embedding"
        module.columns = _LocalVocabulary(device_mesh)
        return distribute_module(module, device_mesh, _split_rows, output_fn=partial(_add_up, self.output_layout))


class _SplitEmbedding(nn.Embedding):
    columns: "_LocalVocabulary"

    def forward(self, tokens: Tensor) -> Tensor:
        weight_VD = self.columns.local(self.weight)
        index, is_here = self.columns.locate(tokens)
        return F.embedding(index, weight_VD).masked_fill(~is_here[..., None], 0)


def _add_up(layout: Replicate | Shard, _: nn.Module, output: Any, mesh: DeviceMesh) -> Any:
    terms = DTensor.from_local(output, mesh, [Partial()], run_check=False)
    return terms.redistribute(placements=[layout]).to_local()


class VocabParallelHead(ParallelStyle):
    """Splits a `Head` by columns; its hidden states come whole, or sharded along the sequence."""

    def __init__(self, input_layout: Replicate | Shard):
        super().__init__()
        self.input_layout = input_layout

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        assert isinstance(module, Head), "only the head has a loss"
        module.columns = _LocalVocabulary(device_mesh)
        return distribute_module(module, device_mesh, _split_rows, partial(_gather_input, self.input_layout))


class _LocalVocabulary(Columns):
    """This rank's part; two all-reduces, of one and of two numbers a token, join what the ranks know of a loss."""

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


def _prepare_first_input(placement: Replicate | Shard) -> PrepareModuleInput:
    """The first argument, hidden states, goes in replicated; the RoPE tables stay as they are.

    One DTensor for all the matmuls that read it: their gradients add up before one collective.
    """
    return PrepareModuleInput(input_layouts=(placement,), desired_input_layouts=(Replicate(),), use_local_output=False)


SEQUENCE = Shard(1)  # hidden states are [B, S, D]

STYLES: dict[TensorStyle, Callable[[], ParallelStyle]] = {
    "colwise": ColwiseParallel,
    "rowwise": RowwiseParallel,
    "rowwise-scatter": lambda: RowwiseParallel(output_layouts=SEQUENCE),
    "embedding": lambda: VocabParallelEmbedding(Replicate()),
    "embedding-scatter": lambda: VocabParallelEmbedding(SEQUENCE),
    "input": lambda: _prepare_first_input(Replicate()),
    "input-gather": lambda: _prepare_first_input(SEQUENCE),
    "sequence": SequenceNorm,
    "head": lambda: VocabParallelHead(Replicate()),
    "head-gather": lambda: VocabParallelHead(SEQUENCE),
    "head-norm": HeadNorm,
}
