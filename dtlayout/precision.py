"""Precision: the number format of each thing that training keeps."""

from dataclasses import dataclass
from typing import Literal, get_args

from dtlayout.errors import InvalidConfig

Format = Literal["float64", "float32", "bfloat16"]
BYTES: dict[str, int] = {"float64": 8, "float32": 4, "bfloat16": 2}


@dataclass(frozen=True, kw_only=True)
class Precision:
    """Mixed precision as FSDP2 carries it out; equal formats everywhere mean that nothing is cast."""

    params: Format = "float32"
    """Master parameters and the optimizer's state, sharded over dp_shard."""
    compute: Format = "bfloat16"
    """Parameters and activations in forward and backward."""
    reduce: Format = "float32"
    """Gradients while they are accumulated and summed over the data-parallel ranks."""

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
        if problems:
            raise InvalidConfig(problems)
