"""Tables: CSV files of measured training runs, a `Run` a line; every cell is checked before the first is predicted.

The columns are those of published runs: model sizes, engine, GPUs, batch, degrees, kernel, status, tokens a second,
step time, MFU and peak memory in GiB; an empty cell means that the source does not say. `zero` 0 is replicated state:
dp_replicate = dp. docs/guide/sweep.md has a line on each.

A cell that cannot be true is an error (columns.py). A row that is right and cannot be predicted is `Unpredicted`, with
its reasons (skip_reasons.py); of every other one row_parsing.py makes model, layout and kernels.
"""

import csv
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from dtlayout.base.errors import DtlayoutError, InvalidConfig
from dtlayout.base.formatting import GIB
from dtlayout.costmodel.engine import known_engines
from dtlayout.costmodel.scenario import Scenario
from dtlayout.records.run import Performance, Run
from dtlayout.spec.batch import Batch
from dtlayout.spec.cluster import Cluster, gpu_named
from dtlayout.spec.model_shape import ModelShape
from dtlayout.validation.columns import COLUMNS, REQUIRED, WHERE_NO_COLUMN, Cells
from dtlayout.validation.row_parsing import assume, to_engine, to_kernels, to_layout, to_mfu, to_model
from dtlayout.validation.skip_reasons import find_reasons, to_optimizer

_SAME_LAYOUT = re.compile(r"\bsame layout as in (\S+)")
"""A note on a row that was measured again at another date."""
_MOST_PROBLEMS = 20
"""Most wrong cells of a table that are named; a wrong column would name every row."""


class Unpredicted(NamedTuple):
    """A row that cannot be predicted."""

    table: str
    """Name of the sweep that the row belongs to."""
    row: str
    """Name of the row in its sweep."""
    reasons: tuple[str, ...]
    """All reasons against a prediction (skip_reasons.py)."""


class Tables(NamedTuple):
    """The rows of tables, in their order."""

    runs: list[Run]
    """Rows that can be predicted."""
    unpredicted: list[Unpredicted]
    """Rows that cannot."""
    num_repeats: int
    """Number of rows that repeat another one's layout at another date, by their note; they are not among the runs."""


def read_tables(paths: Sequence[str | Path], engine: str | None = None) -> Tables:
    """All rows of tables; `engine` is put in the place of each row's own.

    InvalidConfig names file, line and column of each cell that is wrong, and each table without rows.
    """
    if engine is not None and engine not in known_engines():
        raise InvalidConfig(f"--engine={engine} is unknown; use one of {', '.join(known_engines())}")
    problems: list[str] = []
    rows = [row for path in paths for row in _read_table(Path(path), engine, problems)]
    if problems:
        raise InvalidConfig(problems)
    tables = {row.table for row in rows}
    runs = _name_alike([row for row in rows if isinstance(row, Run)])
    firsts = [run for run in runs if not _is_repeat(run, tables)]
    unpredicted = [row for row in rows if isinstance(row, Unpredicted)]
    return Tables(firsts, unpredicted, num_repeats=len(runs) - len(firsts))


def find_tables(folder: Path) -> tuple[list[Path], list[str]]:
    """The tables of runs in a folder, and a line for each CSV file there that is a table of another kind.

    InvalidConfig for a file that cannot be read.
    """
    tables, others = [], []
    for path in sorted(folder.glob("*.csv")):
        with open_table(path) as reader:
            missing = _list_missing(reader)
        if missing:
            others.append(f"left out: table {path} has no column {', '.join(missing)}")
        else:
            tables.append(path)
    return tables, others


@contextmanager
def open_table(path: Path) -> Iterator["csv.DictReader[str]"]:
    """A table's rows; InvalidConfig if they cannot be read."""
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            yield csv.DictReader(file)
    except OSError as error:
        raise InvalidConfig(f"table {path} cannot be read: {error.strerror}") from None
    except (UnicodeDecodeError, csv.Error) as error:
        raise InvalidConfig(f"table {path} is not CSV: {error}") from None


def _list_missing(reader: "csv.DictReader[str]") -> list[str]:
    """Columns that each table of runs has, and this one lacks."""
    return [name for name in REQUIRED if name not in (reader.fieldnames or ())]


def _name_alike(runs: Sequence[Run]) -> list[Run]:
    """Runs with one model name for each shape, the first one, since sources call a model by several names."""
    names: dict[ModelShape, str] = {}

    def rename(scenario: Scenario) -> Scenario:
        shape = replace(scenario.model, name="")
        name = names.setdefault(shape, scenario.model.name)
        return scenario if name == scenario.model.name else replace(scenario, model=replace(shape, name=name))

    return [replace(run, scenario=rename(run.scenario)) for run in runs]


def _is_repeat(run: Run, tables: set[str]) -> bool:
    """Whether the note says that another of these tables has the layout; if that table is not among them, False."""
    found = _SAME_LAYOUT.search(run.note)
    return found is not None and found[1].rstrip(";,.") in tables - {run.table}


def _read_table(path: Path, engine: str | None, problems: list[str]) -> list[Run | Unpredicted]:
    """The rows of a table; problems with it are added to those of all tables."""
    found: list[str] = []
    with open_table(path) as reader:
        if missing := _list_missing(reader):
            raise InvalidConfig(f"table {path} has no column {', '.join(missing)}")
        rows = list(_read_rows(reader, engine, found))
    problems += [f"table {path}, {problem}" for problem in found[:_MOST_PROBLEMS]]
    if len(found) > _MOST_PROBLEMS:
        problems.append(f"table {path}: {len(found) - _MOST_PROBLEMS} more cells are wrong")
    if not rows and not found:
        problems.append(f"table {path} has columns and no rows")
    return rows


def _read_rows(reader: "csv.DictReader[str]", engine: str | None, problems: list[str]) -> Iterator[Run | Unpredicted]:
    for row in reader:
        where = f"line {reader.line_num}"
        cells: dict[str, Any] = {"engine": engine}
        wrong = []
        if None in row:
            wrong.append(f"{where}: more cells than the {len(reader.fieldnames or ())} columns")
        for name, read in COLUMNS.items():
            try:
                cells[name] = cells.get(name) or read((row.get(name, WHERE_NO_COLUMN.get(name)) or "").strip())
            except DtlayoutError as error:
                wrong.append(f"{where}, column {name}: {error}")
        if not wrong:
            cells |= {"assumed": assume(cells)}
            try:
                reasons = find_reasons(cells)
                yield Unpredicted(cells["table"], cells["row"], reasons) if reasons else _to_run(cells)
            except DtlayoutError as error:
                wrong.append(f"{where}: {error}")
        problems += wrong


def _to_run(cells: Cells) -> Run:
    gpu, model, layout = gpu_named(cells["gpu"]), to_model(cells), to_layout(cells)
    batch = Batch(global_batch=cells["global_batch"], seq_len=cells["seq_len"])
    num_gpus, peak_gib = cells["gpus"], cells["peak_memory_gb"]
    cluster = Cluster(gpu=gpu, num_gpus=num_gpus, gpus_per_node=cells["gpus_per_node"] or gpu.gpus_per_node)
    step_time_s, mfu = cells["step_time_s"], cells["mfu"]
    tokens_per_s = batch.num_tokens / step_time_s if step_time_s else None
    if tokens_per_s_gpu := cells["tokens_per_s_gpu"]:  # what was measured: the others follow from it
        tokens_per_s = tokens_per_s_gpu * num_gpus
        step_time_s = step_time_s or batch.num_tokens / tokens_per_s
        mfu = to_mfu(cells) if gpu.has_mfu else None
    measured = Performance(
        step_time_s=step_time_s,
        tokens_per_s=tokens_per_s,
        mfu=mfu,
        peak_memory_bytes=None if peak_gib is None else (round(peak_gib * GIB), *(None,) * (layout.pp - 1)),
    )
    engine, precision = to_engine(cells)
    scenario = Scenario(
        model=model, batch=batch, cluster=cluster, engine=engine, precision=precision,
        optimizer=to_optimizer(cells),
    )  # fmt: skip
    return Run(
        table=cells["table"], row=cells["row"], source=cells["source"], note=cells["note"], outcome=cells["status"],
        scenario=scenario, layout=layout, measured=measured,
        kernels=to_kernels(cells), assumed=cells["assumed"],
        tells_memory=cells["tells_memory"],
    )  # fmt: skip
