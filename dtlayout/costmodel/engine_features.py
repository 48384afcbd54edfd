"""Features of a training program: what it shards, sends and keeps in a step, whatever the hardware.

They are read off its code. Some of them a run can be told otherwise: those are its choices, `--engine-set NAME=VALUE`.
"""

from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields, replace
from typing import Any, Literal, NamedTuple

from dtlayout.base.errors import InvalidConfig
from dtlayout.costmodel.engine_constants import Constants, RunAheadConstants
from dtlayout.costmodel.recompute_modules import MODULES, USUAL_MODULES
from dtlayout.spec.context_parallel import CONTEXT_METHODS, DEFAULT_CONTEXT_METHOD
from dtlayout.spec.kernels import Kernels
from dtlayout.spec.layout_keys import DISPATCHERS, OFFLOADS
from dtlayout.spec.model_shape import Experts, ModelShape
from dtlayout.spec.precision import BYTES, MATMUL_FORMATS
from dtlayout.spec.recompute import Recompute

KNOWN_AXES = ("tp", "pp", "cp", "ep", "tp_overlap", "ep_overlap")
"""Fields of a layout that a program may lack."""
DATA_PARALLEL = ("replicated", "hybrid", "sharded")
"""Kinds of data parallelism: no ranks share the state, those of each group do, or all do."""


class ToldFeature(NamedTuple):
    """A feature that a run of some programs can be told."""

    values: Mapping[str, Any]
    """Word in commands and tables → value of the feature."""
    meaning: str
    """Sentence on the feature, for lists of what a prediction assumes."""
    takes_several: bool = False
    """True if the feature is a tuple of values, at least one, whose words are joined by `JOINT`."""

    def word(self, value: Any) -> str:
        """The word for a value."""
        if self.takes_several:
            return JOINT.join(word for word, each in self.values.items() if each in value)
        return next(word for word, each in self.values.items() if each == value)

    def find(self, word: str) -> Any:
        """The value for a word; InvalidConfig, which says what else to use, for an unknown one."""
        words = word.split(JOINT) if self.takes_several else [word]
        if any(each not in self.values for each in words):
            several = f", several joined by {JOINT}" * self.takes_several
            raise InvalidConfig(f"{word} is unknown; use {' or '.join(self.values)}{several}")
        found = tuple(value for each, value in self.values.items() if each in words)
        return found if self.takes_several else found[0]


JOINT = "+"
"""Sign between several words for one feature."""
_YES_OR_NO = {"true": True, "false": False}
CHOICES = {
    "overlap_dp": ToldFeature(_YES_OR_NO, "gradients are reduced and parameters gathered while the GPU computes"),
    "overlap_pp": ToldFeature(_YES_OR_NO, "a pipeline's messages are sent while the GPU computes"),
    "cuda_graphs": ToldFeature(
        {word: word for word in ("none", "attention", "full")}, "kernels that the host starts all at once"
    ),
    "fused_loss": ToldFeature(
        {"never": "never", "beside-blocks": "beside blocks", "always": "always"},
        "when the loss is fused, compiled or a kernel of Transformer Engine, and keeps no logits in fp32",
    ),
    "recompute_modules": ToldFeature(
        {name: name for name in MODULES}, "the modules that selective recomputation computes again", takes_several=True
    ),
}
"""Feature that a run may be told → its values."""


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
    default_params: str = "float32"
    """Format of the parameters that an fsdp2 engine's optimizer updates by default; `formats` says it of others."""
    default_reduce: str = "float32"
    """Format in which an fsdp2 engine reduces gradients by default; `gradient_bytes` says it of others."""
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
    """True if one matmul computes queries, keys and values."""
    regathers_inputs: bool = True
    """True if sequence parallelism keeps the outputs of norms sharded and gathers them again in backward."""
    sums_embedding: bool = False
    """True if each tp rank has a gradient of all rows of the embedding until gradients are summed, as with DTensor's
    style; else the rank has a gradient of its own rows."""
    dtensor_activations: bool = False
    """True if tp computes on DTensors; else it computes on plain tensors. DTensors add up two gradients in a third
    tensor, and copy even a single sequence where it is gathered or scattered."""
    scatters_messages: bool = False
    """True if each tp rank sends only 1/tp of the hidden states to the next stage."""
    overlap_dp: bool = True
    """True if gradients are reduced and parameters are gathered while the GPU computes."""
    overlap_pp: bool = True
    """True if a stage computes on while its message is sent."""
    cuda_graphs: Literal["none", "attention", "full"] = "none"
    """Kernels that the host starts all at once: none, those of a block's attention and router, or a whole step's."""
    choices: tuple[str, ...] = ()
    """Features that a run can be told otherwise, of `CHOICES`."""
    runs_ahead: bool = False
    """True if the host starts the collectives of tp long before the GPU gets to them; their buffers are held
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
    """True if a linear layer that multiplies in such a format keeps its input for backward as it was cast. Transformer
    Engine's layers do, unless told `save_original_input`. torchao's keep the original (`input_hp` in float8_linear.py),
    and cast it again in backward."""
    gathers_cast: tuple[Literal["activations", "weights"], ...] = ("activations", "weights")
    """Tensors that are cast to such a format before they are gathered, and so travel in its bytes: activations by
    sequence parallelism, weights by sharded data parallelism."""
    casts_itself: bool = False
    """True if such linear layers are those of ops/scaled.py, of which every tensor is known. Layers with a side that
    `ALIGNMENT` does not divide stay in the compute format; other programs are predicted as if they took any."""
    untrained: tuple[str, ...] = ()
    """Keys of [model] that the program cannot train at other values than their defaults, although it is predicted with
    them; "family" stands for the families that are planned alone (`Family.untrained`). Only a check of a run refuses
    them."""
    always_sequence_parallel: bool = False
    """True if tensor parallelism always shards the sequence too."""
    has_sequence_parallel: bool = True
    """True if tensor parallelism can shard the sequence too."""
    data_parallel: tuple[str, ...] = DATA_PARALLEL
    """Kinds of data parallelism that the program has, of `DATA_PARALLEL`."""
    highest_zero: Literal[1, 2, 3] = 3
    """Highest stage of ZeRO that the program has."""
    pipeline_zero: Literal[1, 2, 3] = 3
    """Highest stage of ZeRO in a pipeline. Below 3, parameters stay gathered; below 2, gradients stay whole."""
    schedules: tuple[str, ...] = ()
    """Pipeline schedules that the program has; all, where none is named."""
    recompute: tuple[str, ...] = ()
    """Kinds of recomputation that the program has; every-N and N-of-M stand for any. Where none is named,
    `checkpointing` says them."""
    even_stages: bool = False
    """True if all stages have as many blocks; the embedding, the head or both may count as a block."""
    checkpointing: Literal["torch", "megatron"] = "megatron"
    """Function that recomputes. torch: torch.utils.checkpoint, which stops once backward has its inputs, and can keep
    any operation. megatron: a function that runs all of a block's forward, and whose selective recomputation covers
    `recompute_modules`."""
    recompute_modules: tuple[str, ...] = USUAL_MODULES
    """Modules that selective recomputation computes again where `checkpointing` is megatron, of `MODULES`."""
    kept_matmuls: float = 1.0
    """Share of a block's matmuls whose results selective recomputation keeps, if it keeps any."""
    nests_experts: bool = False
    """True if experts are gathered and reduced as a unit of their own, by other ranks than the rest of their block. Our
    trainer does so, and predictions then count each tensor of its mixtures."""
    ep_dispatchers: tuple[str, ...] = ("alltoall",)
    """Values of `Layout.ep_dispatcher` that the program has, the usual one first."""
    fused_loss: Literal["never", "beside blocks", "always"] = "never"
    """When the loss keeps no logits in fp32: never, where blocks are compiled and the loss with them, or always. Under
    fsdp2 torch.compile fuses it; else Transformer Engine does, whose gradient takes the place of the logits."""
    frees_logits: bool = False
    """True if the logits are freed before the gradient of a loss in plain PyTorch is computed."""
    fuses_swiglu: bool = False
    """True if a gated activation is one kernel that keeps its two inputs for backward, and not silu(gate) too."""
    computes_in_place: bool = False
    """True if a rank that shares its state with nobody computes with its parameters where they lie, unless they are
    cast for that. FSDP2 copies them even then."""
    shards_frozen: bool = True
    """True if below ZeRO-3 ranks share frozen parameters too, and gather them for a step; else each has them whole."""
    adds_in_matmuls: bool = False
    """True if matmuls add weight gradients to the sum over microbatches, where a rank has it whole; else each
    microbatch's gradient is added in a pass of its own."""
    adds_up_whole: bool = False
    """True if gradients of several microbatches are added up whole and reduced once, whatever the stage of ZeRO."""
    reports_reserved: bool = False
    """True if the printed peak counts all bytes that the allocator has reserved, with fragments; else it counts the
    bytes that are allocated at once."""
    rope_saved_bytes: int = 0
    """Bytes that the rotary embedding keeps for each token and unit of width, beside q, k and v as attention gets
    them."""

    def __post_init__(self) -> None:
        known = {
            "axes": KNOWN_AXES, "ep_dispatchers": DISPATCHERS, "cp_methods": CONTEXT_METHODS, "offloads": OFFLOADS,
            "matmuls": MATMUL_FORMATS, "data_parallel": DATA_PARALLEL, "other_reduces": BYTES, "choices": CHOICES,
            "untrained": _MODEL_DEFAULTS, "recompute_modules": MODULES,
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

        With a distributed optimizer, weights are always of 16 bits beside fp32 masters.
        """
        if self.sharding == "fsdp2":
            return {}
        reduces = (self.gradients, *self.other_reduces)
        return {"params": ("float32",), "compute": ("bfloat16", "float16"), "reduce": reduces}

    @property
    def gradients(self) -> str:
        """Format of `gradient_bytes`."""
        return next(name for name, size in BYTES.items() if size == self.gradient_bytes)

    def fuses_loss(self, kernels: Kernels) -> bool:
        """True if the loss is fused beside these kernels."""
        compiles = kernels.compile in ("blocks", "model")
        return self.fused_loss == "always" or (self.fused_loss == "beside blocks" and compiles)

    def routes_again(self, recompute: Recompute) -> bool:
        """True if backward computes routers again, and sends tokens to their experts again."""
        selects_mixture = self.checkpointing == "megatron" and "moe" in self.recompute_modules
        return recompute.every > 0 and (not recompute.is_selective or selects_mixture)

    def find_untrained(self, model: ModelShape) -> list[tuple[str, Any, Any]]:
        """Key, value and default of each key of [model] that the program is predicted with, but cannot train.

        Families have a rule of their own.
        """
        names = [name for name in self.untrained if name != "family"]
        values = [(name, self._read(model, name), _MODEL_DEFAULTS[name]) for name in names]
        return [(name, value, default) for name, value, default in values if value not in (None, default)]

    @staticmethod
    def _read(model: ModelShape, name: str) -> Any:
        section, _, key = name.rpartition(".")
        return getattr(getattr(model, section) if section else model, key, None)

    def told(self, asked: Mapping[str, str]) -> "Features":
        """Features of a run that is told some: `asked` has a word for the value of each choice.

        InvalidConfig for a choice that the program does not have, and for a word that is none of its values.
        """
        problems, values = list[str](), dict[str, Any]()
        for name, word in asked.items():
            if name not in self.choices:
                known = f"use one of {', '.join(self.choices)}" if self.choices else "it has no choices"
                problems.append(f"{name}={word} is no choice of this engine; {known}")
                continue
            try:
                values[name] = CHOICES[name].find(word)
            except InvalidConfig as error:
                problems += [f"{name}={problem}" for problem in error.problems]
        if values.get("fused_loss") == "beside blocks" and "blocks" not in self.kernels.compile:
            problems.append(
                "fused_loss=beside-blocks has no effect: this engine compiles no blocks; use never or always"
            )
        if problems:
            raise InvalidConfig(problems)
        return replace(self, **values)

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
    """True if a pipeline gets as many microbatches as it has ranks; then `micro_batch` does not count."""
    zero: Literal[1, 2, 3] | None = None
    """Stage of ZeRO."""
    recompute: str | None = None
    """Kind of recomputation, as in `layout.recompute`."""
    sequence_parallel: bool | None = None
    """True if sequence parallelism is on beside tensor parallelism."""
    tp_overlap: bool | None = None
    """True if dense models' messages of tp are sent in pieces beside matmuls, under sequence parallelism."""
    gradients: str | None = None
    """Format in which gradients are added up and reduced, where runs are not as the program is by default."""
    fuses_norms: bool = False
    """True if a norm is one kernel, even where a run does not call it fused."""
    kernels: Kernels = field(default_factory=Kernels)
    """Kernels of the program. Its attention here also stands for a run's flash attention of any version."""

    def __post_init__(self) -> None:
        if self.micro_batch is not None and self.micro_batch < 1:
            raise InvalidConfig(f"usual.micro_batch={self.micro_batch} must be at least 1")
        if self.recompute is not None:
            Recompute.parse(self.recompute)
