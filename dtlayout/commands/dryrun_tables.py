"""Tables and sentences of a dry run's document, for a terminal and for a page."""

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from dtlayout.base.formatting import choose_unit, format_bytes, plural
from dtlayout.commands.arguments import JsonDocument
from dtlayout.mesh.axes import axis_sizes
from dtlayout.spec.layout import Layout

MARK_ABOVE = 0.05
"""Relative difference from the dry run from which on a row is marked."""
PARTS = {
    "parameter": "parameters", "gradient": "gradients", "optimizer": "optimizer", "activation": "activations",
    "gathered": "gathered", "communication": "messages", "other": "temporary",
}  # fmt: skip
"""Category of the tracker → its name in tables."""
_JOINED = ("compute", "optimizer")
"""Parts of a step that are compared as one: operators that cast and add gradients are compute in a dry run, which sees
operators, and optimizer in the cost model."""
Table = list[list[str]]
"""Rows of cells, the names of the columns first."""


def describe_place(document: JsonDocument, rank: JsonDocument) -> str:
    """The number of a rank, and its place on the axes that have several."""
    degrees = axis_sizes(Layout(**document["layout"]))
    places = [f"{axis} {i} of {degrees[axis]}" for axis, i in rank["coordinate"].items() if degrees[axis] > 1]
    return f"rank {rank['rank']}  {', '.join(places)}".rstrip()


def describe_peak(document: JsonDocument, rank: JsonDocument) -> str:
    """The most that a rank held, the capacity of its GPU, and the place in the step where that was."""
    held, capacity = format_bytes(rank["peak_bytes"], 3), format_bytes(document["capacity_bytes"])
    if not document["_is_on_host"]:
        held += f" of {capacity}" if rank["fits"] else f", which does not fit into {capacity}"
    where = f"in {rank['module'] or 'no module'} during {rank['action'] or 'what precedes the first action'}"
    elsewhere = _list_parts("on the host", rank["host_parts"]) + _list_parts("on its disk", rank["disk_parts"])
    return f"{held}, {where}{elsewhere}"


def _list_parts(where: str, parts: Mapping[str, int]) -> str:
    """Bytes in a place beside the device by category, the largest first; empty if there are none."""
    if not (total := sum(parts.values())):
        return ""
    shares = [(parts[key], name) for key, name in PARTS.items() if parts[key]]
    listed = ", ".join(f"{name} {format_bytes(size, 3)}" for size, name in sorted(shares, reverse=True))
    return f"; {where} {format_bytes(total, 3)}: {listed}"


def describe_run(document: JsonDocument, rank: JsonDocument) -> str:
    """The steps and microbatches that were run of a rank."""
    run, whole, num_steps = rank["num_microbatches_run"], rank["num_microbatches"], document["num_steps"]
    batches = plural(whole, "microbatch")
    steps = "" if num_steps == 0 else "the first step, " if num_steps == 1 else f"the first {num_steps} steps, each "
    return f"{steps}{batches}" if run == whole else f"{steps}{run} of {batches}, the rest repeats"


def list_tables(rank: JsonDocument, *, compares: bool) -> Iterator[Table]:
    """Tables of what a rank held, sent and computed; then beside the cost model if `compares`, and a real run."""
    peak_bytes = rank["peak_bytes"]
    unit, size = choose_unit(peak_bytes)
    parts = [(name, rank["parts"][key]) for key, name in PARTS.items()]
    shares = ([name, f"{nbytes / size:.3f}", f"{nbytes / peak_bytes:.1%}"] for name, nbytes in parts)
    yield [["at the peak", unit, "share"], *shares]
    yield list(_list_messages(rank["traffic"]))
    yield _list_flops(rank["flops"])
    if compares:
        rows = {name: (each["dry"], each["predicted"]) for name, each in rank["compared_bytes"].items()}
        yield _compare(f"at the peak, {unit}", "predicted", rows, size)
    if measured := rank["measured"]:
        peaks = {"peak": (peak_bytes, max(highest["nbytes"] for highest in measured))}
        yield _compare(f"first steps, {unit}", "measured", peaks, size)


def list_times(document: JsonDocument, *, compares: bool) -> Table:
    """Seconds of a step by component, beside the cost model if `compares`; empty where they are not known.

    Where the cost model knows no seconds, they are percents of its step.
    """
    dry, predicted = document["_step"]["dry"], document["_step"]["predicted"]
    if dry is None:
        return []
    unit, size = ("s", 1.0) if dry["total"] >= 1 else ("ms", 1e-3)
    state = "" if document["run"]["predicted"]["calibrated"] else " (uncalibrated)"
    title = f"a step{state}, {unit}"
    if document["step_s"]["predicted"] is None:
        title, size = "a step, % of the predicted", predicted["total"] / 100
    names = {name: "step" if name == "total" else name for name in dry}
    if compares:
        rows = {names[name]: (dry[name], predicted[name]) for name in dry if name not in _JOINED}
        joined = {", ".join(_JOINED): (sum(dry[name] for name in _JOINED), sum(predicted[name] for name in _JOINED))}
        return _compare(title, "predicted", joined | rows, size)
    return [[title, "dry run"], *([names[name], f"{seconds / size:.3f}"] for name, seconds in dry.items())]


def _list_messages(traffic: Sequence[JsonDocument]) -> Iterator[list[str]]:
    """Rows of a table: one for each message, the most bytes a step first.

    The last rows sum the megabytes of each axis, messages that cross nodes apart from those that do not.
    """
    yield ["message", "axis", "bytes", "a step", "MB a step", "crosses nodes"]
    sums: Counter[tuple[str, bool]] = Counter()
    for message in sorted(traffic, key=lambda each: -each["nbytes"] * each["count"]):
        axis, crosses_node, nbytes, count = (message[key] for key in ("axis", "crosses_node", "nbytes", "count"))
        sums[axis, crosses_node] += nbytes * count
        crosses = "yes" if crosses_node else "no"
        yield [message["name"], axis, f"{nbytes:,}", str(count), f"{nbytes * count / 1e6:,.1f}", crosses]
    for (axis, crosses_node), nbytes in sums.most_common():
        yield ["all", axis, "", "", f"{nbytes / 1e6:,.1f}", "yes" if crosses_node else "no"]


def _list_flops(flops: Mapping[str, int]) -> Table:
    """FLOPs of each module, those of all blocks together."""
    sums: Counter[str] = Counter()
    for module, count in flops.items():
        sums[re.sub(r"\.\d+\b", ".*", module)] += count
    rows = [*sums.most_common(), ("all", sums.total())]
    return [["FLOPs", "TFLOP a step"], *([module, f"{count / 1e12:,.4f}"] for module, count in rows)]


def _compare(title: str, other: str, rows: Mapping[str, tuple[float, float]], size: float) -> Table:
    """A table of `rows`: name → the dry run's number and another one, both divided by `size`.

    Differences are in percent of the dry run's; '<' marks those above `MARK_ABOVE`, and the last heading says so.
    """
    table = [[title, "dry run", other, "difference", ""]]
    for name, (dry, value) in rows.items():
        difference = value / dry - 1 if dry else float(value > 0)
        mark = "<" if abs(difference) > MARK_ABOVE else ""
        table.append([name, f"{dry / size:.3f}", f"{value / size:.3f}", f"{difference:+.1%}", mark])
    if any(row[-1] for row in table):
        table[0][-1] = f"<: over {MARK_ABOVE:.0%}"
    return table
