"""Adapter: small weights that are trained beside a frozen model, LoRA or (IA)³, as [adapter] says it."""

from dataclasses import dataclass
from typing import Literal

from dtlayout.base.refusals import Refusal
from dtlayout.base.validators import Ranged, ranged

IA3_TARGETS = ("k_proj", "v_proj", "down_proj")
"""Matmuls that (IA)³ rescales where no targets are named (arXiv:2205.05638; PEFT's choice for a Llama)."""
IA3_INPUTS = ("down_proj",)
"""Matmuls whose inputs (IA)³ rescales; of all others it rescales the outputs (PEFT: feedforward_modules)."""


@dataclass(frozen=True, kw_only=True)
class Adapter(Ranged, section="adapter"):
    """Small weights that are trained beside a frozen model; no other weight is trained."""

    method: Literal["lora", "ia3"] = "lora"
    """Kind of the adapter. lora: two thin matrices beside each matmul, whose product is added to its weight
    (arXiv:2106.09685). ia3: a vector that rescales inputs or outputs of a matmul (arXiv:2205.05638)."""
    targets: tuple[str, ...] = ()
    """Modules that get one, by the end of their names, such as q_proj (PEFT: target_modules). Without any: with lora
    every linear layer of a block that is no router and no stack of experts, with ia3 k_proj, v_proj and down_proj."""
    rank: int = ranged("must be from 1 to a million", 16)
    """Inner width of the two matrices (PEFT: r); ia3 has none."""
    alpha: float = ranged("must be above 0 and finite", 32.0)
    """Factor of their product, which is divided by `rank` (PEFT: lora_alpha)."""
    rslora: bool = False
    """Whether that factor is divided by the root of `rank` instead (arXiv:2312.03732; PEFT: use_rslora)."""

    @property
    def scale(self) -> float:
        """Factor of what the two matrices compute.

        >>> Adapter(rank=16, alpha=32.0).scale, Adapter(rank=16, alpha=32.0, rslora=True).scale
        (2.0, 8.0)
        """
        return self.alpha / (self.rank**0.5 if self.rslora else self.rank)

    def find_broken(self) -> list[Refusal]:
        """A refusal for an empty name among the targets, or for one that is there twice."""
        broken = [each for each in dict.fromkeys(self.targets) if not each.strip() or self.targets.count(each) > 1]
        return [
            Refusal("targets", f"adapter.targets has {each!r} {'twice' if each.strip() else 'in it'}", "remove it")
            for each in broken
        ]
