"""What is known of each GPU type, read from constants/clusters/*.toml."""

from dataclasses import dataclass
from functools import cache
from importlib.resources import files

from dtlayout import toml
from dtlayout.errors import InvalidConfig


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """One GPU type."""

    name: str
    """The name that configs and commands use."""
    device_names: tuple[str, ...]
    """What torch.cuda.get_device_name() says on it."""
    peak_flops_per_s: float
    """Dense bf16 matrix FLOP/s of the data sheet: the 100 % of MFU."""


@cache
def known_gpus() -> dict[str, Gpu]:
    """Every GPU type that a constants file describes, by name."""
    folder = files("dtlayout") / "constants" / "clusters"
    entries = sorted((e for e in folder.iterdir() if e.name.endswith(".toml")), key=lambda e: e.name)
    tables = [toml.loads(entry.read_text(encoding="utf-8")) for entry in entries]
    return {
        t["gpu"]: Gpu(
            name=t["gpu"], device_names=tuple(t["device_names"]), peak_flops_per_s=float(t["peak_bf16"]["value"])
        )
        for t in tables
    }


def find_gpu(name: str) -> Gpu:
    """The GPU type called `name`; InvalidConfig names them all if there is none."""
    if name not in known_gpus():
        raise InvalidConfig(f"GPU type {name!r} is unknown; use one of {', '.join(known_gpus())}")
    return known_gpus()[name]


def find_gpu_by_device(device_name: str) -> Gpu | None:
    """The GPU type that torch reports as `device_name`, if a constants file knows it."""
    return next((gpu for gpu in known_gpus().values() if device_name in gpu.device_names), None)
