"""Measurements of a calibration, as a file that several fits may read. No torch.

Every time is that of one rank while all ranks do the same work, so it includes the sharing of cores and links;
`alone_s` is the time of a rank by itself.
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
    """Time of one matmul, m×k times k×n."""

    m: int
    n: int
    k: int
    format: str
    """Number format of the matrices, as in `Precision`."""
    seconds: float
    alone_s: float


@dataclass(frozen=True, kw_only=True)
class AttentionTime:
    """Time of one causal attention [batch, heads, seq_len, head_dim]."""

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
    """Time of one collective of all groups of `num_ranks` ranks, `stride` apart, at the same time."""

    kind: str
    """all-reduce, all-gather, reduce-scatter, or message from each rank to the next."""
    num_ranks: int
    stride: int
    size_bytes: int
    """Bytes of the whole tensor, as `costmodel.comm` counts it; for a message, the bytes that are sent."""
    crosses_nodes: bool
    seconds: float


@dataclass(frozen=True, kw_only=True)
class ProbeTime:
    """Time of one step of the trainer; `costmodel` predicts each part of it."""

    model: ModelShape
    batch: Batch
    layout: Layout
    kernels: Kernels
    precision: Precision
    seconds: float


@dataclass(frozen=True, kw_only=True)
class Measured:
    """All measurements of some machines."""

    device: str
    """Name of the device in torch."""
    gpu: str
    """GPU type whose data sheet is the base; cpu for none."""
    torch: str
    """Version of torch."""
    date: str
    """Date as YYYY-MM-DD."""
    num_ranks: int
    ranks_per_node: int
    memory_bytes: int
    """Memory of a rank, in bytes."""
    steal: float
    """Share of the processors' time that a host of virtual machines gave to others; times of probes leave it out."""
    stream_bytes_per_s: float
    """Bytes per second that large elementwise kernels read and write."""
    host_s: float
    """Seconds of a loop of small operations on each rank, while all ranks run it."""
    host_alone_s: float
    matmuls: tuple[MatmulTime, ...]
    attention: tuple[AttentionTime, ...]
    collectives: tuple[CollectiveTime, ...]
    probes: tuple[ProbeTime, ...]
    disk_bytes_per_s: float | None = None
    """Bytes per second that a node reads and writes on its disk, all its ranks together; None if not measured."""
    disk_folder: str = ""
    """Folder in which that was measured."""

    @property
    def contention(self) -> float:
        """Factor by which all work is slower while all ranks are at work; 1 if they share nothing."""
        pairs = [(self.host_s, self.host_alone_s), *((each.seconds, each.alone_s) for each in self.matmuls)]
        return max(1.0, median_high(seconds / alone_s for seconds, alone_s in pairs))

    def write(self, path: Path) -> None:
        """Write the measurements to a JSON file."""
        path.write_text(json.dumps(asdict(self), indent=1) + "\n", encoding="utf-8")

    @staticmethod
    def read(path: Path) -> "Measured":
        """Read a file that `write` wrote; InvalidConfig for any other file."""
        try:
            with toml.problems_of(f"{path} holds no measurements of dtlayout calibrate"):
                return toml.parse(parse_json(path.read_text(encoding="utf-8")), Measured)
        except OSError as error:
            raise InvalidConfig(f"measurements {path} cannot be read: {error.strerror}") from None
        except ValueError as error:
            raise InvalidConfig(f"{path} holds no measurements of dtlayout calibrate: {error}") from None
