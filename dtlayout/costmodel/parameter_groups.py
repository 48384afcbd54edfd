"""Parameters by what updates them: those of each optimizer that shares the model, and those that are frozen.

In nearly all models one optimizer updates everything. So a rank's parameters are counted as a whole, and beside that
those that stand apart from the scenario's own optimizer.
"""

from collections import defaultdict
from collections.abc import Iterable
from functools import lru_cache
from typing import NamedTuple

from dtlayout.costmodel.scenario import count_expert_shards, count_state_shards
from dtlayout.models.families import describe
from dtlayout.models.weight import Weight
from dtlayout.pipelining.partition import StageSlice
from dtlayout.plans.plan import gathers_scaled
from dtlayout.spec.base_format import BASE_FORMATS
from dtlayout.spec.layout import Layout
from dtlayout.spec.model_shape import ModelShape
from dtlayout.spec.optimizers import Optimizer
from dtlayout.spec.precision import ALIGNMENT, BYTES, Precision

MIXED = Precision()
"""The usual formats, in which nothing is quantized."""


class ParameterCount(NamedTuple):
    """Parameters of a rank."""

    everywhere: float = 0.0
    """Parameters that each ep rank has alike."""
    of_experts: float = 0.0
    """Parameters of experts."""

    @property
    def total(self) -> float:
        """All of them."""
        return self.everywhere + self.of_experts

    def shard(self, layout: Layout) -> float:
        """Parameters of them whose state a rank has."""
        everywhere = self.everywhere / count_state_shards(layout)
        return everywhere + self.of_experts / count_expert_shards(layout) if self.of_experts else everywhere


class Apart(NamedTuple):
    """Parameters of a rank that the scenario's own optimizer does not update."""

    frozen: ParameterCount = ParameterCount()
    """Parameters that are not trained."""
    others: tuple[tuple[Optimizer, ParameterCount], ...] = ()
    """Each other optimizer that shares the model, and its parameters."""
    spared: float = 0.0
    """Bytes that a quantized base saves of the frozen parameters, counted in parameters of the compute format."""
    scaled: float = 0.0
    """Parameters that multiply below the compute format, and whose whole weights have one scale."""

    @classmethod
    def add(cls, counted: Iterable[tuple["Apart", int]]) -> "Apart":
        """Parameters of several stages together, of each as often as its number says."""
        found: dict[Optimizer | None, list[float]] = defaultdict(lambda: [0.0, 0.0])
        spared, scaled = 0.0, 0.0
        for apart, count in counted:
            if apart is NONE_APART:
                continue
            spared, scaled = spared + count * apart.spared, scaled + count * apart.scaled
            for owner, numbers in ((None, apart.frozen), *apart.others):
                found[owner][0] += count * numbers.everywhere
                found[owner][1] += count * numbers.of_experts
        return cls._of(found, spared, scaled)

    @classmethod
    def _of(cls, found: dict[Optimizer | None, list[float]], spared: float, scaled: float) -> "Apart":
        if not (found or scaled):
            return NONE_APART
        others = ((owner, ParameterCount(*numbers)) for owner, numbers in found.items() if owner is not None)
        return cls(ParameterCount(*found.get(None, ())), tuple(others), spared, scaled)

    @property
    def stored(self) -> float:
        """Parameters of the compute format that take as many bytes as the frozen ones."""
        return self.frozen.total - self.spared


NONE_APART = Apart()
"""No parameter stands apart: all are trained, by one optimizer."""


@lru_cache(maxsize=1024)
def count_apart(
    model: ModelShape, optimizer: Optimizer, stage: StageSlice, tp: int, ep: int = 1, precision: Precision = MIXED
) -> Apart:
    """Parameters of one rank of a stage that `optimizer` does not update itself; a tied head counts once."""
    base, compute = BASE_FORMATS.get(precision.base), BYTES[precision.compute]
    spares, spared = 0.0 if base is None else 1 - base.stored_bytes(compute) / compute, 0.0
    has_scales, scaled = gathers_scaled(precision), 0.0
    described = describe(model)
    has_own_head = stage.head and not (model.tied_embeddings and stage.embedding)
    counted = [(weight, 1) for weight in described.before_blocks * stage.embedding]
    counted += [(weight, 1) for weight in described.after_blocks * stage.head + (described.head,) * has_own_head]
    for kind, count in model.kinds(stage.layers):
        counted += [(weight, count) for weight in describe(kind).block_weights]
    found: dict[Optimizer | None, list[float]] = defaultdict(lambda: [0.0, 0.0])
    for weight, count in counted:
        if has_scales and weight.is_scaled(ALIGNMENT):
            scaled += count * weight.numel / tp
        if (owner := _find_owner(weight, optimizer)) is not optimizer:
            split = ep if weight.is_of_experts else 1 if weight.split is None else tp
            found[owner][weight.is_of_experts] += count * weight.numel / split
            spared += count * weight.numel / split * spares * weight.can_be_quantized
    return Apart._of(found, spared, scaled)


def _find_owner(weight: Weight, optimizer: Optimizer) -> Optimizer | None:
    return optimizer.of_role(weight.role) if weight.trains else None


def list_trained(
    optimizer: Optimizer, n: float, of_experts: float, apart: Apart
) -> list[tuple[Optimizer, ParameterCount]]:
    """Each optimizer with its parameters, of n in all with `of_experts` among them; `optimizer` is first."""
    everywhere = n - of_experts
    if apart is NONE_APART:
        return [(optimizer, ParameterCount(everywhere, of_experts))]
    for numbers in (apart.frozen, *(numbers for _, numbers in apart.others)):
        everywhere, of_experts = everywhere - numbers.everywhere, of_experts - numbers.of_experts
    return [(optimizer, ParameterCount(everywhere, of_experts)), *apart.others]
