"""What is measured, as data: cells, the groups they belong to, and the order in which they run.

A *cell* is one choice of all that varies. A `Ceiling` is one operation alone, a `Training` a step of the trainer: of a
whole model, or of some of its decoder layers without embedding and head.

Legend: T tokens, S sequence, D model width, F FFN, K head width, V vocabulary, N parameters, L layers.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, product
from typing import ClassVar, Literal, get_args

from dtlayout.batch import Batch
from dtlayout.kernels import Kernels
from dtlayout.layout import Layout
from dtlayout.model_shape import ModelShape
from dtlayout.models.counting import count_block_parameters, count_model_flops_per_token
from dtlayout.models.presets import find_preset
from dtlayout.pipelining.partition import StageSlice

Direction = Literal["forward", "backward"]


@dataclass(frozen=True, kw_only=True)
class Matmul:
    """[m, k] times [k, n] in bf16."""

    unit: ClassVar = "TFLOP/s"
    label: str
    """Whose it is."""
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

BEST = Kernels(attention="sdpa-flash", norm="fused", loss="chunked", compile="none")
"""What the ablation varies, one factor at a time."""
BLOCK_FACTORS = {
    "compile": ("blocks",),
    "attention": ("sdpa-cudnn", "sdpa-efficient", "sdpa-math"),
    "norm": ("eager",),
}
FACTORS = {"loss": ("linear", "eager"), **BLOCK_FACTORS}
"""Field of Kernels → what is tried in place of the best."""


@dataclass(frozen=True, kw_only=True)
class Training:
    """Optimizer steps of one rank."""

    model: str
    num_blocks: int | None = None
    """Decoder layers alone, fed with random hidden states; None for the whole model."""
    seq_len: int
    global_batch: int
    """Sequences of an optimizer step: a smaller micro-batch only means more forwards."""
    micro_batch: int
    recompute: str = "none"
    kernels: Kernels = BEST

    @property
    def shape(self) -> ModelShape:
        """The preset, with as many layers as are trained."""
        preset = find_preset(self.model)
        return preset if self.num_blocks is None else replace(preset, num_layers=self.num_blocks, tied_embeddings=False)

    @property
    def batch(self) -> Batch:
        """Of an optimizer step."""
        return Batch(global_batch=self.global_batch, seq_len=self.seq_len)

    @property
    def layout(self) -> Layout:
        """Of one rank."""
        return Layout(micro_batch=self.micro_batch, recompute=self.recompute)

    @property
    def stage(self) -> StageSlice:
        """All its layers, with embedding and head if it is a whole model."""
        is_whole = self.num_blocks is None
        return StageSlice(layers=range(self.shape.num_layers), embedding=is_whole, head=is_whole)

    @property
    def flops_per_token(self) -> float:
        """6·N + 12·L·D·S, the credit of MFU; of blocks alone, N are the parameters of these."""
        if self.num_blocks is None:
            return count_model_flops_per_token(self.shape, self.seq_len)
        attention = 12 * self.shape.hidden_size * self.seq_len
        return self.num_blocks * (6 * count_block_parameters(self.shape) + attention)

    @property
    def subject(self) -> str:
        """What is trained."""
        return self.model if self.num_blocks is None else f"{self.model}, {self.num_blocks} blocks"

    @property
    def variant(self) -> str:
        """What differs from the best kernels."""
        differing = [f"{k}={v}" for k, v in vars(self.kernels).items() if v != getattr(BEST, k)]
        return " ".join(differing) or "best"

    def __str__(self) -> str:
        return f"{self.subject}, sequence {self.seq_len}, {self.layout}, {self.variant}"


Cell = Ceiling | Training


@dataclass(frozen=True, kw_only=True)
class Suite:
    """All that a kind of device is asked."""

    device_type: Literal["cuda", "cpu"]
    groups: Mapping[str, Sequence[Cell]]
    """Name → its cells, most valuable first; a cell may belong to several."""
    first: Sequence[Cell] = ()
    """Cells of any group that run before all others."""
    num_steps: int = 3
    """Timed steps of a training cell."""
    cell_limit_s: float = 90
    """After it a cell counts as hung."""
    limit_s: float = 450
    """After it nothing more runs."""

    def cells(self, only: Iterable[str]) -> list[Cell]:
        """Cells of some groups, each once, in the order in which they run."""
        groups = [self.groups[name] for name in self.groups if name in only]
        wanted = dict.fromkeys(chain.from_iterable(groups))
        return list(dict.fromkeys([*(cell for cell in self.first if cell in wanted), *wanted]))


def vary(base: Training, factors: Mapping[str, Sequence[str]]) -> Iterator[Training]:
    """The base, then one change of one kernel after the other."""
    yield base
    for factor, choices in factors.items():
        for choice in choices:
            yield replace(base, kernels=replace(base.kernels, **{factor: choice}))  # type: ignore[arg-type]


def sweep(base: Training, micro_batches: Sequence[int]) -> Iterator[Training]:
    """Micro-batch over recomputation; what keeps one kind of operation alone, at the first micro-batch."""
    for recompute, micro_batch in product(("none", "selective", "full"), micro_batches):
        yield replace(base, recompute=recompute, micro_batch=micro_batch)
    for recompute in ("keep-attention", "keep-matmuls"):
        yield replace(base, recompute=recompute, micro_batch=micro_batches[0])


def block_matmuls(model: ModelShape, num_tokens: int) -> Iterator[Matmul]:
    """The matmuls of a block and the head, forward; q, k and v as one."""
    width, kv_width = model.hidden_size, model.kv_width
    sizes = {  # name: n, k
        "qkv": (width + 2 * kv_width, width),
        "o": (width, width),
        "gate": (model.ffn_size, width),
        "down": (width, model.ffn_size),
        "head": (model.vocab_size, width),
    }
    for name, (n, k) in sizes.items():
        yield Matmul(label=f"{model.name} {name}", m=num_tokens, n=n, k=k)


def ceilings(
    models: Sequence[str],
    num_tokens: Sequence[int],
    squares: Sequence[int],
    copies: Sequence[int],
    attention: Sequence[str],
) -> Iterator[Ceiling]:
    """Matmuls of `models` and squares, copies, and attention with the heads of the models that `attention` names."""
    for size in squares:
        yield Matmul(label="square", m=size, n=size, k=size)
    for num_bytes in copies:
        yield Copy(num_bytes=num_bytes)
    kernels: tuple[str, ...] = ("sdpa-flash", "sdpa-cudnn", "sdpa-efficient")
    for model, seq_len, kernel, direction in product(attention, num_tokens, kernels, get_args(Direction)):
        yield AttentionCall(model=model, seq_len=seq_len, kernel=kernel, direction=direction)
    for model, tokens in product(models, num_tokens):
        yield from block_matmuls(find_preset(model), tokens)


_1B = Training(model="llama3.2-1b", seq_len=4096, global_batch=8, micro_batch=2)
_3B = Training(model="llama3.2-3b", seq_len=4096, global_batch=4, micro_batch=1)
# As many blocks as leave 10 % of an H200 free by our own prediction with sdpa-math, which keeps every score and so
# needs most of all variants.
_8B_BLOCKS = Training(model="llama3.1-8b", num_blocks=18, seq_len=4096, global_batch=4, micro_batch=1)
_8B_BLOCKS_8192 = Training(model="llama3.1-8b", num_blocks=8, seq_len=8192, global_batch=2, micro_batch=1)
_13B_BLOCKS = Training(model="llama-13b", num_blocks=13, seq_len=4096, global_batch=2, micro_batch=1)
_65B_BLOCKS = Training(model="llama-65b", num_blocks=6, seq_len=4096, global_batch=2, micro_batch=1)

GPU = Suite(
    device_type="cuda",
    first=[replace(_3B, micro_batch=2), _8B_BLOCKS, _8B_BLOCKS_8192],
    groups={
        "ceilings": list(
            ceilings(
                models=("llama3.1-8b", "llama3.2-3b", "llama3.2-1b", "llama-13b", "llama-65b"),
                num_tokens=(4096, 8192),
                squares=(2048, 4096, 8192, 16_384),
                copies=(64 << 20, 256 << 20, 1 << 30, 4 << 30),
                attention=("llama3.1-8b", "llama3.2-1b"),  # heads of 128 and of 64
            )
        ),
        "blocks": [
            cell
            for base in (_8B_BLOCKS, _8B_BLOCKS_8192, _13B_BLOCKS, _65B_BLOCKS)
            for cell in vary(base, BLOCK_FACTORS)
        ],
        "kernels": [cell for base in (_3B, _1B) for cell in vary(base, FACTORS)],
        "sweep": [*sweep(_3B, (1, 2, 4)), *sweep(_1B, (1, 2, 4, 8))],
    },
)

_DEBUG = Training(model="debug", seq_len=32, global_batch=2, micro_batch=1)
_DEBUG_BLOCKS = replace(_DEBUG, num_blocks=2, seq_len=64)

CPU = Suite(
    device_type="cpu",
    num_steps=2,
    first=[_DEBUG_BLOCKS],
    groups={
        "ceilings": list(ceilings(["debug"], [64], squares=[128], copies=[1 << 20], attention=["debug"])),
        "blocks": list(vary(_DEBUG_BLOCKS, {"norm": ("eager",)})),  # the others with the whole model
        "kernels": list(vary(_DEBUG, FACTORS)),
        "sweep": list(sweep(_DEBUG, (1, 2))),
    },
)
"""The same at a size that a CPU does in a minute."""
