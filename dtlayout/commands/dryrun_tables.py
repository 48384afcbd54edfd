"""What a dry run's report says of a rank, as tables for a terminal and for a page."""

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass

from dtlayout.dryrun.findings import Findings
from dtlayout.dryrun.report import RankReport
from dtlayout.measure.curve import Highest
from dtlayout.mesh.axes import axis_sizes

GIB, MIB = 2**30, 2**20
MARK_ABOVE = 0.05
"""Difference between prediction and dry run from which on it is marked."""
_PARTS = {
    "parameter": "parameters", "gradient": "gradients", "optimizer": "optimizer", "activation": "activations",
    "gathered": "gathered", "communication": "messages", "other": "temporary",
}  # fmt: skip
"""Categories of the tracker → what they are called here."""


Table = list[list[str]]
"""Rows of cells, the names of the columns first."""


@dataclass(frozen=True)
class RankTables:
    """One rank: where it is and what it reached, and tables."""

    place: str
    peak: str
    run: str
    tables: list[Table]

    @classmethod
    def make(cls, report: RankReport, findings: Findings, *, compares: bool) -> "RankTables":
        """With comparisons as the last tables: with the cost model if `compares`, and with a real run."""
        unit, size = choose_unit(report.peak_bytes)
        degrees = axis_sizes(findings.layout)
        place = ", ".join(
            f"{axis} {i} of {degrees[axis]}" for axis, i in report.coordinate.items() if degrees[axis] > 1
        )
        at = f"{report.module or 'no module'}, {report.action or 'before the first action'}"
        run, whole = report.num_microbatches_run, report.num_microbatches
        plural = "microbatch" if whole == 1 else "microbatches"
        tables = [list(_list_parts(report)), list(_list_messages(report)), list(_list_flops(report))]
        if compares:
            tables.append(list(_compare(report, findings.components(report))))
        if measured := findings.measured.get(report.rank):
            tables.append(list(_compare_measured(report, measured)))
        return cls(
            place=f"rank {report.rank}{'  ' if place else ''}{place}",
            peak=f"{report.peak_bytes / size:.3f} {unit} in {at}",
            run=f"{whole} {plural}" if run == whole else f"{run} of {whole} {plural}, the rest repeats",
            tables=tables,
        )


def list_times(findings: Findings, *, compares: bool) -> Table:
    """The step by what it is spent on, with the cost model beside if `compares`; empty where it is not known."""
    if findings.time is None:
        return []
    columns = [findings.time, findings.estimate.time] if compares else [findings.time]
    spent = [list(column.as_dict().items()) for column in columns]
    rows = [[row[0][0], *(f"{seconds:.4f}" for _, seconds in row)] for row in zip(*spent, strict=True)]
    head = ["seconds of a step", "dry run", "predicted"][: 1 + len(columns)]
    return [head, *rows, ["step", *(f"{column.total:.4f}" for column in columns)]]


def choose_unit(nbytes: float) -> tuple[str, int]:
    """The unit in which people read so many bytes, and its size."""
    return ("GiB", GIB) if nbytes >= GIB else ("MiB", MIB)


def _list_parts(report: RankReport) -> Iterator[list[str]]:
    unit, size = choose_unit(report.peak_bytes)
    parts = asdict(report.parts)
    yield ["at the peak", unit, "share"]
    for key, name in _PARTS.items():
        yield [name, f"{parts[key] / size:.3f}", f"{parts[key] / report.peak_bytes:.1%}"]


def _list_messages(report: RankReport) -> Iterator[list[str]]:
    yield ["message", "axis", "bytes", "a step", "crosses nodes"]
    rows = sorted(report.traffic.items(), key=lambda row: -row[0].nbytes * row[1])
    for message, count in rows:
        crosses = "yes" if message.crosses_node else "no"
        yield [message.name, message.axis, f"{message.nbytes:,}", str(count), crosses]


def _list_flops(report: RankReport) -> Iterator[list[str]]:
    """By module, those of all blocks together."""
    flops: Counter[str] = Counter()
    for module, count in report.flops.items():
        flops[re.sub(r"\.\d+\b", ".*", module)] += count
    yield ["FLOPs", "TFLOP a step"]
    for module, count in flops.most_common():
        yield [module, f"{count / 1e12:,.4f}"]


def _compare(report: RankReport, components: dict[str, tuple[float, float]]) -> Iterator[list[str]]:
    """Components as far as both tell them apart; the last column marks where they differ much."""
    unit, size = choose_unit(report.peak_bytes)
    yield [f"at the peak, {unit}", "dry run", "predicted", "difference", ""]
    for name, (dry, formula) in components.items():
        difference = formula / dry - 1 if dry else float(formula > 0)
        mark = "<" if abs(difference) > MARK_ABOVE else ""
        yield [name, f"{dry / size:.3f}", f"{formula / size:.3f}", f"{difference:+.1%}", mark]


def _compare_measured(report: RankReport, measured: list[Highest]) -> Iterator[list[str]]:
    unit, size = choose_unit(report.peak_bytes)
    peak_bytes = max(highest.nbytes for highest in measured)
    yield [f"first steps, {unit}", "dry run", "measured", "difference"]
    difference = f"{peak_bytes / report.peak_bytes - 1:+.1%}"
    yield ["peak", f"{report.peak_bytes / size:.3f}", f"{peak_bytes / size:.3f}", difference]
