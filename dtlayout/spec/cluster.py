"""GPU types with their numbers, read from constants/clusters/*.toml, and clusters of them.

A number is a TOML table with its `value`, its `unit` and its `source`. The numbers are those of data sheets, which no
message and no kernel reaches; a user's file (`load_cluster`) may replace them by measured ones. Bandwidths count one
direction.
"""

import math
import re
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from pathlib import Path
from typing import Any, Literal

from dtlayout.base import toml
from dtlayout.base.errors import InvalidConfig
from dtlayout.spec.precision import MatmulFormat

_NUMBERS = {  # number in a file: the field of Gpu that it becomes, its unit
    "peak_bf16": ("peak_flops_per_s", "FLOP/s, dense"),
    "memory": ("memory_bytes", "byte"),
    "memory_bandwidth": ("memory_bytes_per_s", "byte/s"),
    "link_bandwidth": ("link_bytes_per_s", "byte/s"),
    "link_latency": ("link_latency_s", "s"),
    "network_bandwidth": ("network_bytes_per_s", "byte/s"),
    "network_latency": ("network_latency_s", "s"),
    "gpus_per_node": ("gpus_per_node", "GPU"),
}
_OPTIONAL = {  # of a GPU type that has it
    "peak_fp16": ("peak_fp16_flops_per_s", "FLOP/s, dense"),
    "peak_fp8": ("peak_fp8_flops_per_s", "FLOP/s, dense"),
    "peak_fp4": ("peak_fp4_flops_per_s", "FLOP/s, dense"),
    "board_power": ("board_power_w", "W"),
    "gpus_linked": ("gpus_linked", "GPU"),
    "host_link": ("host_link_bytes_per_s", "byte/s"),
    "host_memory": ("host_memory_bytes", "byte"),
    "host_memory_bandwidth": ("host_memory_bytes_per_s", "byte/s"),
    "disk_bandwidth": ("disk_bytes_per_s", "byte/s"),
}
UNITS = (
    _NUMBERS
    | _OPTIONAL
    | {  # and those that only a measured cluster gives
        "peak_fp32": ("peak_fp32_flops_per_s", "FLOP/s, dense"),
        "ranks_at_once": ("ranks_at_once", "rank"),
        "prediction_error": ("prediction_error", "share"),
    }
)
"""Number that a cluster's file may give: the field of Gpu that it becomes, its unit."""
_WHOLE_UNITS = ("byte", "GPU")
_LEFT_OUT_OF_NAMES = ("nvidia", "amd", "geforce", "instinct", "tesla", "rtx")
"""Words of a GPU's name that people may leave out."""


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """One GPU type, in the server that its vendor builds around it."""

    name: str
    """The name that configs and commands use."""
    device_names: tuple[str, ...]
    """Names that torch.cuda.get_device_name() returns on it."""
    peak_flops_per_s: float
    """Dense bf16 matrix FLOP/s of the data sheet, 100 % of MFU. For `cpu` an order of magnitude, and no MFU."""
    memory_bytes: int
    """Bytes that torch.cuda reports as total_memory: less than the data sheet, and drivers differ a little."""
    memory_bytes_per_s: float
    """Byte/s between the GPU and its own memory."""
    link_bytes_per_s: float
    """Byte/s that it can send to all peers in its node together."""
    link_latency_s: float
    """Seconds that a message inside the node takes to start, for each hop."""
    network_bytes_per_s: float
    """Byte/s that it can send to other nodes while all GPUs of its node send too."""
    network_latency_s: float
    """Seconds that a message between nodes takes to start, for each hop."""
    gpus_per_node: int
    """GPUs of a node, which share its links."""
    peak_fp16_flops_per_s: float | None = None
    """Dense fp16 matrix FLOP/s of the data sheet; None where it is that of bf16."""
    peak_fp8_flops_per_s: float | None = None
    """Dense fp8 matrix FLOP/s of the data sheet, accumulated in fp32; None where no unit multiplies fp8."""
    peak_fp4_flops_per_s: float | None = None
    """Dense fp4 matrix FLOP/s of the data sheet; None where no unit multiplies fp4."""
    board_power_w: float | None = None
    """Watts for which the board is sold, and at which its clock falls; None where they are not known."""
    gpus_linked: int = 1
    """GPUs that the fast links join, if these reach beyond a node, as in a rack; 1 if they end with the node."""
    host_link_bytes_per_s: float | None = None
    """Byte/s that it copies to or from its host's memory while all GPUs of the node copy too; None where not known."""
    host_memory_bytes: int | None = None
    """Bytes of the host's memory for each GPU; None where not known, as for cards, which go into any server."""
    host_memory_bytes_per_s: float | None = None
    """Byte/s between the host's processors and their memory, for each GPU; None where not known."""
    disk_bytes_per_s: float | None = None
    """Byte/s that a node reads or writes in the folder of `layout.offload_folder`, all its ranks together; None where
    not known."""
    capability: tuple[int, ...] = ()
    """CUDA's compute capability, major and minor; empty where there is none."""
    peak_fp32_flops_per_s: float | None = None
    """Peak matrix FLOP/s in fp32. None where nobody measured it; fp32 then counts as bf16."""
    ranks_at_once: float = math.inf
    """Ranks of a node that have their full speed at the same time: fewer than there are, if ranks share cores."""
    prediction_error: float | None = None
    """Median relative error of steps that were predicted for these machines before they ran; None where not known."""
    achieved: tuple[tuple[str, float], ...] = ()
    """Names and values of constants of the cost model (`Constants`) that were measured on these machines."""

    @property
    def device_type(self) -> Literal["cpu", "cuda"]:
        """Kind of device, as torch names it."""
        return "cpu" if self.name == "cpu" else "cuda"

    @property
    def has_mfu(self) -> bool:
        """Whether it has a peak against which MFU is measured; a CPU has none."""
        return self.device_type != "cpu"

    def peak_of(self, matmuls: MatmulFormat) -> float | None:
        """Dense matrix FLOP/s in a format below bf16; None where no unit multiplies it."""
        if matmuls.peak == "fp4" or (matmuls.scales_blocks and not self.peak_fp4_flops_per_s):
            return self.peak_fp4_flops_per_s
        return self.peak_fp8_flops_per_s

    @property
    def is_known(self) -> bool:
        """Whether more than its name is known; otherwise nothing is predicted for it."""
        return self.peak_flops_per_s > 0


@dataclass(frozen=True, kw_only=True)
class SweepRecord:
    """Errors of the predictions for one sweep, which were made before it ran."""

    sweep: str
    """Name of the sweep."""
    date: str
    """Day of its last result, YYYY-MM-DD."""
    version: str
    """Version of dtlayout."""
    hardware: str
    """GPU type on which the sweep ran."""
    runs: int
    """Number of trials with a measured and a predicted step."""
    error: float
    """Median of abs(predicted step / measured step - 1)."""
    regret: float
    """Relative difference between the step of the layout that was predicted best and the shortest step."""

    def __str__(self) -> str:
        return (
            f"track record: {self.sweep}, {self.date}, version {self.version} on {self.hardware}: {self.runs} steps "
            f"predicted to {self.error:.1%} (median), the layout predicted best {self.regret:.1%} behind the best one"
        )


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """GPUs of one type in nodes."""

    gpu: Gpu
    """GPU type of all of them."""
    num_gpus: int
    """GPUs in all nodes together."""
    gpus_per_node: int
    """GPUs of one node, which may differ from the vendor's server; the last node may hold fewer."""
    records: tuple[SweepRecord, ...] = ()
    """Errors of earlier predictions for it, by sweep."""
    file: str = field(default="", compare=False)
    """Path of the TOML file from which it was read; empty if there is none."""

    @property
    def gpus_linked(self) -> int:
        """GPUs that fast links join: those of a node, or those of a larger domain, as far as the cluster fills it."""
        return max(self.gpus_per_node, min(self.gpu.gpus_linked, self.num_gpus))

    @property
    def num_nodes(self) -> int:
        """Nodes of the cluster."""
        return -(-self.num_gpus // self.gpus_per_node)

    @property
    def ranks_at_once(self) -> float:
        """Ranks of all nodes that have their full speed at the same time."""
        return self.gpu.ranks_at_once * self.num_nodes

    @cached_property
    def contention(self) -> float:
        """Factor by which work of all ranks at the same time takes longer because they share cores; 1 if they don't."""
        return max(1.0, self.num_gpus / self.ranks_at_once)

    def __post_init__(self) -> None:
        if problems := _count_problems({"num_gpus": self.num_gpus, "gpus_per_node": self.gpus_per_node}):
            raise InvalidConfig(problems)


def known_gpus() -> dict[str, Gpu]:
    """Every GPU type with a file, by name. The CPU is not among them, since it has no peak for MFU."""
    return {name: gpu for name, gpu in _read_constants().items() if gpu.has_mfu}


def find_gpu(name: str) -> Gpu:
    """The GPU type called `name`, which may be `cpu`, or as people write it; InvalidConfig with all names if none is.

    Of several with such a name it is the SXM module, and of these the one with the most memory.

    >>> find_gpu("H100").name, find_gpu("NVIDIA RTX 4090").name, find_gpu("mi300x").name
    ('h100-80g-sxm', 'rtx4090-24g', 'mi300x-192g')
    """
    if found := list_gpus_called(name):
        return found[0]
    raise InvalidConfig(f"GPU type {name!r} is unknown; use one of {', '.join(_read_constants())}")


def list_gpus_called(name: str) -> list[Gpu]:
    """The GPU types that people may mean by a name, the one that `find_gpu` takes first."""
    known = _read_constants()
    if name in known:
        return [known[name]]
    asked = _split_name(name)
    found = [gpu for each, gpu in known.items() if asked and asked <= _split_name(each)]
    return sorted(found, key=lambda gpu: (not gpu.name.endswith("-sxm"), -gpu.memory_bytes))


def _split_name(name: str) -> set[str]:
    """The words of a name, without what people leave out: the vendor and its product line.

    >>> sorted(_split_name("NVIDIA A100 80GB"))
    ['80g', 'a100']
    """
    words = re.findall(r"[a-z0-9]+", name.lower())
    kept = (word.removeprefix("rtx") for word in words if word not in _LEFT_OUT_OF_NAMES)
    return {re.sub(r"^(\d+g)b$", r"\1", word) for word in kept if word}


def gpu_named(name: str) -> Gpu:
    """The GPU type called `name`; if there is none, a type of which only the name is known (`Gpu.is_known`)."""
    nothing: dict[str, Any] = {field: 0 for field, _ in _NUMBERS.values()}
    return _read_constants().get(name) or Gpu(name=name, device_names=(name,), capability=(), **nothing)


def register_gpu(file: str | Path) -> Gpu:
    """Make known the GPU type of a file of the same form as constants/clusters/*.toml.

    InvalidConfig with every problem of the file, or if the GPU's name is taken.
    """
    gpu = parse_gpu(toml.read(file, "GPU type"), str(file))
    if gpu.name in _read_constants():
        raise InvalidConfig(f"{file}: GPU type {gpu.name!r} is there already; give yours another name")
    _read_constants()[gpu.name] = gpu
    return gpu


def find_gpu_by_device(device_name: str) -> Gpu | None:
    """The GPU type that torch reports as `device_name`, None if there is none; older drivers leave the vendor out.

    Names are compared whole: a PCIe card, an NVL or a slice of a GPU is called like the SXM module and a word more, and
    has other numbers.
    """
    names = (device_name, f"NVIDIA {device_name}")
    return next((gpu for gpu in known_gpus().values() if not {*names}.isdisjoint(gpu.device_names)), None)


def is_slice(device_name: str) -> bool:
    """Whether a device that torch reports as `device_name` is a part of a GPU, as MIG makes them.

    >>> is_slice("NVIDIA A100-SXM4-40GB MIG 3g.20gb"), is_slice("NVIDIA A100-SXM4-40GB")
    (True, False)
    """
    return " MIG " in device_name


def why_unknown(device_name: str) -> str:
    """The reason why there is no GPU type for a device, as a part of a sentence."""
    if is_slice(device_name):
        return f"{device_name} is a part of a GPU, whose peak is not known"
    return f"{device_name} is no GPU whose data sheet is known"


def load_cluster(path: str | Path) -> Cluster:
    """The cluster of a user's TOML file; InvalidConfig with every problem.

    The file gives `gpu` and `gpus`, `gpus_per_node` if its nodes differ from the vendor's, and may override any other
    number of the GPU with a table of the same form as in the constants. What `dtlayout calibrate` has measured beside
    those stands in it too, constants of the cost model below `achieved`, and what predictions were worth in `record`.
    """
    types = {
        "gpu": str, "gpus": int, **dict.fromkeys(UNITS, _Number), "gpus_per_node": int,
        "achieved": dict[str, _Number], "record": tuple[SweepRecord, ...],
    }  # fmt: skip
    tables, problems = toml.read(path, "cluster"), list[str]()
    found = toml.read_keys(tables, types, ("gpu", "gpus"), "", problems)
    problems += _count_problems({key: found[key] for key in ("gpus", "gpus_per_node") if key in found})
    numbers = {name: number for name, number in found.items() if isinstance(number, _Number)}
    problems += [line for name, number in numbers.items() for line in number.problems(name, UNITS[name][1])]
    achieved = found.get("achieved", {})
    problems += [line for name, number in achieved.items() for line in number.problems(f"achieved.{name}")]
    try:
        gpu = find_gpu(found.get("gpu", "cpu"))  # one that is missing is a problem already
    except InvalidConfig as error:
        problems += error.problems
    if problems:
        raise InvalidConfig([f"cluster {path}: {problem}" for problem in problems])
    constants = tuple((name, number.value) for name, number in achieved.items())
    return Cluster(
        gpu=replace(gpu, **_gpu_fields(numbers), achieved=constants), num_gpus=found["gpus"],
        gpus_per_node=found.get("gpus_per_node", gpu.gpus_per_node), records=found.get("record", ()), file=str(path),
    )  # fmt: skip


def parse_gpu(tables: dict[str, Any], file: str) -> Gpu:
    """The GPU type of a parsed constants file; InvalidConfig with every problem, each under the file's name."""
    problems: list[str] = []
    types = {
        "gpu": str, "device_names": tuple[str, ...], "capability": tuple[int, ...], **dict.fromkeys(_NUMBERS, _Number),
    }  # fmt: skip
    optional = dict.fromkeys(_OPTIONAL, _Number)
    found = toml.read_keys(tables, types | optional, tuple(types), "", problems)
    numbers = {name: number for name, number in found.items() if isinstance(number, _Number)}
    problems += [line for name, number in numbers.items() for line in number.problems(name, UNITS[name][1])]
    if problems:
        raise InvalidConfig([f"{file}: {problem}" for problem in problems])
    names, capability = found["device_names"], found["capability"]
    return Gpu(name=found["gpu"], device_names=names, capability=capability, **_gpu_fields(numbers))


@cache
def _read_constants() -> dict[str, Gpu]:
    """All GPU types with a file, and the CPU, by name; `register_gpu` adds to them."""
    gpus = [parse_gpu(tables, file) for file, tables in toml.read_constants("clusters").items()]
    return {gpu.name: gpu for gpu in gpus}


@dataclass(frozen=True, kw_only=True)
class _Number:
    """A number with its unit and its source, as in a file."""

    value: float
    unit: str
    source: str

    def problems(self, name: str, unit: str | None = None) -> list[str]:
        """Problems that keep the number from being used. Its unit is one: 50 GB/s read as 50 byte/s would go unseen.

        Without a unit it may be any, and zero: those of the cost model's constants are known to the cost model alone.
        """
        problems = []
        if not 0 <= self.value < math.inf or (self.value == 0 and unit):
            problems.append(f"{name}.value={self.value:g} must be a number above 0")
        elif unit in _WHOLE_UNITS and self.value != int(self.value):
            problems.append(f"{name}.value={self.value} must be a whole number")
        if unit not in (None, self.unit):
            problems.append(f"{name}.unit={self.unit!r} must be {unit!r}; convert the value")
        if not self.source.strip():
            problems.append(f"{name}.source={self.source!r} must say where the number comes from")
        return problems


def _gpu_fields(numbers: dict[str, _Number]) -> dict[str, Any]:
    """Fields of `Gpu` from the numbers that have no problem."""
    found = [(*UNITS[name], number.value) for name, number in numbers.items()]
    return {field: int(value) if unit in _WHOLE_UNITS else value for field, unit, value in found}


def _count_problems(counts: dict[str, Any]) -> list[str]:
    wrong = {name: count for name, count in counts.items() if type(count) is not int or count < 1}  # true is an int
    return [f"{name}={count!r} must be a whole number of at least 1" for name, count in wrong.items()]
