"""Tables: CSV files of measured runs, every cell checked before the first row is predicted."""

import csv
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, get_args

from dtlayout.cluster import find_gpu
from dtlayout.costmodel.engine import known_engines
from dtlayout.errors import DtlayoutError, InvalidConfig
from dtlayout.planner.runs import KERNELS, Run, Status, read_runs
from dtlayout.recompute import Recompute

_MOST_PROBLEMS = 20
"""Cells of a table that are named; a wrong column would name every row."""


def read_tables(paths: Sequence[str | Path], engine: str | None = None) -> list[Run]:
    """All rows of tables, as `read_runs`; InvalidConfig names file, line and column of each cell that is wrong."""
    if engine is not None and engine not in known_engines():
        raise InvalidConfig(f"--engine={engine} is unknown; use one of {', '.join(known_engines())}")
    if problems := [problem for path in paths for problem in _check_cells(Path(path), engine)]:
        raise InvalidConfig(problems)
    return read_runs(paths, engine)


def _check_cells(path: Path, engine: str | None) -> list[str]:
    """One line for each cell that cannot be read; a file that is no table at all is left to `read_runs`."""
    try:
        with path.open(newline="", encoding="utf-8") as file:
            problems = list(_find_bad_cells(path, csv.DictReader(file), engine))
    except (OSError, UnicodeDecodeError, csv.Error):
        return []
    more = len(problems) - _MOST_PROBLEMS
    return problems if more <= 0 else [*problems[:_MOST_PROBLEMS], f"table {path}: {more} more cells are wrong"]


def _find_bad_cells(path: Path, reader: "csv.DictReader[str]", engine: str | None) -> Iterator[str]:
    checks = _CHECKS if engine is None else {name: c for name, c in _CHECKS.items() if name != "engine"}
    for row in reader:
        where = f"table {path}, line {reader.line_num}"
        if None in row:
            yield f"{where}: more cells than the {len(reader.fieldnames or ())} columns"
        for name, check in checks.items():
            if name not in row:
                continue
            try:
                check(row[name])
            except (DtlayoutError, ValueError) as error:
                yield f"{where}, column {name}: {error}"


def _whole(least: int, most: float = math.inf, *, may_be_empty: bool = False) -> Callable[[Any], None]:
    expected = f"a whole number of at least {least}" if most == math.inf else f"a whole number, {least} to {most}"

    def check(text: str | None) -> None:
        if not text and may_be_empty:
            return
        try:
            value = float(text or "")
            is_right = least <= value <= most and value == int(value)
        except (ValueError, OverflowError):
            is_right = False
        if not is_right:
            raise InvalidConfig(f"{text or ''!r} must be {expected}")

    return check


def _number(most: float = sys.float_info.max, *, is_zero_right: bool) -> Callable[[Any], None]:
    expected = "a number above 0" if not is_zero_right else f"a number, 0 to {most}"

    def check(text: str | None) -> None:
        if not text:
            return
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        least = 0.0 if is_zero_right else math.ulp(0.0)
        if not least <= value <= most:
            raise InvalidConfig(f"{text!r} must be empty or {expected}")

    return check


def _one_of(*words: str) -> Callable[[Any], None]:
    def check(text: str | None) -> None:
        if (text or "").strip() not in words:
            raise InvalidConfig(f"{text or ''!r} is unknown; use {', '.join(w for w in words if w)}")

    return check


def _check_truth(text: str | None) -> None:
    _one_of("", "true", "false")((text or "").lower())


def _check_engine(text: str | None) -> None:
    if text and text not in known_engines():
        raise InvalidConfig(f"{text!r} is unknown; use one of {', '.join(known_engines())}, or say --engine")


_CHECKS: dict[str, Callable[[Any], object]] = {
    **dict.fromkeys(
        ("hidden", "layers", "heads", "ffn", "vocab", "seq_len", "gpus", "global_batch", "micro_batch", "dp", "tp",
         "pp"),
        _whole(1),
    ),
    **dict.fromkeys(("kv_heads", "gpus_per_node", "cp", "virtual_stages"), _whole(1, may_be_empty=True)),
    "zero": _whole(0, 3, may_be_empty=True),
    **dict.fromkeys(("tied", "sequence_parallel"), _check_truth),
    "recompute": lambda text: Recompute.parse(text or "none"),
    "engine": _check_engine,
    "gpu": lambda text: find_gpu(text or ""),
    "kernel": _one_of(*KERNELS),
    "status": _one_of(*get_args(Status)),
    "step_time_s": _number(is_zero_right=False),
    "mfu": _number(1.0, is_zero_right=True),
    "peak_memory_gb": _number(is_zero_right=False),
}  # fmt: skip
"""Column → what its cells may be; raises InvalidConfig, without saying where."""
