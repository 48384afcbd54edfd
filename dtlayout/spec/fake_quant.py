"""Formats of few bits to which a training rounds the weights by which it multiplies. No torch.

They are export formats of the same names: groups and scales of a weight are theirs.
"""

from dataclasses import dataclass

from dtlayout.spec.export_format import EXPORT_FORMATS


@dataclass(frozen=True, kw_only=True)
class FakeQuantFormat:
    """A format of the values of a weight [N, D] that a matmul reads (ops/fake_quantized.py)."""

    name: str
    """Name in configs and tables, and of the export format."""
    scale_bytes: int
    """Bytes of the scales of one group, of a computation in 32 bits or less."""
    num_code_passes: int
    """Passes over an exact weight in which its numbers become codes, before they are clamped."""
    num_value_passes: int
    """Passes in which clamped codes become values."""

    @property
    def group(self) -> int:
        """Columns of a group; 0 where each row is one."""
        return EXPORT_FORMATS[self.name].group

    def count_groups(self, columns: float) -> float:
        """Groups of a row of so many columns."""
        return columns / self.group if self.group else 1


FAKE_QUANT_FORMATS: dict[str, FakeQuantFormat] = {
    each.name: each
    for each in (
        FakeQuantFormat(name="int8", scale_bytes=4, num_code_passes=2, num_value_passes=1),
        FakeQuantFormat(name="int4", scale_bytes=4, num_code_passes=3, num_value_passes=3),
    )
}
"""Name in `precision.fake_quant` → format."""
