"""Tables that people read."""

from collections.abc import Sequence

from dtlayout.cluster import Record


def align(rows: Sequence[Sequence[str]]) -> list[str]:
    """A line for each row, columns as wide as their widest cell, the first to the left and numbers to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join([row[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(row[1:], widths[1:], strict=True))])
        for row in rows
    ]


def describe_records(records: Sequence[Record]) -> list[str]:
    """A line for each sweep whose predictions were checked."""
    return [
        f"track record: {r.sweep}, {r.date}, version {r.version} on {r.hardware}: {r.runs} steps predicted to "
        f"{r.error:.1%} (median), the layout predicted best {r.regret:.1%} behind the best one"
        for r in records
    ]
