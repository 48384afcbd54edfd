"""A norm under sequence parallelism, computed by each rank on its shard of the sequence.

DTensor knows what PyTorch's operators do to shards; a kernel that is none of them gets plain tensors. No rank sees more
than its tokens, so its gradient of the weight is one term of a sum over tp.
"""

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial
from torch.distributed.tensor.parallel import SequenceParallel

from dtlayout.ops.norm import RMSNorm


class SequenceNorm(SequenceParallel):
    """`SequenceParallel` that gives an `RMSNorm`, whose kernel may be any, plain tensors; other norms get DTensors."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        if isinstance(module, RMSNorm):
            # Not a forward for each instance, for which torch.compile would compile each block anew.
            module.__class__ = _ShardedRMSNorm
        return super()._apply(module, device_mesh)


class _ShardedRMSNorm(RMSNorm):
    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight
        assert isinstance(x, DTensor) and isinstance(weight, DTensor), "sequence parallelism makes them"
        local = self.function(x.to_local(), weight.to_local(grad_placements=[Partial()]), self.eps)
        return DTensor.from_local(local, x.device_mesh, x.placements, run_check=False)
