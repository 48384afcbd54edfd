"""A calibrated cluster as the TOML file that `load_cluster` reads: every number with its unit and its source."""

from dataclasses import fields

from dtlayout.calibrate.fit import Calibration
from dtlayout.calibrate.measured import Measured
from dtlayout.cluster import UNITS, find_gpu
from dtlayout.costmodel.engine import Constants


def to_toml(measured: Measured, found: Calibration) -> str:
    """The text of the file."""
    gpu, sheet = found.cluster.gpu, find_gpu(measured.gpu)
    source = f"dtlayout calibrate, {measured.date}, torch {measured.torch}"
    lines = [
        f"# {measured.num_ranks} ranks on {measured.device}, measured by {source}.",
        f"# Steps of {len(measured.probes)} small models are predicted to {found.error:.1%} (median).",
        f'gpu = "{gpu.name}"',
        f"gpus = {found.cluster.num_gpus}",
        f"gpus_per_node = {found.cluster.gpus_per_node}",
    ]
    for name, (field, unit) in UNITS.items():
        value = getattr(gpu, field)
        if name != "gpus_per_node" and value != getattr(sheet, field):
            lines += _table(name, value, unit, source)
    units = {field.name: field.metadata["unit"] for field in fields(Constants)}
    for name, value in gpu.reached:
        lines += _table(f"reached.{name}", value, units[name], source)
    return "\n".join(lines) + "\n"


def _table(name: str, value: float, unit: str, source: str) -> list[str]:
    shown = str(value) if isinstance(value, int) else f"{value:.5g}"
    return ["", f"[{name}]", f"value = {shown}", f'unit = "{unit}"', f'source = "{source}"']
