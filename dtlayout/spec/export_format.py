"""Formats of few bits in which an export stores the weights of linear layers, as `transformers` opens them. No torch.

Norms, embedding, head and biases stay in bfloat16.
"""

from dataclasses import dataclass

from dtlayout.spec.kernel_records import Package

_TORCHAO = Package("torchao", "pip install 'dtlayout[quantize]'")


@dataclass(frozen=True, kw_only=True)
class ExportFormat:
    """A format of few bits of an exported weight [N, D], whose rows are cut into groups that share a scale."""

    name: str
    """Name for `dtlayout convert --quantize`."""
    group: int
    """Elements of a row that share a scale; 0 where each row has one."""
    package: Package | None
    """Package that writes the format; None where none is needed."""
    opened_by: str
    """Words for users: the packages beside `transformers` that open a folder, and the devices that compute it."""


EXPORT_FORMATS: dict[str, ExportFormat] = {
    each.name: each
    for each in (
        # Symmetric, a scale in fp32 for each row.
        ExportFormat(
            name="int8", group=0, package=_TORCHAO,
            opened_by="transformers opens it with torchao, and computes it on a CPU or a GPU",
        ),
        # A scale and a zero point in bf16 for each group. torchao has no kernel for it on a CPU.
        ExportFormat(
            name="int4", group=128, package=_TORCHAO,
            opened_by="transformers opens it with torchao, and computes it on a GPU alone, with the package mslk",
        ),
        # The 16 values of QLoRA, a scale in fp32 for each group.
        ExportFormat(
            name="nf4", group=64, package=None,
            opened_by="transformers opens it with bitsandbytes, and computes it on a CPU or a GPU",
        ),
    )
}  # fmt: skip
"""Name → format."""
