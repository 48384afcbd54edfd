"""What a dry run's report says of a rank, as tables for a terminal and for a page."""

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass

from dtlayout.costmodel.memory import MemoryEstimate
from dtlayout.dryrun.report import RankReport
from dtlayout.layout import Layout
from dtlayout.mesh.axes import axis_sizes

GIB, MIB = 2**30, 2**20
MARK_ABOVE = 0.05
"""Difference between prediction and dry run from which on it is marked."""
_PARTS = {
    "parameter": "parameters", "gradient": "gradients", "optimizer": "optimizer", "activation": "activations",
    "gathered": "gathered", "communication": "messages", "other": "temporary",
}  # fmt: skip
"""Categories of the tracker → what they are called here."""


@dataclass(frozen=True)
class RankTables:
    """One rank: where it is and what it reached, and tables whose first row has the names of columns."""

    place: str
    peak: str
    run: str
    tables: list[list[list[str]]]

    @classmethod
    def make(cls, report: RankReport, layout: Layout, predicted: MemoryEstimate | None) -> "RankTables":
        """With the comparison as the last table where there is a prediction."""
        unit, size = choose_unit(report.peak_bytes)
        degrees = axis_sizes(layout)
        place = ", ".join(
            f"{axis} {i} of {degrees[axis]}" for axis, i in report.coordinate.items() if degrees[axis] > 1
        )
        at = f"{report.module or 'no module'}, {report.action or 'before the first action'}"
        run, whole = report.num_microbatches_run, report.num_microbatches
        plural = "microbatch" if whole == 1 else "microbatches"
        tables = [list(_list_parts(report)), list(_list_messages(report)), list(_list_flops(report))]
        return cls(
            place=f"rank {report.rank}{'  ' if place else ''}{place}",
            peak=f"{report.peak_bytes / size:.3f} {unit} in {at}",
            run=f"{whole} {plural}" if run == whole else f"{run} of {whole} {plural}, the rest repeats",
            tables=tables if predicted is None else [*tables, list(_compare(report, predicted))],
        )


def choose_unit(nbytes: float) -> tuple[str, int]:
    """The unit in which people read so many bytes, and its size."""
    return ("GiB", GIB) if nbytes >= GIB else ("MiB", MIB)


def components(report: RankReport, predicted: MemoryEstimate) -> dict[str, tuple[float, float]]:
    """Bytes of each, dry and predicted.

    A message between stages is an activation to the formula; what FSDP2 has gathered and not yet reduced is a parameter
    or a gradient to one of them and a buffer to the other.
    """
    dry = report.parts
    return {
        "optimizer": (dry.optimizer, predicted.optimizer),
        "activations, logits, messages": (
            dry.activation + dry.communication,
            predicted.activations + predicted.logits,
        ),
        "parameters, gradients, buffers": (
            dry.parameter + dry.gathered + dry.gradient + dry.other,
            predicted.parameters + predicted.gradients + predicted.buffers + predicted.overhead,
        ),
        "peak": (report.peak_bytes, predicted.total),
    }


def _list_parts(report: RankReport) -> Iterator[list[str]]:
    unit, size = choose_unit(report.peak_bytes)
    parts = asdict(report.parts)
    yield ["at the peak", unit, "share"]
    for key, name in _PARTS.items():
        yield [name, f"{parts[key] / size:.3f}", f"{parts[key] / report.peak_bytes:.1%}"]


def _list_messages(report: RankReport) -> Iterator[list[str]]:
    yield ["message", "axis", "bytes", "a step", "crosses nodes"]
    for row in report.traffic:
        yield [row.name, row.axis, f"{row.nbytes:,}", str(row.count), "yes" if row.crosses_node else "no"]


def _list_flops(report: RankReport) -> Iterator[list[str]]:
    """By module, those of all blocks together."""
    flops: Counter[str] = Counter()
    for module, count in report.flops.items():
        flops[re.sub(r"\.\d+\b", ".*", module)] += count
    yield ["FLOPs", "TFLOP a step"]
    for module, count in flops.most_common():
        yield [module, f"{count / 1e12:,.4f}"]


def _compare(report: RankReport, predicted: MemoryEstimate) -> Iterator[list[str]]:
    """Components as far as both tell them apart; the last column marks where they differ much."""
    unit, size = choose_unit(report.peak_bytes)
    yield [f"at the peak, {unit}", "dry run", "predicted", "difference", ""]
    for name, (dry, formula) in components(report, predicted).items():
        difference = formula / dry - 1 if dry else float(formula > 0)
        mark = "<" if abs(difference) > MARK_ABOVE else ""
        yield [name, f"{dry / size:.3f}", f"{formula / size:.3f}", f"{difference:+.1%}", mark]
