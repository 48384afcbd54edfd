"""Precision: the number format of each thing that training keeps."""

from dataclasses import dataclass
from typing import Literal, get_args

from dtlayout.base.errors import InvalidConfig

Format = Literal["float64", "float32", "bfloat16"]
BYTES: dict[str, int] = {"float64": 8, "float32": 4, "bfloat16": 2}


@dataclass(frozen=True, kw_only=True)
class MatmulFormat:
    """How the linear layers of blocks multiply below bf16; head, attention, norms and sums stay in the compute format.

    Bytes are of an element, and of a weight's are those that are cast once a step left out.
    """

    name: str
    """What configs and tables call it."""
    peak: Literal["fp8", "fp4"]
    """The units of the GPU that multiply."""
    scales_blocks: bool = False
    """Whether the units take a scale for each block of elements; those that do also multiply fp4."""
    cast_bytes: float
    """Read and written to cast what a matmul reads, and a gradient that two read: scales found, both orders written."""
    gathered_bytes: float
    """Of a weight that sharded data parallelism gathers."""
    sent_bytes: float
    """Of an activation that sequence parallelism gathers; what is summed has the compute format."""
    held_bytes: float
    """Of an activation that a program keeps as it was cast."""


MATMUL_FORMATS: dict[str, MatmulFormat] = {
    each.name: each
    for each in (
        # A scale for the whole tensor: one pass finds it, one casts and writes the rows' and the columns' order.
        MatmulFormat(name="fp8-tensorwise", peak="fp8",
                     cast_bytes=6.0, gathered_bytes=1.0, sent_bytes=1.0, held_bytes=1.0),
        # A scale for each row in either order: two such pairs of passes; what is gathered has no row yet.
        MatmulFormat(name="fp8-rowwise", peak="fp8",
                     cast_bytes=10.0, gathered_bytes=2.0, sent_bytes=2.0, held_bytes=1.0),
        # A scale for 32 elements in either order: one pass that reads bf16 and writes both, scales of a byte.
        MatmulFormat(name="mxfp8", peak="fp8", scales_blocks=True,
                     cast_bytes=4.1, gathered_bytes=1.0, sent_bytes=1.0, held_bytes=1.03),
        # A scale for 16 elements and one for the tensor; gradients of weights are turned by a Hadamard matrix first.
        MatmulFormat(name="nvfp4", peak="fp4", scales_blocks=True,
                     cast_bytes=7.1, gathered_bytes=2.0, sent_bytes=0.6, held_bytes=0.6),
    )
}  # fmt: skip
"""Name → how linear layers compute with it; only the cost model knows them, and the trainer refuses them."""


@dataclass(frozen=True, kw_only=True)
class Precision:
    """Mixed precision as FSDP2 carries it out; equal formats everywhere mean that nothing is cast."""

    params: Format = "float32"
    """Master parameters and the optimizer's state, sharded over dp_shard."""
    compute: Format = "bfloat16"
    """Parameters and activations in forward and backward."""
    reduce: Format = "float32"
    """Gradients while they are accumulated and summed over the data-parallel ranks."""
    matmuls: str = "compute"
    """Format in which the linear layers of blocks multiply, where it is another one: fp8-tensorwise, fp8-rowwise, mxfp8
    or nvfp4. These can only be predicted."""

    def __post_init__(self) -> None:
        problems = [
            f"precision.{name}={getattr(self, name)!r} is unknown; use one of {list(get_args(Format))}"
            for name in ("params", "compute", "reduce")
            if getattr(self, name) not in BYTES
        ]
        if not problems and BYTES[self.params] < BYTES[self.compute]:
            problems.append(
                f"precision.params={self.params} is coarser than precision.compute={self.compute}: the masters would "
                f"lose what the step computed; use params={self.compute} or finer"
            )
        if self.matmuls not in ("compute", *MATMUL_FORMATS):
            problems.append(f"precision.matmuls={self.matmuls!r} is unknown; use one of {['compute', *MATMUL_FORMATS]}")
        elif self.matmul_format and self.compute != "bfloat16":
            problems.append(
                f"precision.matmuls={self.matmuls} is cast from bfloat16, and precision.compute is {self.compute}"
            )
        if problems:
            raise InvalidConfig(problems)

    @property
    def multiplies_in(self) -> str:
        """The format of the matmuls of blocks."""
        return self.compute if self.matmul_format is None else self.matmuls

    @property
    def training_problems(self) -> list[str]:
        """What keeps this trainer from it."""
        if self.matmul_format is None:
            return []
        return [f"precision.matmuls={self.matmuls} can be predicted, not trained; use precision.matmuls=compute"]

    @property
    def matmul_format(self) -> MatmulFormat | None:
        """What linear layers multiply in, where that is not the compute format."""
        return MATMUL_FORMATS.get(self.matmuls)
