"""What a dry run's report says of a rank, as tables for a terminal and for a page."""

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass

from dtlayout.dryrun.findings import Findings
from dtlayout.dryrun.report import RankReport
from dtlayout.mesh.axes import axis_sizes
from dtlayout.text import choose_unit

MARK_ABOVE = 0.05
"""Difference from the dry run from which on it is marked."""
_PARTS = {
    "parameter": "parameters", "gradient": "gradients", "optimizer": "optimizer", "activation": "activations",
    "gathered": "gathered", "communication": "messages", "other": "temporary",
}  # fmt: skip
"""Categories of the tracker → what they are called here."""
Table = list[list[str]]
"""Rows of cells, the names of the columns first."""


@dataclass(frozen=True)
class RankTables:
    """One rank of a dry run in words: where it is, its peak, what was run of it, and tables."""

    place: str
    peak: str
    run: str
    tables: list[Table]

    @classmethod
    def make(cls, report: RankReport, findings: Findings, *, compares: bool) -> "RankTables":
        """Describe a rank; the last tables compare it with the cost model if `compares`, and with a real run."""
        unit, size = choose_unit(report.peak_bytes)
        degrees = axis_sizes(findings.layout)
        place = ", ".join(
            f"{axis} {i} of {degrees[axis]}" for axis, i in report.coordinate.items() if degrees[axis] > 1
        )
        tables = [list(_list_parts(report)), list(_list_messages(report)), list(_list_flops(report))]
        if compares:
            tables.append(list(_compare(f"at the peak, {unit}", "predicted", findings.components(report), size)))
        if measured := findings.measured.get(report.rank):
            peaks = {"peak": (report.peak_bytes, max(highest.nbytes for highest in measured))}
            tables.append(list(_compare(f"first steps, {unit}", "measured", peaks, size)))
        name, run = f"rank {report.rank}{'  ' if place else ''}{place}", _describe_run(report, findings.num_steps)
        return cls(place=name, peak=_describe_peak(report, findings), run=run, tables=tables)


def list_times(findings: Findings, *, compares: bool) -> Table:
    """The step by what it is spent on, with the cost model beside if `compares`; empty where it is not known."""
    if findings.time is None:
        return []
    dry, predicted = ({**time.as_dict(), "step": time.total} for time in (findings.time, findings.estimate.time))
    unit, size = ("s", 1.0) if dry["step"] >= 1 else ("ms", 1e-3)
    state = "" if findings.scenario.engine.is_calibrated else " (uncalibrated)"
    title = f"a step{state}, {unit}"
    if compares:
        return list(_compare(title, "predicted", {name: (dry[name], predicted[name]) for name in dry}, size))
    return [[title, "dry run"], *([name, f"{seconds / size:.3f}"] for name, seconds in dry.items())]


def _describe_peak(report: RankReport, findings: Findings) -> str:
    unit, size = choose_unit(report.peak_bytes)
    capacity = ""
    if findings.scenario.cluster.gpu.device_type != "cpu":
        fits = "" if findings.fits(report) else ": does not fit"
        capacity = f" of {findings.estimate.capacity_bytes / size:.2f}{fits},"
    at = f"{report.module or 'no module'}, {report.action or 'before the first action'}"
    return f"{report.peak_bytes / size:.3f} {unit}{capacity} in {at}"


def _describe_run(report: RankReport, num_steps: int) -> str:
    run, whole = report.num_microbatches_run, report.num_microbatches
    plural = "microbatch" if whole == 1 else "microbatches"
    steps = "" if num_steps == 0 else "the first step, " if num_steps == 1 else f"the first {num_steps} steps, each "
    return f"{steps}{whole} {plural}" if run == whole else f"{steps}{run} of {whole} {plural}, the rest repeats"


def _list_parts(report: RankReport) -> Iterator[list[str]]:
    unit, size = choose_unit(report.peak_bytes)
    parts = asdict(report.parts)
    yield ["at the peak", unit, "share"]
    for key, name in _PARTS.items():
        yield [name, f"{parts[key] / size:.3f}", f"{parts[key] / report.peak_bytes:.1%}"]


def _list_messages(report: RankReport) -> Iterator[list[str]]:
    """Messages by kind and size, and in the end their sum for each axis."""
    yield ["message", "axis", "bytes", "a step", "MB a step", "crosses nodes"]
    sums: Counter[tuple[str, bool]] = Counter()
    for message, count in sorted(report.traffic.items(), key=lambda row: -row[0].nbytes * row[1]):
        sums[message.axis, message.crosses_node] += message.nbytes * count
        total = f"{message.nbytes * count / 1e6:,.1f}"
        crosses = "yes" if message.crosses_node else "no"
        yield [message.name, message.axis, f"{message.nbytes:,}", str(count), total, crosses]
    for (axis, crosses_node), nbytes in sums.most_common():
        yield ["all", axis, "", "", f"{nbytes / 1e6:,.1f}", "yes" if crosses_node else "no"]


def _list_flops(report: RankReport) -> Iterator[list[str]]:
    """FLOPs of each module, those of all blocks together."""
    flops: Counter[str] = Counter()
    for module, count in report.flops.items():
        flops[re.sub(r"\.\d+\b", ".*", module)] += count
    yield ["FLOPs", "TFLOP a step"]
    for module, count in flops.most_common():
        yield [module, f"{count / 1e12:,.4f}"]
    yield ["all", f"{flops.total() / 1e12:,.4f}"]


def _compare(title: str, other: str, rows: Mapping[str, tuple[float, float]], size: float) -> Iterator[list[str]]:
    """The dry run and something else, in units of `size`; the last column marks where they differ much."""
    yield [title, "dry run", other, "difference", ""]
    for name, (dry, value) in rows.items():
        difference = value / dry - 1 if dry else float(value > 0)
        mark = "<" if abs(difference) > MARK_ABOVE else ""
        yield [name, f"{dry / size:.3f}", f"{value / size:.3f}", f"{difference:+.1%}", mark]
