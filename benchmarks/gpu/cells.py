"""Cells: measurements as data. A *cell* is one choice of all that varies.

A `Check` compares results with what they should be. A `Ceiling` is one operation alone, a `Training` a step of the
trainer: of a whole model, or of some of its decoder layers without embedding and head. `HostTime` is what the host
takes of a layer, and `Calibration` all that `dtlayout calibrate` measures. suites.py says which there are.

Legend: S sequence, D model width, N parameters, L layers.
"""

from dataclasses import dataclass, replace
from typing import ClassVar, Literal

from dtlayout.models.counting import count_active_block_parameters, count_model_flops_per_token
from dtlayout.models.presets import find_preset
from dtlayout.pipelining.partition import StageSlice
from dtlayout.spec.batch import Batch
from dtlayout.spec.kernels import Compile, Kernels
from dtlayout.spec.layout import Layout
from dtlayout.spec.model_shape import ModelShape
from dtlayout.spec.optimizers import StateFormat
from dtlayout.spec.precision import Format, Precision

Direction = Literal["forward", "backward"]
Offload = Literal["none", "activations", "optimizer", "both"]
World = Literal["one rank", "one rank, deterministic", "none"]
"""Process group that a process has joined before it measures a cell."""


@dataclass(frozen=True, kw_only=True)
class Matmul:
    """[m, k] times [k, n] in bf16."""

    world: ClassVar[World] = "one rank"
    unit: ClassVar = "TFLOP/s"
    label: str
    """Name of the model and its matmul that have this size."""
    m: int
    n: int
    k: int

    @property
    def work(self) -> float:
        """FLOPs: 2·m·n·k."""
        return 2.0 * self.m * self.n * self.k

    def __str__(self) -> str:
        return f"matmul {self.label}, {self.m}×{self.k} · {self.k}×{self.n}"


@dataclass(frozen=True, kw_only=True)
class Copy:
    """A copy from the device's memory to itself."""

    world: ClassVar[World] = "one rank"
    unit: ClassVar = "GB/s"
    num_bytes: int

    @property
    def work(self) -> float:
        """Bytes read and written."""
        return 2.0 * self.num_bytes

    def __str__(self) -> str:
        return f"copy of {self.num_bytes / 2**20:g} MiB"


@dataclass(frozen=True, kw_only=True)
class AttentionCall:
    """Causal attention of one sequence with a model's heads, in bf16."""

    world: ClassVar[World] = "one rank"
    unit: ClassVar = "TFLOP/s"
    model: str
    seq_len: int
    kernel: str
    direction: Direction

    @property
    def work(self) -> float:
        """FLOPs without the half that the mask hides: 2·S²·D, backward 2.5 times that (arXiv:2307.08691, sec. 4.1)."""
        forward = 2.0 * self.seq_len**2 * find_preset(self.model).hidden_size
        return {"forward": 1.0, "backward": 2.5}[self.direction] * forward

    def __str__(self) -> str:
        return f"attention {self.kernel} {self.direction}, heads of {self.model}, sequence {self.seq_len}"


Ceiling = Matmul | Copy | AttentionCall

BASE = Kernels(attention="sdpa-flash", norm="fused", loss="chunked", compile="none")
"""Kernels from which other cells differ in one factor at a time."""


@dataclass(frozen=True, kw_only=True)
class Training:
    """Optimizer steps of one rank."""

    world: ClassVar[World] = "one rank"
    model: str
    num_blocks: int | None = None
    """Decoder layers alone, fed with random hidden states; None for the whole model."""
    seq_len: int
    global_batch: int
    """Sequences of an optimizer step: a smaller micro-batch only means more forwards."""
    micro_batch: int
    recompute: str = "none"
    offload: Offload = "none"
    """`layout.offload`: what is kept in the host's memory. Blocks alone have none."""
    kernels: Kernels = BASE
    state_format: StateFormat = ""
    """`optimizer.state_format`: format of AdamW's moments."""
    adds_in_matmuls: bool = True
    """Whether matmuls add weights' gradients to their sums; else each is added in a pass of its own."""

    clips_in_update: bool = True
    """Whether the update divides gradients that are clipped while it reads them; else clipping is a pass of its own."""

    @property
    def shape(self) -> ModelShape:
        """The preset, with as many layers as are trained."""
        preset = find_preset(self.model)
        return preset if self.num_blocks is None else replace(preset, num_layers=self.num_blocks, tied_embeddings=False)

    @property
    def batch(self) -> Batch:
        """Samples of an optimizer step."""
        return Batch(global_batch=self.global_batch, seq_len=self.seq_len)

    @property
    def layout(self) -> Layout:
        """The layout, which is that of one rank."""
        return Layout(micro_batch=self.micro_batch, recompute=self.recompute, offload=self.offload)

    @property
    def stage(self) -> StageSlice:
        """All its layers, with embedding and head if it is a whole model."""
        is_whole = self.num_blocks is None
        return StageSlice(layers=range(self.shape.num_layers), embedding=is_whole, head=is_whole)

    @property
    def given_bytes(self) -> int:
        """Bytes of the hidden states and their gradients, [B, S, D] in bf16, which blocks alone hold; else 0."""
        return 0 if self.num_blocks is None else 2 * 2 * self.batch.num_tokens * self.shape.hidden_size

    @property
    def flops_per_token(self) -> float:
        """6·N + 12·L·D·S, the credit of MFU; of blocks alone, N are the parameters of these."""
        if self.num_blocks is None:
            return count_model_flops_per_token(self.shape, self.seq_len)
        attention = 12 * self.shape.hidden_size * self.seq_len
        return self.num_blocks * (6 * count_active_block_parameters(self.shape) + attention)

    @property
    def subject(self) -> str:
        """Name of the model, and the number of its blocks if these are trained alone."""
        return self.model if self.num_blocks is None else f"{self.model}, {self.num_blocks} blocks"

    @property
    def variant(self) -> str:
        """Kernels that differ from the base, and what is offloaded."""
        more = f", offload={self.offload}" * (self.offload != "none")
        more += f", moments={self.state_format}" * (self.state_format != "")
        more += ", added in passes" * (not self.adds_in_matmuls) + ", clipped in a pass" * (not self.clips_in_update)
        return describe_variant(self.kernels) + more

    def __str__(self) -> str:
        return f"{self.subject}, sequence {self.seq_len}, {self.layout}, {self.variant}"


@dataclass(frozen=True, kw_only=True)
class Saving:
    """A training that does without some wasted pass, and the same one with it."""

    item: int
    """Number of the row in docs/theory/step.md."""
    what: str
    with_it: Training
    without: Training


Compared = Literal["attention", "norm", "rope", "swiglu", "loss", "experts"]


@dataclass(frozen=True, kw_only=True)
class OperationCheck:
    """One kernel of one operation, its result and gradients against float64 on the CPU."""

    world: ClassVar[World] = "one rank"
    operation: Compared
    kernel: str
    compute: Format = "bfloat16"
    documents: bool = False
    """Whether documents are packed into a sample that do not see each other; of attention alone."""

    @property
    def kernels(self) -> Kernels:
        """All choices, with this one among them; sdpa-math, where another operation is checked, runs in any format."""
        return replace(Kernels(attention="sdpa-math"), **{self.operation: self.kernel})  # type: ignore[arg-type]

    def __str__(self) -> str:
        return f"{self.operation} {self.kernel}, {self.compute}{', packed documents' * self.documents}"


@dataclass(frozen=True, kw_only=True)
class StepCheck:
    """Loss and gradients of a step of the trainer against a plain float64 model on the CPU with the same weights.

    Also whether the profile of the first forward names the kernels that were asked for.
    """

    world: ClassVar[World] = "one rank"
    model: Literal["llama", "tied", "qwen3", "mixture", "mixture of all"] = "llama"
    """Name of the small model that is trained."""
    kernels: Kernels = BASE
    compute: Format = "bfloat16"
    recompute: str = "none"
    offload: Offload = "none"
    documents: bool = False

    @property
    def precision(self) -> Precision:
        """Masters and sums in fp32."""
        return Precision(compute=self.compute)

    def __str__(self) -> str:
        recompute = f", recompute={self.recompute}" * (self.recompute != "none")
        offload = f", offload={self.offload}" * (self.offload != "none")
        packed = ", packed documents" * self.documents
        return f"step of {self.model}, {self.compute}, {describe_variant(self.kernels)}{recompute}{offload}{packed}"


@dataclass(frozen=True, kw_only=True)
class WeightsCheck:
    """Initial weights against those on the CPU."""

    world: ClassVar[World] = "one rank"

    def __str__(self) -> str:
        return "initial weights"


@dataclass(frozen=True, kw_only=True)
class BitsCheck:
    """Two trainings with `train.deterministic`, which end with the same bits."""

    world: ClassVar[World] = "one rank, deterministic"
    step: StepCheck
    """The step that both trainings do."""


class RepeatCheck(BitsCheck):
    """The second one does what the first one did."""

    def __str__(self) -> str:
        return f"same bits twice: {self.step}"


class ResumeCheck(BitsCheck):
    """The second one is saved, loaded by another one and goes on there."""

    def __str__(self) -> str:
        return f"same bits after a resume: {self.step}"


@dataclass(frozen=True, kw_only=True)
class TrainerCheck:
    """train.py on made-up text: it ends with exit code 0, and so does one that resumes it."""

    world: ClassVar[World] = "none"

    def __str__(self) -> str:
        return "train.py, started and resumed"


Check = OperationCheck | StepCheck | WeightsCheck | RepeatCheck | ResumeCheck | TrainerCheck


@dataclass(frozen=True, kw_only=True)
class HostTime:
    """The host's time for a layer and microbatch, forward and backward, as one of `tp` ranks; the others are fake."""

    world: ClassVar[World] = "none"
    tp: int
    compile: Compile = "none"

    def __str__(self) -> str:
        sharded = " with sequence parallelism" * (self.tp > 1)
        return f"host, a layer at tp {self.tp}{sharded}, compile={self.compile}"


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """All measurements of `dtlayout calibrate`, on one rank."""

    world: ClassVar[World] = "one rank"

    def __str__(self) -> str:
        return "what dtlayout calibrate measures"


Cell = Check | Ceiling | Training | HostTime | Calibration


def describe_variant(kernels: Kernels) -> str:
    """Kernels that differ from the base, or the word base."""
    return " ".join(f"{k}={v}" for k, v in vars(kernels).items() if v != getattr(BASE, k)) or "base"
