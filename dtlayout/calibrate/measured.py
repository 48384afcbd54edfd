"""What calibration measures, as a file that one fit after another may read. No torch.

Every time is that of one rank while all ranks do the same, so that what they share is in it; `alone_s` is that of a
rank by itself.
"""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median_high

from dtlayout.base import toml
from dtlayout.base.errors import InvalidConfig
from dtlayout.base.files import parse_json
from dtlayout.spec.batch import Batch
from dtlayout.spec.kernels import Kernels
from dtlayout.spec.layout import Layout
from dtlayout.spec.model_shape import ModelShape
from dtlayout.spec.precision import Precision


@dataclass(frozen=True, kw_only=True)
class MatmulTime:
    """One m×k times k×n."""

    m: int
    n: int
    k: int
    format: str
    """Number format of the matrices, as `Precision` calls it."""
    seconds: float
    alone_s: float


@dataclass(frozen=True, kw_only=True)
class AttentionTime:
    """One causal attention [batch, heads, seq_len, head_dim]."""

    kernel: str
    """Name of the kernel in `Kernels.attention`."""
    batch: int
    heads: int
    seq_len: int
    head_dim: int
    format: str
    forward_s: float
    backward_s: float


@dataclass(frozen=True, kw_only=True)
class CollectiveTime:
    """One collective of all groups of `num_ranks` ranks, `stride` apart, at the same time."""

    kind: str
    """all-reduce, all-gather, reduce-scatter, or message from each rank to the next."""
    num_ranks: int
    stride: int
    size_bytes: int
    """Size of the whole tensor, as `costmodel.comm` counts it; of a message, what is sent."""
    crosses_nodes: bool
    seconds: float


@dataclass(frozen=True, kw_only=True)
class ProbeTime:
    """One step of the trainer, whose every part `costmodel` predicts."""

    model: ModelShape
    batch: Batch
    layout: Layout
    kernels: Kernels
    precision: Precision
    seconds: float


@dataclass(frozen=True, kw_only=True)
class Measured:
    """All that was measured on some machines."""

    device: str
    """Name of the device in torch."""
    gpu: str
    """GPU type whose data sheet is the base; cpu for none."""
    torch: str
    """Version of torch."""
    date: str
    """YYYY-MM-DD."""
    num_ranks: int
    ranks_per_node: int
    memory_bytes: int
    """Memory of a rank."""
    steal: float
    """Share of the processors' time that a host of virtual machines gave to others; probes leave it out."""
    stream_bytes_per_s: float
    """Bytes a second that large elementwise kernels read and write."""
    host_s: float
    """Seconds of a loop of small operations."""
    host_alone_s: float
    matmuls: tuple[MatmulTime, ...]
    attention: tuple[AttentionTime, ...]
    collectives: tuple[CollectiveTime, ...]
    probes: tuple[ProbeTime, ...]

    @property
    def contention(self) -> float:
        """How much longer everything takes while all ranks are at work, 1 if they share nothing."""
        pairs = [(self.host_s, self.host_alone_s), *((each.seconds, each.alone_s) for each in self.matmuls)]
        return max(1.0, median_high(seconds / alone_s for seconds, alone_s in pairs))

    def write(self, path: Path) -> None:
        """Write a JSON file."""
        path.write_text(json.dumps(asdict(self), indent=1) + "\n", encoding="utf-8")

    @staticmethod
    def read(path: Path) -> "Measured":
        """Read a file that `write` wrote; InvalidConfig if it is something else."""
        try:
            with toml.problems_of(f"{path} holds no measurements of dtlayout calibrate"):
                return toml.parse(parse_json(path.read_text(encoding="utf-8")), Measured)
        except OSError as error:
            raise InvalidConfig(f"measurements {path} cannot be read: {error.strerror}") from None
        except ValueError as error:
            raise InvalidConfig(f"{path} holds no measurements of dtlayout calibrate: {error}") from None
