"""Runs: rows of a table of measured training runs, read into the values that a prediction takes.

The columns are those of published sweeps: model sizes, engine, GPUs, batch, degrees, kernel, status, step time, MFU and
peak memory in GiB; an empty cell means that the source does not say. `zero` 0 is replicated state: dp_replicate = dp.
docs/sweep.md has a line on each.
"""

import csv
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from dtlayout.batch import Batch
from dtlayout.cluster import Cluster, find_gpu
from dtlayout.costmodel.engine import find_engine
from dtlayout.costmodel.scenario import Scenario
from dtlayout.errors import DtlayoutError, InvalidConfig
from dtlayout.kernels import Kernels
from dtlayout.layout import Layout
from dtlayout.model_shape import ModelShape
from dtlayout.pipelining.schedules import schedule_with

GIB = 2**30
KERNELS = {
    "torch": Kernels(attention="torch", norm="eager"),
    "megatron-softmax": Kernels(attention="megatron-softmax", norm="eager"),
    "flash1": Kernels(attention="flash1", norm="eager"),
    "flash2": Kernels(attention="sdpa-flash", norm="eager"),
    "flash2+rmsnorm": Kernels(attention="sdpa-flash", norm="fused"),
}
"""A table's word for attention and norm → our kernels."""

Status = Literal["ok", "oom", "crashed_or_oom", "unavailable", "error"]
_NUMBERS = (
    "hidden", "layers", "heads", "ffn", "vocab", "seq_len", "gpus", "global_batch", "micro_batch", "dp", "tp", "pp",
)  # fmt: skip
_REQUIRED = ("table", "row", "model", "gpu", "kernel", "status", *_NUMBERS)


@dataclass(frozen=True)
class Run:
    """One row: what ran, and what was measured."""

    table: str
    """The sweep it belongs to."""
    row: str
    """Its name there."""
    scenario: Scenario
    """Model, batch, cluster and engine."""
    layout: Layout
    """Its layout; not always one that our trainer takes."""
    kernels: Kernels
    """Its kernels."""
    status: Status
    """How it ended."""
    step_time_s: float | None
    """Measured seconds of a step."""
    mfu: float | None
    """Measured MFU, 0 to 1."""
    peak_bytes: float | None
    """Measured peak of the allocator on pipeline rank 0."""

    @property
    def ran(self) -> bool:
        """Whether it ended with a speed."""
        return self.status == "ok" and self.speed is not None

    @property
    def speed(self) -> float | None:
        """MFU; on a CPU, which has none, steps a second."""
        if self.mfu is None and not self.scenario.cluster.gpu.has_mfu and self.step_time_s:
            return 1 / self.step_time_s
        return self.mfu


def read_runs(paths: Sequence[str | Path], engine: str | None = None) -> list[Run]:
    """All rows of tables; `engine` is put in the place of each row's own. InvalidConfig names file, row and column."""
    return [run for path in paths for run in _read_table(Path(path), engine)]


def _read_table(path: Path, engine: str | None) -> list[Run]:
    try:
        with path.open(newline="", encoding="utf-8") as file:
            reader = csv.DictReader(file)
            missing = [name for name in _REQUIRED if name not in (reader.fieldnames or ())]
            if missing:
                raise InvalidConfig(f"table {path} has no column {', '.join(missing)}")
            rows = list(reader)
    except OSError as error:
        raise InvalidConfig(f"table {path} cannot be read: {error.strerror}") from None
    except (UnicodeDecodeError, csv.Error) as error:
        raise InvalidConfig(f"table {path} is not CSV: {error}") from None
    runs = []
    for number, row in enumerate(rows, start=2):
        try:
            runs.append(_parse(row, engine))
        except (DtlayoutError, ValueError, KeyError) as error:
            what = f"{error.args[0]} is unknown" if isinstance(error, KeyError) else str(error)
            raise InvalidConfig(f"table {path}, line {number}: {what}") from None
    return runs


def _parse(row: dict[str, str], engine: str | None) -> Run:
    gpu, kernel = find_gpu(row["gpu"]), row["kernel"]
    n = {name: int(float(row[name])) for name in _NUMBERS}
    n["kv_heads"] = _whole(row, "kv_heads", n["heads"])
    n["gpus_per_node"] = _whole(row, "gpus_per_node", gpu.gpus_per_node)
    if kernel not in KERNELS:
        raise InvalidConfig(f"kernel={kernel!r} is unknown; use one of {', '.join(KERNELS)}")
    peak_gib, layout = _optional(row, "peak_memory_gb"), _parse_layout(row, n)
    if layout.world_size != n["gpus"]:
        raise InvalidConfig(f"dp·cp·tp·pp is {layout.world_size}, but gpus={n['gpus']}")
    return Run(
        table=row["table"],
        row=row["row"],
        scenario=Scenario(
            model=_parse_model(row, n),
            batch=Batch(global_batch=n["global_batch"], seq_len=n["seq_len"]),
            cluster=Cluster(gpu=gpu, num_gpus=n["gpus"], gpus_per_node=n["gpus_per_node"]),
            engine=find_engine(engine or row.get("engine") or "megatron", gpu.name),
        ),
        layout=layout,
        kernels=KERNELS[kernel],
        status=row["status"],  # type: ignore[arg-type]
        step_time_s=_optional(row, "step_time_s"),
        mfu=_optional(row, "mfu"),
        peak_bytes=None if peak_gib is None else peak_gib * GIB,
    )


def _parse_model(row: dict[str, str], n: dict[str, int]) -> ModelShape:
    return ModelShape(
        name=row["model"],
        hidden_size=n["hidden"],
        num_layers=n["layers"],
        num_heads=n["heads"],
        num_kv_heads=n["kv_heads"],
        ffn_size=n["ffn"],
        vocab_size=n["vocab"],
        tied_embeddings=_is_true(row.get("tied")),
    )


def _parse_layout(row: dict[str, str], n: dict[str, int]) -> Layout:
    zero, virtual_stages = _whole(row, "zero", 1), _whole(row, "virtual_stages", 1)
    is_replicated = zero == 0
    return Layout(
        pp=n["pp"],
        dp_replicate=n["dp"] if is_replicated else 1,
        dp_shard=1 if is_replicated else n["dp"],
        cp=_whole(row, "cp", 1),
        tp=n["tp"],
        sequence_parallel=_is_true(row.get("sequence_parallel")),
        micro_batch=n["micro_batch"],
        schedule=schedule_with(virtual_stages),
        virtual_stages=virtual_stages,
        zero=max(1, zero),  # type: ignore[arg-type]
        recompute=row.get("recompute") or "none",
    )


def _whole(row: dict[str, str], name: str, default: int) -> int:
    return int(float(row[name])) if row.get(name) else default


def _optional(row: dict[str, str], name: str) -> float | None:
    return float(row[name]) if row.get(name) else None


def _is_true(text: str | None) -> bool:
    return (text or "").strip().lower() == "true"
