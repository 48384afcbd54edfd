"""Norms that each rank computes on its part: of the sequence under sequence parallelism, or of the heads.

DTensor knows what PyTorch's operators do to shards; a kernel that is none of them gets plain tensors. No rank sees more
than its tokens or heads, so its gradient of the weight is one term of a sum over tp.
"""

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, distribute_module
from torch.distributed.tensor.parallel import ParallelStyle, SequenceParallel

from dtlayout.ops.norm import RMSNorm


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
        local: Tensor = self.function(x.to_local() if isinstance(x, DTensor) else x, weight, self.eps)
        return (
            DTensor.from_local(local, x.device_mesh, x.placements, run_check=False) if isinstance(x, DTensor) else local
        )
