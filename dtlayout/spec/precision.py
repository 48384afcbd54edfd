"""Precision: the number formats of parameters, activations, gradients and matmuls."""

from dataclasses import dataclass
from typing import Literal, get_args

from dtlayout.base.refusals import Refusal
from dtlayout.base.validators import Ranged

BaseName = Literal["compute", "nf4", "int8"]
"""Names of [precision] base: that of compute, and those of `BASE_FORMATS`."""
FakeQuantName = Literal["none", "int8", "int4"]
"""Names of [precision] fake_quant: none, and those of `FAKE_QUANT_FORMATS`."""
Format = Literal["float64", "float32", "bfloat16", "float16"]
MasterFormat = Literal["float64", "float32", "bfloat16"]
"""Formats that hold updates of parameters."""
_DIGITS: dict[str, int] = {"float64": 53, "float32": 24, "bfloat16": 8, "float16": 11}
"""Bits of a number's digits in each format."""
ALIGNMENT = 16
"""Divisor of the sizes of a matrix that multiplies below bf16, which kernels ask for."""
BYTES: dict[str, int] = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True, kw_only=True)
class MatmulFormat:
    """A format below bf16 in which the linear layers of blocks multiply.

    Head, attention, norms and sums stay in the compute format. Bytes are those of one element. Casts of weights that
    happen once a step are left out.
    """

    name: str
    """Name in configs and tables."""
    peak: Literal["fp8", "fp4"]
    """Units of the GPU that multiply in it."""
    scales_blocks: bool = False
    """Whether the units take a scale for each block of elements, as only units that also multiply fp4 do."""
    scales_tensors: bool = False
    """Whether a whole tensor has one scale, so that ranks with parts of it tell each other their largest numbers."""
    cast_bytes: float
    """Bytes read and written to cast an input of a matmul, or a gradient that two matmuls read: the scales are found,
    and rows and columns are both written in their order."""
    gathered_bytes: float
    """Bytes of a weight when sharded data parallelism gathers it."""
    sent_bytes: float
    """Bytes of an activation when sequence parallelism gathers it; sums are sent in the compute format."""
    held_bytes: float
    """Bytes of an activation that a program keeps as it was cast."""


MATMUL_FORMATS: dict[str, MatmulFormat] = {
    each.name: each
    for each in (
        # A scale for the whole tensor: one pass finds it, one casts and writes the rows' and the columns' order.
        MatmulFormat(name="fp8-tensorwise", peak="fp8", scales_tensors=True,
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
"""Name → format. Which of them a program multiplies in, its engine's file says (`matmuls`)."""


@dataclass(frozen=True, kw_only=True)
class Precision(Ranged, section="precision"):
    """Number formats of mixed precision, as FSDP2 carries it out; where all are equal, nothing is cast."""

    params: MasterFormat = "float32"
    """Format of the master parameters and of the optimizer's state, which are sharded over dp_shard."""
    compute: Format = "bfloat16"
    """Format of parameters and activations in forward and backward. float16 is for GPUs that have no bfloat16; its loss
    is scaled (`train.loss_scale`)."""
    reduce: Format = "float32"
    """Format of gradients while they are accumulated and summed over the data-parallel ranks."""
    matmuls: str = "compute"
    """Format in which the linear layers of blocks multiply: that of compute, or with compute = "bfloat16"
    fp8-tensorwise or fp8-rowwise, as torchao's recipes of these names do; mxfp8 and nvfp4 can only be predicted. Layers
    with a side that 16 does not divide stay in bfloat16, and so do routed experts. Not beside `base` or tp_overlap;
    compile = "blocks" makes it worth its casts."""

    fake_quant: FakeQuantName = "none"
    """Format of few bits to which the weights of linear layers in blocks are rounded before each matmul, while the full
    weights train: int8 with a scale for each row, or int4 with a scale and a zero point for 128 columns, as
    `dtlayout convert --quantize` of the same name writes them. The gradient goes straight through. Not beside experts,
    [adapter], `matmuls` below compute or tp_overlap."""

    base: BaseName = "compute"
    """Format in which the frozen weights of linear layers are stored, with [adapter]: that of compute, or nf4 or int8
    with a scale for 64 elements in the compute format. They are computed out of it for each matmul. Routers, experts,
    embedding and head stay in the compute format."""

    def find_broken(self) -> list[Refusal]:
        """A refusal for each format that is unknown, or that does not go with another one."""
        of_masters = [*get_args(MasterFormat)]
        of_keys = {"params": of_masters, "compute": [*BYTES], "reduce": [*BYTES]}
        broken = [
            Refusal(name, f"precision.{name}={getattr(self, name)!r} is unknown", f"use one of {formats}")
            for name, formats in of_keys.items()
            if getattr(self, name) not in BYTES
        ]
        if self.params == "float16":
            what = "precision.params=float16 cannot hold updates: what is below 6e-8 is 0 there"
            broken.append(Refusal("params", what, "use params=float32"))
        if self.reduce == "float16" != self.compute:
            what = f"precision.reduce=float16 sums gradients that nothing scales in precision.compute={self.compute}"
            broken.append(Refusal("reduce", what, "use reduce=float32, or compute=float16"))
        if self.base not in (bases := get_args(BaseName)):
            broken.append(Refusal("base", f"precision.base={self.base!r} is unknown", f"use one of {list(bases)}"))
        if not broken and _DIGITS[self.params] < _DIGITS[self.compute]:
            what = f"precision.params={self.params} is coarser than precision.compute={self.compute}"
            enough = min(
                (each for each in get_args(MasterFormat) if _DIGITS[each] >= _DIGITS[self.compute]),
                key=_DIGITS.__getitem__,
            )
            advice = f"use params={enough} or finer"
            broken.append(Refusal("params", f"{what}: the masters would lose what the step computed", advice))
        if self.matmuls not in (known := ("compute", *MATMUL_FORMATS)):
            what = f"precision.matmuls={self.matmuls!r} is unknown"
            broken.append(Refusal("matmuls", what, f"use one of {list(known)}"))
        elif self.matmul_format and self.compute != "bfloat16":
            what = f"precision.matmuls={self.matmuls} is cast from bfloat16, and precision.compute is {self.compute}"
            broken.append(Refusal("matmuls", what))
        if self.fake_quant not in (known := get_args(FakeQuantName)):
            what = f"precision.fake_quant={self.fake_quant!r} is unknown"
            broken.append(Refusal("fake_quant", what, f"use one of {list(known)}"))
        elif self.fake_quant != "none" and self.matmul_format:
            what = f"precision.fake_quant={self.fake_quant} rounds weights for matmuls in the compute format"
            what += f", and precision.matmuls={self.matmuls} casts them"
            broken.append(Refusal("fake_quant", what, "use fake_quant=none or matmuls=compute"))
        return broken

    @property
    def multiplies_in(self) -> str:
        """Name of the format in which the linear layers of blocks multiply."""
        return self.compute if self.matmul_format is None else self.matmuls

    @property
    def matmul_format(self) -> MatmulFormat | None:
        """The format in which linear layers multiply; None where it is the compute format."""
        return MATMUL_FORMATS.get(self.matmuls)
