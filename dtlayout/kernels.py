"""Kernels: which implementation runs each operation that has several. docs/kernels.md says what runs where."""

import math
from collections.abc import Collection
from dataclasses import dataclass, fields, replace
from typing import Literal, get_args, get_type_hints

from dtlayout.errors import InvalidConfig
from dtlayout.precision import Precision

Attention = Literal[
    "auto",
    "sdpa-math",
    "sdpa-efficient",
    "sdpa-flash",
    "sdpa-cudnn",
    "flash-attn",
    "fa3",
    "flash1",
    "megatron-softmax",
    "torch",
]
FLASH_LIKE = ("sdpa-flash", "sdpa-cudnn", "sdpa-efficient", "flash-attn", "fa3")
"""Attention that holds no scores, but one number for each row of them."""
PREDICTED_ONLY = ("flash1", "megatron-softmax", "torch")
"""Kernels of other engines, which the cost model knows and the trainer does not have."""
BY_DOCUMENT = ("sdpa-flash", "flash-attn", "fa3")
"""Attention that on CUDA takes one document after the other."""
CUDA_ONLY = ("sdpa-efficient", "sdpa-cudnn", "flash-attn", "fa3")
"""Attention that has no CPU implementation."""
Norm = Literal["eager", "fused", "liger"]
Rope = Literal["eager", "liger"]
SwiGLU = Literal["eager", "liger"]
Loss = Literal["eager", "chunked", "linear"]
Compile = Literal["none", "blocks", "loss", "model"]


@dataclass(frozen=True, kw_only=True)
class Kernels:
    """A choice for each operation; what it means stands in `dtlayout.ops`."""

    attention: Attention = "sdpa-flash"
    """How scaled_dot_product_attention computes; sdpa-flash is PyTorch's FlashAttention-2 on CUDA, its own on CPU, auto
    the fastest that runs. flash1, megatron-softmax and torch can be predicted, not run."""
    norm: Norm = "fused"
    """RMSNorm as separate operations (eager), as PyTorch's one operation (fused) or as liger-kernel's."""
    rope: Rope = "eager"
    """Rotary embedding as separate operations in fp32, or as liger-kernel's."""
    swiglu: SwiGLU = "eager"
    """silu(gate) · up as two operations, or as liger-kernel's."""
    loss: Loss = "chunked"
    """Cross-entropy of all logits in fp32 (eager), chunk by chunk of them (chunked), or together with the head's
    matmul, so that no more than a chunk of logits is ever there (linear)."""
    compile: Compile = "none"
    """What torch.compile gets: each block for itself, the loss, or a whole pipeline stage."""

    def __post_init__(self) -> None:
        hints = get_type_hints(Kernels)
        problems = [
            f"kernels.{f.name}={getattr(self, f.name)!r} is unknown; use one of {list(get_args(hints[f.name]))}"
            for f in fields(self)
            if getattr(self, f.name) not in get_args(hints[f.name])
        ]
        if problems:
            raise InvalidConfig(problems)

    @property
    def compiles_blocks(self) -> bool:
        """Whether torch.compile fuses what is elementwise in a block."""
        return self.compile in ("blocks", "model")

    def resolve(
        self,
        precision: Precision,
        device_type: str,
        capability: tuple[int, int] | None = None,
        installed: Collection[str] = (),
    ) -> tuple["Kernels", str]:
        """These with a kernel where attention is auto, and why it is that: `choose_attention`.

        A prediction leaves out what only a run knows, the last two.
        """
        if self.attention != "auto":
            return self, "asked for"
        attention, why = choose_attention(precision, device_type, capability, installed)
        return replace(self, attention=attention), why

    def check(
        self,
        precision: Precision,
        device_type: str,
        capability: tuple[int, int] | None = None,
        *,
        tp: int = 1,
        recompute: str = "none",
    ) -> None:
        """Raise InvalidConfig with all of `problems`."""
        if problems := self.problems(precision, device_type, capability, tp=tp, recompute=recompute):
            raise InvalidConfig(problems)

    def problems(
        self,
        precision: Precision,
        device_type: str,
        capability: tuple[int, int] | None = None,
        *,
        tp: int = 1,
        recompute: str = "none",
    ) -> list[str]:
        """Every kernel that the trainer lacks, or lacks on this device, in this format or in such a layout.

        A `device_type` of "auto" is not known yet, and refuses only what runs nowhere.
        """
        compute = precision.compute
        problems = []
        if self.attention in PREDICTED_ONLY:
            problems.append(
                f"kernels.attention={self.attention} is a kernel of other engines that can only be predicted; "
                f"use sdpa-flash or sdpa-math"
            )
        if device_type == "cpu":
            problems += [
                f"kernels.{name}={kernel} runs on CUDA alone; use kernels.{name}={instead} on the CPU"
                for name, kernel, instead in self._cuda_only()
            ]
        if device_type == "cuda" and self.attention in _BF16_ONLY and compute != "bfloat16":
            problems.append(
                f"kernels.attention={self.attention} does not compute in precision.compute={compute} on CUDA; "
                f"use precision.compute=bfloat16 or kernels.attention=sdpa-math"
            )
        if self.attention == "fa3" and capability is not None and capability[0] != _HOPPER:
            problems.append(
                f"kernels.attention=fa3 runs on compute capability {_HOPPER}, and this GPU has "
                f"{capability[0]}.{capability[1]}; use kernels.attention=sdpa-flash"
            )
        if self.attention == "sdpa-efficient" and compute == "float64":
            problems.append(
                "kernels.attention=sdpa-efficient does not compute in precision.compute=float64; "
                "use kernels.attention=sdpa-math"
            )
        problems += [
            f"kernels.{name}=liger computes in fp32 at best, less than precision.compute=float64; "
            f"use kernels.{name}={instead}"
            for name, instead in self._liger()
            if compute == "float64"
        ]
        return problems + (self._compile_problems(tp, recompute, device_type) if tp > 1 else [])

    def _compile_problems(self, tp: int, recompute: str, device_type: str) -> list[str]:
        """Where torch.compile fails on what tp splits."""
        problems = []
        if self.compile == "model":
            problems.append(
                f"kernels.compile=model cannot trace the embedding that layout.tp={tp} splits over the vocabulary; "
                f"use kernels.compile=blocks"
            )
        runs_attention_again = recompute == "keep-matmuls" and self.attention != "sdpa-math"
        if self.compile == "blocks" and runs_attention_again and device_type == "cpu":
            problems.append(
                f"kernels.compile=blocks cannot keep the random state that layout.recompute=keep-matmuls needs to run "
                f"kernels.attention={self.attention} again on a CPU beside the mesh of layout.tp={tp}; "
                f"use layout.recompute=selective or kernels.attention=sdpa-math"
            )
        return problems

    def _cuda_only(self) -> list[tuple[str, str, str]]:
        """Name, kernel, and what runs on the CPU instead."""
        attention = [("attention", self.attention, "sdpa-flash")] if self.attention in CUDA_ONLY else []
        return attention + [(name, "liger", instead) for name, instead in self._liger()]

    def _liger(self) -> list[tuple[str, str]]:
        """Operations that liger-kernel computes, and what else could."""
        others = (("norm", "fused"), ("rope", "eager"), ("swiglu", "eager"))
        return [(name, other) for name, other in others if getattr(self, name) == "liger"]


def needs_mask(attention: Attention, device_type: str) -> bool:
    """Whether a kernel keeps packed documents apart by a mask, S² numbers a sample, and not by their offsets."""
    return device_type != "cuda" or attention not in BY_DOCUMENT


_LOSS_CHUNK = 1024
"""Tokens of a chunk at most: enough for the weight's gradient to be more work than adding it up."""


def count_loss_chunks(num_tokens: float) -> int:
    """Parts that the chunked and the linear loss take one after the other of a microbatch of so many tokens."""
    return max(2, math.ceil(num_tokens / _LOSS_CHUNK))


def choose_attention(
    precision: Precision, device_type: str, capability: tuple[int, int] | None, installed: Collection[str]
) -> tuple[Attention, str]:
    """What attention's auto stands for on a device, and why; `installed` are the kernels whose package is there."""
    if device_type == "cpu":
        return "sdpa-flash", "the CPU's one fused kernel"
    match precision.compute:
        case "float64":
            return "sdpa-math", "the one kernel that computes in float64 on CUDA"
        case "float32":
            return "sdpa-efficient", "the one fused kernel that computes in fp32 on CUDA"
        case "bfloat16" if capability is not None and capability[0] == _HOPPER and "fa3" in installed:
            return "fa3", "made for this GPU, and its package is installed"
        case "bfloat16":
            return "sdpa-flash", "PyTorch's FlashAttention-2"


_HOPPER = 9
"""Compute capability that FlashAttention-3 is made for."""
_BF16_ONLY = ("sdpa-flash", "sdpa-cudnn", "flash-attn", "fa3")
"""Attention that takes fp16 and bf16 alone on CUDA."""
