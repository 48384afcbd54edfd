"""What a dry run's report says of a rank, as tables for a terminal and for a page."""

import re
from collections import Counter
from collections.abc import Iterator, Mapping

from dtlayout.base.formatting import choose_unit, format_bytes, plural
from dtlayout.dryrun.findings import Findings
from dtlayout.dryrun.report import RankReport
from dtlayout.mesh.axes import axis_sizes

MARK_ABOVE = 0.05
"""Difference from the dry run from which on it is marked."""
PARTS = {
    "parameter": "parameters", "gradient": "gradients", "optimizer": "optimizer", "activation": "activations",
    "gathered": "gathered", "communication": "messages", "other": "temporary",
}  # fmt: skip
"""Categories of the tracker → what they are called here."""
_JOINED = ("compute", "optimizer")
"""Shares of a step that are compared together: what casts and adds gradients is compute of a dry run, for it sees
operators, and optimizer of the cost model."""
Table = list[list[str]]
"""Rows of cells, the names of the columns first."""


def describe_place(report: RankReport, findings: Findings) -> str:
    """Which rank it is, and where it lies on the axes that have several."""
    degrees = axis_sizes(findings.layout)
    places = [f"{axis} {i} of {degrees[axis]}" for axis, i in report.coordinate.items() if degrees[axis] > 1]
    return f"rank {report.rank}  {', '.join(places)}".rstrip()


def describe_peak(report: RankReport, findings: Findings) -> str:
    """The most that a rank held, of how much on a GPU, and where that was."""
    held, capacity = format_bytes(report.peak_bytes, 3), format_bytes(findings.estimate.capacity_bytes)
    if findings.scenario.cluster.gpu.device_type != "cpu":
        held += f" of {capacity}" if findings.fits(report) else f", which does not fit into {capacity}"
    where = f"in {report.module or 'no module'} during {report.action or 'what precedes the first action'}"
    return f"{held}, {where}{_describe_host(report)}"


def _describe_host(report: RankReport) -> str:
    """What lay in the host's memory beside it, and of what most."""
    parts = report.host_parts
    if not parts.total:
        return ""
    shares = [(getattr(parts, key), name) for key, name in PARTS.items() if getattr(parts, key)]
    listed = ", ".join(f"{name} {format_bytes(size, 3)}" for size, name in sorted(shares, reverse=True))
    return f"; on the host {format_bytes(parts.total, 3)}: {listed}"


def describe_run(report: RankReport, findings: Findings) -> str:
    """The steps and microbatches that were run of a rank."""
    run, whole, num_steps = report.num_microbatches_run, report.num_microbatches, findings.num_steps
    batches = plural(whole, "microbatch")
    steps = "" if num_steps == 0 else "the first step, " if num_steps == 1 else f"the first {num_steps} steps, each "
    return f"{steps}{batches}" if run == whole else f"{steps}{run} of {batches}, the rest repeats"


def list_tables(report: RankReport, findings: Findings, *, compares: bool) -> Iterator[Table]:
    """What a rank held, sent and computed; then beside the cost model if `compares`, and beside a real run."""
    unit, size = choose_unit(report.peak_bytes)
    parts = [(name, getattr(report.parts, key)) for key, name in PARTS.items()]
    shares = ([name, f"{nbytes / size:.3f}", f"{nbytes / report.peak_bytes:.1%}"] for name, nbytes in parts)
    yield [["at the peak", unit, "share"], *shares]
    yield list(_list_messages(report))
    yield _list_flops(report)
    if compares:
        yield _compare(f"at the peak, {unit}", "predicted", findings.components(report), size)
    if measured := findings.measured.get(report.rank):
        peaks = {"peak": (report.peak_bytes, max(highest.nbytes for highest in measured))}
        yield _compare(f"first steps, {unit}", "measured", peaks, size)


def list_times(findings: Findings, *, compares: bool) -> Table:
    """The step by what it is spent on, with the cost model beside if `compares`; empty where it is not known."""
    if findings.time is None:
        return []
    dry, predicted = ({**time.as_dict(), "step": time.total} for time in (findings.time, findings.estimate.time))
    unit, size = ("s", 1.0) if dry["step"] >= 1 else ("ms", 1e-3)
    state = "" if findings.scenario.engine.is_calibrated else " (uncalibrated)"
    title = f"a step{state}, {unit}"
    if not findings.estimate.knows_time:
        title, size = "a step, % of the predicted", predicted["step"] / 100
    if compares:
        rows = {name: (dry[name], predicted[name]) for name in dry if name not in _JOINED}
        joined = {", ".join(_JOINED): (sum(dry[name] for name in _JOINED), sum(predicted[name] for name in _JOINED))}
        return _compare(title, "predicted", joined | rows, size)
    return [[title, "dry run"], *([name, f"{seconds / size:.3f}"] for name, seconds in dry.items())]


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


def _list_flops(report: RankReport) -> Table:
    """FLOPs of each module, those of all blocks together."""
    flops: Counter[str] = Counter()
    for module, count in report.flops.items():
        flops[re.sub(r"\.\d+\b", ".*", module)] += count
    rows = [*flops.most_common(), ("all", flops.total())]
    return [["FLOPs", "TFLOP a step"], *([module, f"{count / 1e12:,.4f}"] for module, count in rows)]


def _compare(title: str, other: str, rows: Mapping[str, tuple[float, float]], size: float) -> Table:
    """The dry run and something else, in units of `size`; the last column marks where they differ much."""
    table = [[title, "dry run", other, "difference", ""]]
    for name, (dry, value) in rows.items():
        difference = value / dry - 1 if dry else float(value > 0)
        mark = "<" if abs(difference) > MARK_ABOVE else ""
        table.append([name, f"{dry / size:.3f}", f"{value / size:.3f}", f"{difference:+.1%}", mark])
    return table
