"""Engine: a training program with its features, and the physical constants that were measured on it.

Features say what a program does: what it shards, what it sends, what it keeps. They are read off its code. Constants
(engine_constants.py) say how fast and how large. They are fitted by `dtlayout validate --fit` to runs of that engine:
those that hold on any GPU type to all of its runs, others to those on one type. Where no runs are known, general values
stand and a prediction is called uncalibrated.
constants/engines/*.toml holds both, and `register_engine` takes a file of the same form.
"""

from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields, replace
from functools import cache
from pathlib import Path
from typing import Any, Literal

from dtlayout.base import toml
from dtlayout.base.errors import InvalidConfig
from dtlayout.costmodel.engine_constants import BOUNDS, Constants, RunAheadConstants, list_outside
from dtlayout.spec.cluster import Gpu, gpu_named
from dtlayout.spec.context_parallel import CONTEXT_METHODS, DEFAULT_CONTEXT_METHOD
from dtlayout.spec.kernels import Kernels
from dtlayout.spec.layout_keys import OFFLOADS
from dtlayout.spec.model_shape import Experts, ModelShape
from dtlayout.spec.precision import BYTES, MATMUL_FORMATS, Precision
from dtlayout.spec.recompute import Recompute

OWN_ENGINE = "dtlayout"
"""The engine whose features are this trainer's."""
KNOWN_AXES = ("tp", "pp", "cp", "ep", "tp_overlap", "ep_overlap")
"""Fields of a layout that a program may lack."""
DATA_PARALLEL = ("replicated", "hybrid", "sharded")
"""Kinds of data parallelism: no ranks share the state, those of each group do, or all do."""


_MODEL_DEFAULTS = {f.name: f.default for f in fields(ModelShape) if f.default is not MISSING} | {
    f"experts.{f.name}": f.default for f in fields(Experts) if f.default is not MISSING
}
"""Key of [model] that may be left out → its default."""


@dataclass(frozen=True, kw_only=True)
class KnownKernels:
    """Kernels that a program has, by operation."""

    attention: tuple[str, ...] = ()
    """Names of kernels for `Kernels.attention`."""
    norm: tuple[str, ...] = ()
    """Names of kernels for `Kernels.norm`."""
    rope: tuple[str, ...] = ()
    """Names of kernels for `Kernels.rope`."""
    swiglu: tuple[str, ...] = ()
    """Names of kernels for `Kernels.swiglu`."""
    loss: tuple[str, ...] = ()
    """Names of kernels for `Kernels.loss`."""
    experts: tuple[str, ...] = ()
    """Names of kernels for `Kernels.experts`."""
    compile: tuple[str, ...] = ()
    """Names of kernels for `Kernels.compile`."""

    def __post_init__(self) -> None:
        for operation, names in vars(self).items():
            for name in names:
                Kernels(**{operation: name})


@dataclass(frozen=True, kw_only=True)
class Features:
    """Everything that a training program does in a step, whatever the hardware."""

    sharding: Literal["distributed-optimizer", "fsdp2"] = "distributed-optimizer"
    """How data-parallel ranks share the state. distributed-optimizer, as in Megatron: weights and gradients are whole,
    the optimizer is sharded. fsdp2: masters are sharded, and their copies are gathered."""
    gradient_bytes: int = 4
    """Bytes of a gradient while microbatches are accumulated; for fsdp2 precision.reduce says them."""
    reduce_bytes: int = 4
    """Bytes of a gradient when it is sent to other data-parallel ranks."""
    other_reduces: tuple[str, ...] = ()
    """Other formats in which the program can be told to accumulate and reduce gradients; fsdp2 takes any."""
    reduction: Literal["all-reduce", "reduce-scatter"] = "reduce-scatter"
    """Collective that sums gradients over the data-parallel ranks."""
    bucket_bytes: int = 0
    """Bytes for each parameter of the buffers through which gradients are reduced."""
    loss: Literal["vocab-parallel", "replicated"] = "vocab-parallel"
    """Loss under tp. vocab-parallel: each rank computes the part of its own columns of logits. replicated: each rank
    gathers all columns and computes the whole loss."""
    stage_split: Literal["cost", "parameters", "threshold"] = "cost"
    """How blocks are dealt out over stages. cost: by FLOPs. parameters: by parameters. threshold: a stage ends with the
    block that completes its fraction of the parameters."""
    input_reductions: int = 2
    """Number of input gradients that are summed over tp in a block's backward: at least one for attention and one for
    the FFN."""
    fuses_qkv: bool = True
    """Whether one matmul computes queries, keys and values."""
    regathers_inputs: bool = True
    """Whether sequence parallelism keeps the outputs of norms sharded and gathers them again in backward."""
    sums_embedding: bool = False
    """Whether each tp rank has a gradient of all rows of the embedding until gradients are summed, as with DTensor's
    style; else the rank has a gradient of its own rows."""
    dtensor_activations: bool = False
    """Whether tp computes on DTensors; else it computes on plain tensors. DTensors add up two gradients in a third
    tensor, and copy even a single sequence where it is gathered or scattered."""
    scatters_messages: bool = False
    """Whether each tp rank sends only 1/tp of the hidden states to the next stage."""
    blocking_messages: bool = False
    """Whether a stage waits until its message is sent."""
    overlaps_reduction: bool = True
    """Whether gradients are reduced and parameters are gathered while the GPU computes."""
    runs_ahead: bool = False
    """Whether the host starts the collectives of tp long before the GPU gets to them; their buffers are held
    meanwhile."""
    axes: tuple[str, ...] = ("tp", "pp")
    """Axes that the program has beside data parallelism: tp, pp, cp and ep; also tp_overlap and ep_overlap, if it can
    hide the messages of tp and of ep. A program with ep trains mixtures of experts and latent attention."""
    cp_methods: tuple[str, ...] = (DEFAULT_CONTEXT_METHOD,)
    """Methods by which the ranks of cp can attend to each other's tokens, the usual one first."""
    offloads: tuple[str, ...] = ("none",)
    """Values of `Layout.offload` that the program has. Offload is predicted for fsdp2 engines alone."""
    kernels: KnownKernels = field(default_factory=KnownKernels)
    """Kernels that the program has beside its usual ones, by our names."""
    matmuls: tuple[str, ...] = ()
    """Formats below bf16 in which its linear layers multiply, as in `Precision.matmuls`."""
    keeps_cast_inputs: bool = False
    """Whether a linear layer that multiplies in such a format keeps its input for backward as it was cast. Transformer
    Engine's layers do, unless told `save_original_input`. torchao's keep the original (`input_hp` in float8_linear.py),
    and cast it again in backward."""
    gathers_cast: tuple[Literal["activations", "weights"], ...] = ("activations", "weights")
    """Tensors that are cast to such a format before they are gathered, and so travel in its bytes: activations by
    sequence parallelism, weights by sharded data parallelism."""
    casts_itself: bool = False
    """Whether such linear layers are those of ops/scaled.py, of which every tensor is known. Layers with a side that
    `ALIGNMENT` does not divide stay in the compute format; other programs are predicted as if they took any."""
    untrained: tuple[str, ...] = ()
    """Keys of [model] that the program cannot train at other values than their defaults, although it is predicted with
    them. Only a check of a run refuses them."""
    always_sequence_parallel: bool = False
    """Whether tensor parallelism always shards the sequence too."""
    data_parallel: tuple[str, ...] = DATA_PARALLEL
    """Kinds of data parallelism that the program has, of `DATA_PARALLEL`."""
    highest_zero: Literal[1, 2, 3] = 3
    """Highest stage of ZeRO that the program has."""
    pipeline_zero: Literal[1, 2, 3] = 3
    """Highest stage of ZeRO in a pipeline. Below 3, parameters stay gathered; below 2, gradients stay whole."""
    schedules: tuple[str, ...] = ()
    """Pipeline schedules that the program has; all, where none is named."""
    recompute: tuple[str, ...] = ()
    """Kinds of recomputation that the program has; every-N stands for any N. Where none is named, `checkpointing` says
    them."""
    even_stages: bool = False
    """Whether all stages have as many blocks; the embedding, the head or both may count as a block."""
    checkpointing: Literal["torch", "megatron"] = "megatron"
    """Function that recomputes. torch: torch.utils.checkpoint, which stops once backward has its inputs, and can keep
    any operation. megatron: a function that runs all of a block's forward, and whose selective recomputation covers
    attention alone."""
    kept_matmuls: float = 1.0
    """Share of a block's matmuls whose results selective recomputation keeps, if it keeps any."""
    nests_experts: bool = False
    """True if experts are gathered and reduced as a unit of their own, by other ranks than the rest of their block. Our
    trainer does so, and predictions then count each tensor of its mixtures."""
    sends_tokens_once: bool = False
    """Whether a token goes once to a node where several experts compute it, as in DeepEP; else a copy goes to each
    expert."""
    frees_logits: bool = False
    """Whether the logits are freed before the gradient of a loss in plain PyTorch is computed."""
    reports_reserved: bool = False
    """Whether the printed peak counts all bytes that the allocator has reserved, with fragments; else it counts the
    bytes that are allocated at once."""
    rope_saved_bytes: int = 0
    """Bytes that the rotary embedding keeps for each token and unit of width, beside q, k and v as attention gets
    them."""

    def __post_init__(self) -> None:
        known = {
            "axes": KNOWN_AXES, "cp_methods": CONTEXT_METHODS, "offloads": OFFLOADS, "matmuls": MATMUL_FORMATS,
            "data_parallel": DATA_PARALLEL, "other_reduces": BYTES, "untrained": _MODEL_DEFAULTS,
        }  # fmt: skip
        problems = [
            f"features.{field}: {name!r} is unknown; use some of {list(names)}"
            for field, names in known.items()
            for name in getattr(self, field)
            if name not in names
        ]
        if not self.cp_methods:
            problems.append("features.cp_methods is empty; leave out cp of features.axes where there is none")
        if problems:
            raise InvalidConfig(problems)

    @property
    def formats(self) -> dict[str, tuple[str, ...]]:
        """Key of `Precision` → the formats that the program can be told, the usual one first; {} for fsdp2, which takes
        any.

        With a distributed optimizer, weights are always bf16 beside fp32 masters.
        """
        if self.sharding == "fsdp2":
            return {}
        usual = next(name for name, size in BYTES.items() if size == self.gradient_bytes)
        return {"params": ("float32",), "compute": ("bfloat16",), "reduce": (usual, *self.other_reduces)}

    def find_untrained(self, model: ModelShape) -> list[tuple[str, Any, Any]]:
        """Key, value and default of each key of [model] that the program is predicted with, but cannot train."""
        values = [(name, self._read(model, name), _MODEL_DEFAULTS[name]) for name in self.untrained]
        return [(name, value, default) for name, value, default in values if value not in (None, default)]

    @staticmethod
    def _read(model: ModelShape, name: str) -> Any:
        section, _, key = name.rpartition(".")
        return getattr(getattr(model, section) if section else model, key, None)

    @property
    def kind_of_constants(self) -> type["Constants"]:
        """Class of the program's constants."""
        return RunAheadConstants if self.runs_ahead else Constants


@dataclass(frozen=True, kw_only=True)
class Defaults:
    """Defaults of a program, for facts that a published run leaves open; None where nobody can tell."""

    micro_batch: int | None = None
    """Sequences of a micro-batch."""
    fills_pipeline_once: bool = False
    """Whether a pipeline gets as many microbatches as it has ranks; then `micro_batch` does not count."""
    zero: Literal[1, 2, 3] | None = None
    """Stage of ZeRO."""
    recompute: str | None = None
    """Kind of recomputation, as in `layout.recompute`."""
    sequence_parallel: bool | None = None
    """Whether sequence parallelism is on beside tensor parallelism."""
    fuses_norms: bool = False
    """Whether a norm is one kernel, even where a run does not call it fused."""
    kernels: Kernels = field(default_factory=Kernels)
    """Kernels of the program. Its attention here also stands for a run's flash attention of any version."""

    def __post_init__(self) -> None:
        if self.micro_batch is not None and self.micro_batch < 1:
            raise InvalidConfig(f"usual.micro_batch={self.micro_batch} must be at least 1")
        if self.recompute is not None:
            Recompute.parse(self.recompute)


ANY_GPU = "any"
"""Name in the place of a GPU type's, for constants that are fitted to runs on all types together."""
_NOTES = {"source": str, "gpus": list[str]}
"""Keys beside an engine's fitted constants, and their types; `gpus` are the GPU types of runs under ANY_GPU."""


@dataclass(frozen=True, kw_only=True)
class Engine:
    """A training program on one GPU type."""

    name: str
    """Name in tables and commands."""
    gpu: str
    """The GPU type that the constants are for."""
    features: Features
    """Facts about the program, whatever the hardware."""
    constants: Constants
    """Speeds and sizes, fitted or general."""
    fitted: tuple[str, ...]
    """Names of the constants that were fitted to runs on this GPU type alone."""
    shared: tuple[str, ...] = ()
    """Names of other constants, which were fitted to runs on all GPU types together."""
    shared_by: tuple[str, ...] = ()
    """GPU types of the runs on all types together."""
    source: str
    """The runs that its constants were fitted to."""

    @property
    def is_calibrated(self) -> bool:
        """Whether runs of this engine on this GPU type stand behind the constants."""
        return bool(self.fitted) or self.gpu in self.shared_by

    def told_formats(self, named: Mapping[str, str]) -> tuple["Engine", Precision]:
        """This engine with the formats in `named` (key of `Precision` → format), and its precision. A format that is
        not named is the engine's usual one. `reduce` alone changes the engine, in the bytes of its gradients.

        InvalidConfig for a format that is unknown, or that the engine does not have.
        """
        known, asked = self.features.formats, Precision(**named)  # type: ignore[arg-type]
        problems = [
            f"precision.{key}={getattr(asked, key)} is nothing that {self.name} has; "
            f"use precision.{key}={' or '.join(formats)}"
            for key, formats in known.items()
            if key in named and getattr(asked, key) not in formats
        ]
        if problems:
            raise InvalidConfig(problems)
        usual = {key: formats[0] for key, formats in known.items()}
        engine, precision = self, Precision(**{**usual, **named})  # type: ignore[arg-type]
        if known and precision.reduce != usual["reduce"]:
            size = BYTES[precision.reduce]
            engine = replace(self, features=replace(self.features, gradient_bytes=size, reduce_bytes=size))
        return engine, precision

    @property
    def at_bounds(self) -> tuple[str, ...]:
        """The fitted constants that stand at a bound: the runs don't determine them, or the formula is wrong."""
        names = (*self.shared, *self.fitted)
        values = ((name, getattr(self.constants, name), *BOUNDS[name]) for name in names)
        return tuple(name for name, value, low, high in values if min(value - low, high - value) < 1e-3 * (high - low))

    def with_constants(self, **values: float) -> "Engine":
        """This engine with other constants; InvalidConfig if one is outside its bounds."""
        return replace(self, constants=replace(self.constants, **values))


def known_engines() -> list[str]:
    """Names of all engines."""
    return list(_read_engines())


def find_usual(name: str) -> Defaults:
    """The defaults of the engine called `name`; for an unknown engine those of `Defaults`."""
    usual: Defaults = _read_engines().get(name, {}).get("usual", Defaults())
    return usual


def register_engine(file: str | Path) -> None:
    """Make known the engine of a file of the same form as constants/engines/*.toml.

    InvalidConfig with every problem of the file, or if the engine's name is taken.
    """
    engine = _parse_engine(toml.read(file, "engine"), str(file))
    if engine["engine"] in _read_engines():
        raise InvalidConfig(f"{file}: engine {engine['engine']!r} is there already; give yours another name")
    _read_engines()[engine["engine"]] = engine


def find_engine(name: str, gpu: str) -> Engine:
    """The engine called `name` on a GPU type; InvalidConfig names them all if there is none.

    Its constants are those before any fit (`find_unfitted`), then those fitted to its runs on any GPU type, then those
    fitted to its runs on this one.
    """
    unfitted, fits = find_unfitted(name, gpu), _read_engines()[name].get("fitted", {})
    alone, together = fits.get(gpu, {}), fits.get(ANY_GPU, {})
    values, shared_values = _constants_in(alone), _constants_in(together)
    found = replace(
        unfitted.with_constants(**{**shared_values, **values}),
        fitted=tuple(values),
        shared=tuple(name for name in shared_values if name not in values),
        shared_by=tuple(together.get("gpus", ())),
    )
    sources = [table["source"] for table in (alone, together) if "source" in table]
    if sources and found.is_calibrated:
        return replace(found, source="; ".join(sources))
    return replace(found, source="; ".join([found.source, *(f"constants from {source}" for source in sources)]))


def find_unfitted(name: str, gpu: str) -> Engine:
    """The engine called `name` on a GPU type before any of its runs was seen; InvalidConfig if there is none.

    Its constants are general ones, then those of the GPU type, then its own, with those that hold beside a GPU alone.
    """
    if (table := _read_engines().get(name)) is None:
        raise InvalidConfig(f"engine {name!r} is unknown; use one of {', '.join(known_engines())}")
    features, beside_gpu = table.get("features", Features()), gpu_named(gpu).device_type == "cuda"
    own = table.get("constants", {}) | (table.get("beside_gpu", {}) if beside_gpu else {})
    return Engine(
        name=name,
        gpu=gpu,
        features=features,
        constants=features.kind_of_constants(**{**_achieved_on(gpu), **own}),
        fitted=(),
        source="uncalibrated: no run of this engine on this GPU type is known",
    )


def find_engine_on(name: str, gpu: Gpu) -> Engine:
    """The engine called `name` on these GPUs: as `find_engine`, and our own with the constants measured on them.

    InvalidConfig if what was measured is no constant, or outside its bounds.
    """
    engine, measured = find_engine(name, gpu.name), dict(gpu.achieved)
    if name != OWN_ENGINE or not measured:
        return engine
    if problems := _problems(measured, "achieved", engine.features):
        raise InvalidConfig(problems)
    return replace(
        engine.with_constants(**measured),
        fitted=tuple(measured),
        shared=tuple(each for each in engine.shared if each not in measured),
        source="measurements on these machines",
    )


@cache
def _achieved_on(gpu: str) -> dict[str, float]:
    """Constants of a GPU type whatever the engine."""
    return _constants_in(toml.read_constants()["achieved.toml"].get(gpu, {}))


def _constants_in(table: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in table.items() if key not in _NOTES}


_FILE = {
    "engine": str, "features": Features, "constants": dict[str, Any], "beside_gpu": dict[str, Any],
    "usual": Defaults, "fitted": dict[str, dict[str, Any]],
}  # fmt: skip
"""Keys of an engine's file; `beside_gpu` has constants of a host that computes nothing itself, and below `fitted` a GPU
type or ANY_GPU has constants and _NOTES."""


@cache
def _read_engines() -> dict[str, dict[str, Any]]:
    """The tables of each engine by name; `register_engine` adds to them."""
    engines = [_parse_engine(tables, file) for file, tables in toml.read_constants("engines").items()]
    return {engine["engine"]: engine for engine in engines}


def _parse_engine(tables: dict[str, Any], file: str) -> dict[str, Any]:
    """The tables of an engine's file; InvalidConfig with every problem, each under the file's name."""
    problems: list[str] = []
    found = toml.read_keys(tables, _FILE, ("engine",), "", problems)
    features = found.get("features", Features())
    for table in ("constants", "beside_gpu"):
        problems += _problems(found.get(table, {}), table, features)
    for gpu, values in found.get("fitted", {}).items():
        problems += _problems(_constants_in(values), f"fitted.{gpu}", features)
        notes = {key: value for key, value in values.items() if key in _NOTES}
        toml.read_keys(notes, _NOTES, (), f"fitted.{gpu}", problems)
    if problems:
        raise InvalidConfig([f"{file}: {problem}" for problem in problems])
    return found


def _problems(values: Mapping[str, Any], name: str, features: Features) -> list[str]:
    """A line for each key that is no constant of a program with these features, and for each value out of bounds."""
    problems: list[str] = []
    types = {f.name: float for f in fields(features.kind_of_constants)}
    constants = toml.read_keys(values, types, (), name, problems)
    return problems + [f"{name}.{line}" for key, value in constants.items() for line in list_outside(key, value)]
