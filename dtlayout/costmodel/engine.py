"""Engine: a training program with its features, and the physical constants that were measured on it.

Features say what a program does: what it shards, what it sends, what it keeps. They are read off its code. Constants
(engine_constants.py) say how fast and how large. They are fitted by `dtlayout validate --fit` to runs of that engine:
those that hold on any GPU type to all of its runs, others to those on one type. Where no runs are known, general values
stand and a prediction is called uncalibrated.
constants/engines/*.toml holds both, and `register_engine` takes a file of the same form.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cache
from pathlib import Path
from typing import Any, Literal

from dtlayout.base import toml
from dtlayout.base.errors import InvalidConfig
from dtlayout.costmodel.engine_constants import BOUNDS, Constants, RunAheadConstants, list_outside
from dtlayout.spec.batch import Batch
from dtlayout.spec.cluster import Gpu, gpu_named
from dtlayout.spec.context_parallel import CONTEXT_METHODS, DEFAULT_CONTEXT_METHOD
from dtlayout.spec.kernels import Kernels
from dtlayout.spec.layout import OFFLOADS, Layout, show_value
from dtlayout.spec.model_shape import ModelShape
from dtlayout.spec.precision import BYTES, MATMUL_FORMATS, Precision
from dtlayout.spec.recompute import Recompute

OWN_ENGINE = "dtlayout"
"""The engine whose features are this trainer's."""
KNOWN_AXES = ("tp", "pp", "cp", "ep", "tp_overlap", "ep_overlap")
"""Fields of a layout that a program may lack."""
DATA_PARALLEL = ("replicated", "hybrid", "sharded")
"""Whether data-parallel ranks share the state: none do, those of a group do, of which there are copies, or all do."""
_OFF = Layout()


@dataclass(frozen=True, kw_only=True)
class KnownKernels:
    """Kernels of a program, by operation."""

    attention: tuple[str, ...] = ()
    """Values of `Kernels.attention`."""
    norm: tuple[str, ...] = ()
    """Values of `Kernels.norm`."""
    rope: tuple[str, ...] = ()
    """Values of `Kernels.rope`."""
    swiglu: tuple[str, ...] = ()
    """Values of `Kernels.swiglu`."""
    loss: tuple[str, ...] = ()
    """Values of `Kernels.loss`."""
    compile: tuple[str, ...] = ()
    """Values of `Kernels.compile`."""

    def __post_init__(self) -> None:
        for operation, names in vars(self).items():
            for name in names:
                Kernels(**{operation: name})


@dataclass(frozen=True, kw_only=True)
class Features:
    """Everything that a training program does in a step whatever the hardware."""

    sharding: Literal["distributed-optimizer", "fsdp2"] = "distributed-optimizer"
    """Megatron's: whole weights and gradients, a sharded optimizer; or FSDP2's: sharded masters, gathered copies."""
    gradient_bytes: int = 4
    """Bytes of a gradient while microbatches are accumulated (fsdp2: as precision.reduce says)."""
    reduce_bytes: int = 4
    """Bytes of a gradient on the data-parallel links."""
    other_reduces: tuple[str, ...] = ()
    """Other formats in which it can be told to accumulate and reduce gradients (fsdp2: any)."""
    reduction: Literal["all-reduce", "reduce-scatter"] = "reduce-scatter"
    """How gradients are summed over the data-parallel ranks."""
    bucket_bytes: int = 0
    """Bytes a parameter of the buffers through which gradients are reduced."""
    loss: Literal["vocab-parallel", "replicated"] = "vocab-parallel"
    """Whether each tp rank computes the loss of its own columns of logits, or gathers them and computes all of it."""
    stage_split: Literal["cost", "parameters", "threshold"] = "cost"
    """Blocks by FLOPs, by parameters, or a stage ending with the block that completes its fraction of them."""
    input_reductions: int = 2
    """Input gradients that are summed over tp in a block's backward: one for attention and one for the FFN at least."""
    fuses_qkv: bool = True
    """Whether queries, keys and values come out of one matmul."""
    regathers_inputs: bool = True
    """Whether sequence parallelism keeps norm outputs sharded and gathers them again in backward."""
    sums_embedding: bool = False
    """Whether each tp rank has a gradient of all rows of the embedding until these are summed, as DTensor's style has;
    else one of its own rows."""
    dtensor_activations: bool = False
    """Whether tp computes on DTensors, which add up two gradients in a third tensor and copy even a single sequence
    where it is gathered or scattered; else on plain tensors."""
    scatters_messages: bool = False
    """Whether each tp rank sends only 1/tp of the hidden states to the next stage."""
    blocking_messages: bool = False
    """Whether a stage waits until its message has gone."""
    overlaps_reduction: bool = True
    """Whether gradients are reduced, and parameters gathered, while the GPU computes."""
    runs_ahead: bool = False
    """Whether the host starts tp's collectives long before the GPU gets there, which hold their buffers meanwhile."""
    axes: tuple[str, ...] = ("tp", "pp")
    """Fields of a layout that it has beside data parallelism: the axes tp, pp, cp, ep; tp_overlap and ep_overlap, which
    hide messages. With ep it trains mixtures of experts, and the latent attention that some of them have."""
    cp_methods: tuple[str, ...] = (DEFAULT_CONTEXT_METHOD,)
    """Ways in which cp's ranks attend to each other's tokens, its usual one first."""
    offloads: tuple[str, ...] = ("none",)
    """Values of `Layout.offload` that it has: parts of a run on the host; only fsdp2 engines' are predicted."""
    kernels: KnownKernels = field(default_factory=KnownKernels)
    """Kernels that it has beside its usual ones, by our names."""
    matmuls: tuple[str, ...] = ()
    """Formats below bf16 in which its linear layers multiply, as `Precision.matmuls`."""
    keeps_cast_inputs: bool = False
    """Whether a linear layer that multiplies in such a format keeps its input for backward as it was cast. Transformer
    Engine's do, unless told `save_original_input`; torchao's keep the original (`input_hp` in float8_linear.py), and
    cast it again in backward."""
    always_sequence_parallel: bool = False
    """Whether its tensor parallelism always shards the sequence too."""
    data_parallel: tuple[str, ...] = DATA_PARALLEL
    """Ways of `DATA_PARALLEL` that it has."""
    highest_zero: Literal[1, 2, 3] = 3
    """Highest stage of ZeRO that it has."""
    pipeline_zero: Literal[1, 2, 3] = 3
    """Highest stage of ZeRO that it has in a pipeline: below 3 parameters stay gathered, below 2 gradients whole."""
    schedules: tuple[str, ...] = ()
    """Pipeline schedules that it has; all, where none is named."""
    recompute: tuple[str, ...] = ()
    """Kinds of recomputation that it has, every-N for any N; what `checkpointing` says, where none is named."""
    even_stages: bool = False
    """Whether its stages have as many blocks each, where the embedding, the head or both may count as one."""
    checkpointing: Literal["torch", "megatron"] = "megatron"
    """torch.utils.checkpoint, which stops once backward has what it needs and can keep any operation; or Megatron's,
    which runs all of a block's forward, and whose selective recomputation covers attention alone."""
    kept_matmuls: float = 1.0
    """Share of a block's matmuls whose results selective recomputation keeps, where it keeps any."""
    sends_tokens_once: bool = False
    """Whether a token that several experts of a node compute goes there once and is handed on inside (DeepEP); else a
    copy goes to each."""
    frees_logits: bool = False
    """Whether nothing holds the logits any more while the gradient of a loss of plain PyTorch is computed."""
    reports_reserved: bool = False
    """Whether the peak that it prints is what the allocator has reserved, fragments included; else what it has given
    out at once."""
    rope_saved_bytes: int = 0
    """Kept by the rotary embedding, for each token and unit of width, beside q, k, v as attention sees them."""

    def __post_init__(self) -> None:
        known = {
            "axes": KNOWN_AXES, "cp_methods": CONTEXT_METHODS, "offloads": OFFLOADS, "matmuls": MATMUL_FORMATS,
            "data_parallel": DATA_PARALLEL, "other_reduces": BYTES,
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
        """Key of `Precision` → the formats that it can be told, its usual one first; fsdp2 engines take any.

        With a distributed optimizer weights are bf16 beside fp32 masters, whatever else could be asked for.
        """
        if self.sharding == "fsdp2":
            return {}
        usual = next(name for name, size in BYTES.items() if size == self.gradient_bytes)
        return {"params": ("float32",), "compute": ("bfloat16",), "reduce": (usual, *self.other_reduces)}

    @property
    def kind_of_constants(self) -> type["Constants"]:
        """The class of this program's constants."""
        return RunAheadConstants if self.runs_ahead else Constants


@dataclass(frozen=True, kw_only=True)
class Defaults:
    """Choices of a program that a published run leaves out; None if nobody can tell."""

    micro_batch: int | None = None
    """Sequences."""
    fills_pipeline_once: bool = False
    """Whether a pipeline gets as many microbatches as it has ranks, in the place of `micro_batch`."""
    zero: Literal[1, 2, 3] | None = None
    """Stage of ZeRO."""
    recompute: str | None = None
    """Value of `layout.recompute`."""
    sequence_parallel: bool | None = None
    """Beside tensor parallelism."""
    fuses_norms: bool = False
    """Whether a norm is one kernel, also where it is not called so."""
    kernels: Kernels = field(default_factory=Kernels)
    """Kernels that it runs, also behind a flash attention of any version."""

    def __post_init__(self) -> None:
        if self.micro_batch is not None and self.micro_batch < 1:
            raise InvalidConfig(f"usual.micro_batch={self.micro_batch} must be at least 1")
        if self.recompute is not None:
            Recompute.parse(self.recompute)


ANY_GPU = "any"
"""Stands for a GPU type's name where constants are fitted to runs on all types together."""
_NOTES = {"source": str, "gpus": list[str]}
"""Keys beside an engine's fitted constants, and what they hold; `gpus` are the types that runs on any were on."""


@dataclass(frozen=True, kw_only=True)
class Engine:
    """A training program on one GPU type."""

    name: str
    """Name in tables and commands."""
    gpu: str
    """The GPU type that the constants are for."""
    features: Features
    """Everything that the program does in a step."""
    constants: Constants
    """How fast and how large."""
    fitted: tuple[str, ...]
    """The constants that were fitted to runs on this GPU type alone."""
    shared: tuple[str, ...] = ()
    """Other constants, which were fitted to runs on all GPU types together."""
    shared_by: tuple[str, ...] = ()
    """The GPU types of those runs."""
    source: str
    """The runs that its constants were fitted to."""

    @property
    def is_calibrated(self) -> bool:
        """Whether runs of this engine on this GPU type stand behind the constants."""
        return bool(self.fitted) or self.gpu in self.shared_by

    def told_formats(self, named: Mapping[str, str]) -> tuple["Engine", Precision]:
        """This engine told some formats, by key of `Precision`, and all formats that it has then.

        InvalidConfig for a format that is unknown, or that it does not have.
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

    def recompute_problems(self, recompute: str) -> list[str]:
        """A line for a kind that the engine does not have."""
        if known := self.features.recompute:
            kind = "every-N" if Recompute.parse(recompute).every > 1 else recompute
            line = f"layout.recompute={recompute} is nothing that {self.name} has; use {' or '.join(known)}"
            return [] if kind in known else [line]
        if self.features.checkpointing == "torch" or len(Recompute.parse(recompute).kept) != 1:
            return []
        advice = "use selective, which computes attention alone again, or full"
        return [f"layout.recompute={recompute} is nothing that {self.name} has; {advice}"]

    def schedule_problems(self, schedule: str) -> list[str]:
        """A line for a schedule that is known not to run."""
        known = self.features.schedules or (schedule,)
        advice = f"use {' or '.join(known)}"
        return [] if schedule in known else [f"layout.schedule={schedule} is nothing that {self.name} has; {advice}"]

    def zero_problems(self, zero: int, pp: int) -> list[str]:
        """A line for a stage of ZeRO that the engine does not have in a pipeline."""
        most, where = self.features.highest_zero, ""
        if pp > 1 and self.features.pipeline_zero < most:
            most, where = self.features.pipeline_zero, " in a pipeline"
        if zero <= most:
            return []
        return [f"layout.zero={zero}{where} is nothing that {self.name} has; use zero={most}{' or less' * (most > 1)}"]

    def data_parallel_problems(self, dp_replicate: int, dp_shard: int) -> list[str]:
        """A line for copies of the state that the engine does not have."""
        known = self.features.data_parallel
        kind = "sharded" if dp_replicate == 1 else "hybrid" if dp_shard > 1 else "replicated"
        if kind in known:
            return []
        where = "without shards" if kind == "replicated" else f"beside dp_shard={dp_shard}"
        others = " or dp_shard=1" * (kind == "hybrid" and "replicated" in known)
        copies = f"layout.dp_replicate={dp_replicate} {where}"
        return [f"{copies} is nothing that {self.name} has; use dp_replicate=1{others}"]

    def axis_problems(self, layout: Layout) -> list[str]:
        """A line for each axis of a layout, each way to attend over it, and what lies on the host, that it lacks."""
        problems, methods = list[str](), self.features.cp_methods
        if layout.offload not in self.features.offloads:
            problems.append(
                f"layout.offload={layout.offload} is nothing that {self.name} has; "
                f"use layout.offload={' or '.join(self.features.offloads)}"
            )
        if layout.cp > 1 and layout.cp_method not in methods:
            problems.append(
                f"layout.cp_method={layout.cp_method} is nothing that {self.name} has; "
                f"use layout.cp_method={' or '.join(methods)}"
            )
        return problems + [
            f"layout.{name}={show_value(getattr(layout, name))} is nothing that {self.name} has; "
            f"use layout.{name}={show_value(getattr(_OFF, name))}"
            for name in KNOWN_AXES
            if name not in self.features.axes and getattr(layout, name) != getattr(_OFF, name)
        ]

    def has_axis(self, name: str) -> bool:
        """Whether the engine has one of KNOWN_AXES."""
        on: dict[str, Any] = {name: 2 if type(getattr(_OFF, name)) is int else True}
        on["cp_method"] = self.features.cp_methods[0]
        return not self.axis_problems(replace(_OFF, **on))

    def layout_problems(self, layout: Layout, model: ModelShape, batch: Batch) -> list[str]:
        """A line for everything in a legal layout of a model and a batch that the engine does not have."""
        problems = self.axis_problems(layout) + self.schedule_problems(layout.schedule)
        problems += self.zero_problems(layout.zero, layout.pp) + self.recompute_problems(layout.recompute)
        problems += self.data_parallel_problems(layout.dp_replicate, layout.dp_shard)
        if self.features.always_sequence_parallel and layout.tp > 1 and not layout.sequence_parallel:
            problems.append(
                f"layout.sequence_parallel=false is nothing that {self.name} has; use layout.sequence_parallel=true"
            )
        return problems + self._division_problems(layout, model, batch)

    def _division_problems(self, layout: Layout, model: ModelShape, batch: Batch) -> list[str]:
        """A line for what other programs do not cut as we would."""
        problems, layers = list[str](), model.num_layers
        if self.features.even_stages and all((layers + ends) % layout.num_stages for ends in (0, 1, 2)):
            problems.append(
                f"{layers} blocks, or one or two more for embedding and head, make no {layout.num_stages} even stages, "
                f"as {self.name} asks; use another pp or virtual_stages"
            )
        if model.experts and layout.tp > 1 and not layout.sequence_parallel:
            problems.append(
                "tp beside experts without sequence_parallel sends each token tp times; use sequence_parallel=true"
            )
        return problems

    def model_problems(self, model: ModelShape) -> list[str]:
        """A line for what the engine cannot train of a model."""
        if "ep" in self.features.axes:
            return []
        names = {"experts": "mixture of experts", "latent_attention": "multi-head latent attention"}
        lacking = ((name, words) for name, words in names.items() if getattr(model, name) is not None)
        return [
            f"model.{name}: {self.name} has no {words}; use a model without, or another engine"
            for name, words in lacking
        ]

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
    """Choices of the engine called `name` that a run leaves out; all None if that engine is not known."""
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
