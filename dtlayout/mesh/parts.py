"""A rank's part of a tensor that ranks share."""

from torch import Tensor
from torch.distributed.tensor import DTensor


def local_part(tensor: Tensor) -> Tensor:
    """This rank's part of a DTensor, without a copy; any other tensor itself.

    FSDP2 moves the part of a parameter in its first forward, so nobody keeps it.
    """
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
