"""Work of an operator on a device: a matmul, attention, or a pass that moves bytes. Plain values, no torch."""

from dataclasses import dataclass
from typing import ClassVar


@dataclass(frozen=True)
class Matmul:
    """m×k times k×n, as often as `batch` says."""

    m: int
    n: int
    k: int
    batch: int = 1
    is_scaled: bool = False
    """Whether it multiplies in `Precision.matmuls`, below the compute format."""

    @property
    def flops(self) -> int:
        """Multiplications and additions, 2·m·n·k for each of the batch."""
        return 2 * self.batch * self.m * self.n * self.k


@dataclass(frozen=True)
class AttentionCall:
    """Attention in one kernel, forward or backward."""

    flops: int
    """Counted whole, as MFU does, of which a causal mask hides half: 4·S²·K a head and sample forward, 2.5 times that
    backward; of keys that every query sees, as in a piece of a sequence that cp shares, twice what is computed."""


@dataclass(frozen=True)
class Pass:
    """A kernel that does little more than to read and write."""

    moved_bytes: int
    """Bytes that the kernel reads and writes."""
    flops: ClassVar[int] = 0
    """None that MFU counts."""


KernelCall = Matmul | AttentionCall | Pass
