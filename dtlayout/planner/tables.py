"""Tables: CSV files of measured training runs, a `Run` a line; every cell is checked before the first is predicted.

The columns are those of published sweeps: model sizes, engine, GPUs, batch, degrees, kernel, status, step time, MFU and
peak memory in GiB; an empty cell means that the source does not say. `zero` 0 is replicated state: dp_replicate = dp.
docs/sweep.md has a line on each.
"""

import csv
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from dtlayout.batch import Batch
from dtlayout.cluster import Cluster, find_gpu
from dtlayout.costmodel.engine import find_engine, known_engines
from dtlayout.costmodel.scenario import Scenario
from dtlayout.errors import DtlayoutError, InvalidConfig
from dtlayout.kernels import Kernels
from dtlayout.layout import Layout
from dtlayout.model_shape import ModelShape
from dtlayout.pipelining.schedules import schedule_with
from dtlayout.planner.runs import Outcome, Performance, Run
from dtlayout.recompute import Recompute
from dtlayout.text import GIB

KERNELS = {
    "torch": Kernels(attention="torch", norm="eager"),
    "megatron-softmax": Kernels(attention="megatron-softmax", norm="eager"),
    "flash1": Kernels(attention="flash1", norm="eager"),
    "flash2": Kernels(attention="sdpa-flash", norm="eager"),
    "flash2+rmsnorm": Kernels(attention="sdpa-flash", norm="fused"),
}
"""A table's word for attention and norm → our kernels."""
_OUTCOMES: dict[str, Outcome] = {
    "ok": "ok", "oom": "oom", "crashed_or_oom": "crashed_or_oom", "unavailable": "skipped", "error": "crashed",
}  # fmt: skip
"""A table's status → outcome."""
_MOST_PROBLEMS = 20
"""Cells of a table that are named; a wrong column would name every row."""
_Cell = Callable[[str], Any]
"""Reads a cell, None where it is empty and may be; InvalidConfig, without saying where, for what it cannot be."""


def read_tables(paths: Sequence[str | Path], engine: str | None = None) -> list[Run]:
    """All rows of tables, in their order; `engine` is put in the place of each row's own.

    InvalidConfig names file, line and column of each cell that is wrong.
    """
    if engine is not None and engine not in known_engines():
        raise InvalidConfig(f"--engine={engine} is unknown; use one of {', '.join(known_engines())}")
    problems: list[str] = []
    runs = [run for path in paths for run in _read_table(Path(path), engine, problems)]
    if problems:
        raise InvalidConfig(problems)
    return runs


def _read_table(path: Path, engine: str | None, problems: list[str]) -> list[Run]:
    """The rows of a table; what is wrong with it is put to the problems of all tables."""
    found: list[str] = []
    try:
        with path.open(newline="", encoding="utf-8") as file:
            reader = csv.DictReader(file)
            if missing := [name for name in _REQUIRED if name not in (reader.fieldnames or ())]:
                raise InvalidConfig(f"table {path} has no column {', '.join(missing)}")
            runs = list(_read_rows(reader, engine, found))
    except OSError as error:
        raise InvalidConfig(f"table {path} cannot be read: {error.strerror}") from None
    except (UnicodeDecodeError, csv.Error) as error:
        raise InvalidConfig(f"table {path} is not CSV: {error}") from None
    problems += [f"table {path}, {problem}" for problem in found[:_MOST_PROBLEMS]]
    if len(found) > _MOST_PROBLEMS:
        problems.append(f"table {path}: {len(found) - _MOST_PROBLEMS} more cells are wrong")
    return runs


def _read_rows(reader: "csv.DictReader[str]", engine: str | None, problems: list[str]) -> Iterator[Run]:
    for row in reader:
        where = f"line {reader.line_num}"
        cells, wrong = {"engine": engine}, []
        if None in row:
            wrong.append(f"{where}: more cells than the {len(reader.fieldnames or ())} columns")
        for name, read in _COLUMNS.items():
            try:
                cells[name] = cells.get(name) or read((row.get(name) or "").strip())
            except DtlayoutError as error:
                wrong.append(f"{where}, column {name}: {error}")
        if not wrong:
            try:
                yield _to_run(cells)
            except DtlayoutError as error:
                wrong.append(f"{where}: {error}")
        problems += wrong


def _to_run(cells: dict[str, Any]) -> Run:
    gpu, num_gpus, step_time_s, peak_gib = (cells[name] for name in ("gpu", "gpus", "step_time_s", "peak_memory_gb"))
    model = ModelShape(
        name=cells["model"], hidden_size=cells["hidden"], num_layers=cells["layers"], num_heads=cells["heads"],
        num_kv_heads=cells["kv_heads"] or cells["heads"], ffn_size=cells["ffn"], vocab_size=cells["vocab"],
        tied_embeddings=cells["tied"],
    )  # fmt: skip
    zero, virtual_stages = cells["zero"], cells["virtual_stages"] or 1
    is_replicated = zero == 0
    layout = Layout(
        pp=cells["pp"], dp_replicate=cells["dp"] if is_replicated else 1, dp_shard=1 if is_replicated else cells["dp"],
        cp=cells["cp"] or 1, tp=cells["tp"], sequence_parallel=cells["sequence_parallel"],
        micro_batch=cells["micro_batch"], schedule=schedule_with(virtual_stages),
        virtual_stages=virtual_stages, zero=zero or 1, recompute=cells["recompute"],
    )  # fmt: skip
    if layout.world_size != num_gpus:
        raise InvalidConfig(f"dp·cp·tp·pp is {layout.world_size}, but gpus={num_gpus}")
    batch = Batch(global_batch=cells["global_batch"], seq_len=cells["seq_len"])
    cluster = Cluster(gpu=gpu, num_gpus=num_gpus, gpus_per_node=cells["gpus_per_node"] or gpu.gpus_per_node)
    measured = Performance(
        step_time_s=step_time_s,
        tokens_per_s=batch.num_tokens / step_time_s if step_time_s else None,
        mfu=cells["mfu"],
        peak_memory_bytes=None if peak_gib is None else (round(peak_gib * GIB), *(None,) * (layout.pp - 1)),
    )
    engine = find_engine(cells["engine"], gpu.name)
    return Run(
        table=cells["table"], row=cells["row"], kernels=cells["kernel"], outcome=cells["status"],
        scenario=Scenario(model=model, batch=batch, cluster=cluster, engine=engine), layout=layout, measured=measured,
    )  # fmt: skip


# Cells.


def _number(
    least: float, most: float, expected: str, *, may_be_empty: bool = True, kind: Callable[[float], float] = float
) -> _Cell:
    def read(text: str) -> float | None:
        if not text and may_be_empty:
            return None
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not least <= value <= most or kind(value) != value:
            raise InvalidConfig(f"{text!r} must be {expected}")
        return kind(value)

    return read


def _whole(least: int, most: int | None = None, *, may_be_empty: bool = False) -> _Cell:
    expected = f"a whole number of at least {least}" if most is None else f"a whole number, {least} to {most}"
    return _number(least, most or sys.float_info.max, expected, may_be_empty=may_be_empty, kind=int)


def _one_of(values: Mapping[str, Any]) -> _Cell:
    def read(text: str) -> Any:
        if text not in values:
            raise InvalidConfig(f"{text!r} is unknown; use {', '.join(filter(None, values))}")
        return values[text]

    return read


def _recompute(text: str) -> str:
    Recompute.parse(text or "none")
    return text or "none"


def _engine(text: str) -> str:
    if text and text not in known_engines():
        raise InvalidConfig(f"{text!r} is unknown; use one of {', '.join(known_engines())}, or say --engine")
    return text or "megatron"


_TRUTH = _one_of({"": False, "true": True, "false": False})
_ABOVE_0 = _number(math.ulp(0.0), sys.float_info.max, "empty or a number above 0")
_COLUMNS: dict[str, _Cell] = {
    **dict.fromkeys(("table", "row", "model"), str),
    **dict.fromkeys(
        ("hidden", "layers", "heads", "ffn", "vocab", "seq_len", "gpus", "global_batch", "micro_batch", "dp", "tp",
         "pp"),
        _whole(1),
    ),
    "gpu": find_gpu,
    "kernel": _one_of(KERNELS),
    "status": _one_of(_OUTCOMES),
    **dict.fromkeys(("kv_heads", "gpus_per_node", "cp", "virtual_stages"), _whole(1, may_be_empty=True)),
    "zero": _whole(0, 3, may_be_empty=True),
    **dict.fromkeys(("tied", "sequence_parallel"), lambda text: _TRUTH(text.lower())),
    "recompute": _recompute,
    "engine": _engine,
    "step_time_s": _ABOVE_0,
    "mfu": _number(0.0, 1.0, "empty or a number, 0 to 1"),
    "peak_memory_gb": _ABOVE_0,
}  # fmt: skip
"""Column → what its cells say."""
_REQUIRED = list(_COLUMNS)[: list(_COLUMNS).index("kv_heads")]
