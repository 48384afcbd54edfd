"""A norm under sequence parallelism, computed by each rank on its shard of the sequence.

DTensor knows what PyTorch's operators do to shards; a kernel that is none of them gets plain tensors. No rank sees more
than its tokens, so its gradient of the weight is one term of a sum over tp.
"""

from functools import partial

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial
from torch.distributed.tensor.parallel import SequenceParallel

from dtlayout.ops.norm import NORMS, RMSNorm


class SequenceNorm(SequenceParallel):
    """`SequenceParallel` that gives an `RMSNorm`, whose kernel may be any, plain tensors; other norms get DTensors."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        if isinstance(module, RMSNorm):
            module.forward = partial(_normalize_shard, module)  # type: ignore[method-assign]
        return super()._apply(module, device_mesh)


def _normalize_shard(norm: RMSNorm, x: DTensor) -> DTensor:
    weight = norm.weight
    assert isinstance(weight, DTensor), "sequence parallelism replicates it"
    local = NORMS[norm.kernel](x.to_local(), weight.to_local(grad_placements=[Partial()]), norm.eps)
    return DTensor.from_local(local, x.device_mesh, x.placements, run_check=False)
