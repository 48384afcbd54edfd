"""Schedules of one published layout, measured beside predicted: `python -m benchmarks.schedules TABLE …`.

Rows that differ in schedule and virtual stages alone are compared with their 1F1B row. Where a source does not say how
many microbatches a step had, the number is the one that fits best, which is the only thing that is fitted; what else
it does not say is taken as `ASSUMED` says.
"""

import argparse
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from dtlayout.base.formatting import GIB
from dtlayout.costmodel.engine import find_engine
from dtlayout.costmodel.estimate import Estimate, Estimator
from dtlayout.costmodel.scenario import Scenario
from dtlayout.schedules.schedules import find_schedule
from dtlayout.spec.batch import Batch
from dtlayout.spec.cluster import Cluster, gpu_named
from dtlayout.validation.columns import COLUMNS, WHERE_NO_COLUMN, Cells
from dtlayout.validation.row_parsing import to_kernels, to_layout, to_model
from dtlayout.validation.tables import open_table

ASSUMED = {"micro_batch": "1", "recompute": "none", "kernel": "flash2+rmsnorm", "zero": "1"}
"""Column → value of rows that do not say it."""
LEAST_SCHEDULES = 4
OWN = (
    "row",
    "schedule",
    "virtual_stages",
    "status",
    "mfu",
    "step_time_s",
    "tokens_per_s_gpu",
    "peak_memory_gb",
    "note",
)
"""Columns in which rows of a group may differ."""
ROUNDS = range(1, 17)
"""Microbatches of a step over pipeline ranks that are tried."""


def read_groups(paths: Sequence[Path]) -> Iterator[list[Cells]]:
    """Rows that differ in their schedule alone, of which the first has 1F1B."""
    groups: dict[tuple[Any, ...], list[Cells]] = defaultdict(list)
    for path in paths:
        with open_table(path) as reader:
            for row in reader:
                if row.get("schedule"):
                    texts = WHERE_NO_COLUMN | row | {name: text for name, text in ASSUMED.items() if not row[name]}
                    cells = {name: read(texts.get(name, "")) for name, read in COLUMNS.items()} | {"assumed": ()}
                    groups[tuple(cells[name] for name in COLUMNS if name not in OWN)].append(cells)
    for rows in groups.values():
        rows.sort(key=lambda cells: cells["schedule"] != "1f1b")
        if len({cells["schedule"] for cells in rows}) >= LEAST_SCHEDULES and rows[0]["schedule"] == "1f1b":
            yield rows


def predict(cells: Cells, num_microbatches: int | None) -> Estimate:
    """A row's estimate with so many microbatches, or with its own."""
    layout, gpu = to_layout(cells), gpu_named(cells["gpu"])
    sequences = cells["global_batch"] or layout.dp * layout.micro_batch * (num_microbatches or 1)
    scenario = Scenario(
        model=to_model(cells),
        batch=Batch(global_batch=sequences, seq_len=cells["seq_len"]),
        cluster=Cluster(gpu=gpu, num_gpus=cells["gpus"], gpus_per_node=cells["gpus_per_node"] or gpu.gpus_per_node),
        engine=find_engine(cells["engine"], gpu.name),
    )
    return Estimator(scenario).estimate(layout, to_kernels(cells))


def measured_speeds(rows: Sequence[Cells]) -> list[float | None]:
    """Tokens a second over those of 1F1B."""
    speeds = [cells["tokens_per_s_gpu"] or cells["mfu"] for cells in rows]
    return [speed and speed / speeds[0] for speed in speeds]


def predicted_speeds(estimates: Sequence[Estimate]) -> list[float]:
    """Predicted speeds of layouts over that of the first, of one batch."""
    return [estimates[0].step_time_s / estimate.step_time_s for estimate in estimates]


def fit_microbatches(rows: Sequence[Cells]) -> int | None:
    """The number with the least sum of squared errors of speed; None where the rows say their batch."""
    if rows[0]["global_batch"]:
        return None
    found = measured_speeds(rows)

    def error(m: int) -> float:
        speeds = predicted_speeds([predict(cells, m) for cells in rows])
        return sum((a - b) ** 2 for a, b in zip(speeds, found, strict=True) if b)

    least = max(find_schedule(to_layout(cells).schedule).least_rounds for cells in rows)
    return min((rows[0]["pp"] * rounds for rounds in ROUNDS if rounds >= least), key=error)


def report(rows: Sequence[Cells]) -> Iterator[str]:
    """A group's table as Markdown."""
    first, m = rows[0], fit_microbatches(rows)
    estimates = [predict(cells, m) for cells in rows]
    yield (
        f"## {first['model']} on {first['gpus']} {first['gpu']}, {first['engine']}, pp {first['pp']}, "
        f"tp {first['tp']}, ep {first['ep']} ({first['table']})"
    )
    yield ""
    yield f"{m} microbatches of one sequence fit best; the source does not say." if m else "The batch is the source's."
    yield "Speed and peak memory are relative to 1F1B's."
    yield ""
    yield "| schedule | v | speed, measured | predicted | peak, measured | predicted |"
    yield "|---|--:|--:|--:|--:|--:|"
    for cells, estimate, found, speed in zip(
        rows, estimates, measured_speeds(rows), predicted_speeds(estimates), strict=True
    ):
        relative = estimate.peak_bytes / estimates[0].peak_bytes
        yield (
            f"| {estimate.layout.schedule} | {cells['virtual_stages'] or 1} | {f'{found:.3f}' if found else ''} | "
            f"{speed:.3f} | {show_peak(cells, first)} | {relative:.2f} |"
        )
    yield ""


def show_peak(cells: Cells, first: Cells) -> str:
    """A row's peak relative to the first one's, or the least that it must have been."""
    if not (base := first["peak_memory_gb"]):
        return ""
    if cells["status"] == "oom":
        return f"did not fit: above {gpu_named(cells['gpu']).memory_bytes / GIB / base:.2f}"
    return f"{cells['peak_memory_gb'] / base:.2f}" if cells["peak_memory_gb"] else ""


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("tables", nargs="+", type=Path)
    options = parser.parse_args()
    print("# Schedules of published layouts, measured beside predicted\n")
    print('`make bench NAME=schedules TABLES="FILE …"`\n')
    for rows in read_groups(options.tables):
        print("\n".join(report(rows)))


if __name__ == "__main__":
    main()
