"""A calibrated cluster as the TOML file that `load_cluster` reads: every number with its unit and its source."""

from collections.abc import Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from dtlayout.base import toml
from dtlayout.base.files import write_whole
from dtlayout.calibrate.measured import Measured
from dtlayout.costmodel.engine import Engine
from dtlayout.costmodel.engine_constants import Constants
from dtlayout.spec.cluster import UNITS, Cluster, SweepRecord, find_gpu

_UNITS = {field.name: field.metadata["unit"] for field in fields(Constants)}


def to_toml(measured: Measured, cluster: Cluster, records: Sequence[SweepRecord] = ()) -> str:
    """Text of a new file for the measured cluster; `records` are those of the file that it replaces."""
    gpu, sheet = cluster.gpu, find_gpu(measured.gpu)
    source = f"dtlayout calibrate, {measured.date}, torch {measured.torch}"
    tables: dict[str, Any] = {"gpu": gpu.name, "gpus": cluster.num_gpus, "gpus_per_node": cluster.gpus_per_node}
    for name, (field, unit) in UNITS.items():
        value = getattr(gpu, field)
        if name not in tables and value != getattr(sheet, field):
            where = f": an update of state in {measured.disk_folder}" if name == "disk_bandwidth" else ""
            tables[name] = _number(value, unit, source + where)
    tables["achieved"] = {name: _number(value, _UNITS[name], source) for name, value in gpu.achieved}
    tables["record"] = [asdict(record) for record in records]
    return toml.dumps(tables)


def update(path: Path, engine: Engine, records: Sequence[SweepRecord], source: str) -> None:
    """Write the fitted constants of `engine` and new `records` into a cluster file, in place of older ones.

    `source` says where the constants come from. The last record gives the file's prediction error.
    """
    tables = toml.read(path, "cluster")
    achieved = tables.setdefault("achieved", {})
    achieved |= {name: _number(getattr(engine.constants, name), _UNITS[name], source) for name in engine.fitted}
    new = {(record.sweep, record.date) for record in records}  # a sweep is recorded once, even if fitted to twice
    kept = [each for each in tables.get("record", []) if (each["sweep"], each["date"]) not in new]
    tables["record"] = [*kept, *map(asdict, records)]
    if records:
        unit = UNITS["prediction_error"][1]
        tables["prediction_error"] = _number(records[-1].error, unit, f"sweep {records[-1].sweep}, {records[-1].date}")
    write_whole(path, toml.dumps(tables))


def _number(value: float, unit: str, source: str) -> dict[str, Any]:
    return {"value": value if isinstance(value, int) else float(f"{value:.5g}"), "unit": unit, "source": source}
