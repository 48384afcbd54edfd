"""Formats in which the frozen weights of linear layers are stored, below the compute format. No torch."""

from dataclasses import dataclass

SCALE = "_scale"
"""Ends the name of the parameter that has the scales of a weight's blocks."""


@dataclass(frozen=True, kw_only=True)
class BaseFormat:
    """A format of few bits: a row of a weight is cut into blocks, each with a scale in the compute format."""

    name: str
    """Name in `precision.base`."""
    bits: int
    """Bits of an element, a divisor of 8; a byte holds neighbours in a row."""
    block: int
    """Elements of a row that share a scale. Blocks are short parts of rows, so that tp can split rows between them."""

    lookup_bytes: float = 0.0
    """Bytes of an element of the indices that codes become before a table of values is read; 0 without a table."""

    def __post_init__(self) -> None:
        assert 8 % self.bits == 0, f"{self.name}: elements of {self.bits} bits lie across bytes"

    def stored_bytes(self, compute_bytes: int) -> float:
        """Bytes of an element with its part of a scale, which is in a compute format of so many bytes.

        >>> BASE_FORMATS["nf4"].stored_bytes(2)
        0.53125
        """
        return self.bits / 8 + compute_bytes / self.block

    def code_columns(self, columns: int) -> int:
        """Bytes of a row of so many elements, scales not counted."""
        return columns * self.bits // 8

    def scale_columns(self, columns: int) -> int:
        """Scales of a row of so many elements, a whole number of blocks."""
        return columns // self.block


BASE_FORMATS: dict[str, BaseFormat] = {
    each.name: each
    for each in (
        # QLoRA's (arXiv:2305.14314): quantiles of a normal distribution; 4.25 bits a weight with scales in bf16.
        # A byte's two codes are looked up at once, by an int32.
        BaseFormat(name="nf4", bits=4, block=64, lookup_bytes=2.0),
        # Symmetric, -127 to 127; 8.25 bits a weight.
        BaseFormat(name="int8", bits=8, block=64),
    )
}
"""Name → format."""
