"""Adapters as operations of a block: a frozen matmul with two thin matrices beside it, or with a vector. No torch.

`adapt` freezes a described model and gives each target its adapter; parameters, plans, memory and time follow from
that. Their modules are ops/adapters.py, and plans/plan.py says how tp splits them.

Legend: r rank.
"""

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, fields, replace
from functools import cached_property, partial
from typing import Literal

from dtlayout.base.errors import InvalidConfig
from dtlayout.models.description import Description, Operation
from dtlayout.models.mixer import Mixer
from dtlayout.models.operations import Elementwise, Linear, Norm, SelfAttention
from dtlayout.models.routed_experts import RoutedExperts
from dtlayout.models.tape import BlockTensor, TapeEntry, TapeOptions
from dtlayout.models.weight import Weight
from dtlayout.spec.adapter import IA3_INPUTS, IA3_TARGETS, Adapter


@dataclass(frozen=True)
class LowRankLinear(Linear):
    """A frozen matmul with a LoRA: what a narrow matmul and a wide one make of its input is added to its result."""

    rank: int = 0
    """Elements of a token between the two."""

    @property
    def names(self) -> tuple[str, str]:
        """Modules of the two: lora_A [r, in] and lora_B [out, r]."""
        return f"{self.module}.lora_A", f"{self.module}.lora_B"

    @cached_property
    def weights(self) -> tuple[Weight, ...]:  # type: ignore[override]
        """The matmul's own, and the two matrices; one of these is split like the matmul."""
        narrow, wide = (f"{name}.weight" for name in self.names)
        split = self.own_weights[0].split
        return (
            *self.own_weights,
            Weight(narrow, (self.rank, self.inputs), "fan-in", "adapter", 1 if split == 1 else None),
            Weight(wide, (self.outputs, self.rank), "zeros", "adapter", 0 if split == 0 else None),
        )

    def record(self, options: TapeOptions) -> tuple[TapeEntry, ...]:
        """The frozen matmul, the two of the adapter, and the sum; then what follows the matmul."""
        matmul, *closing = super().record(options)
        (read,), (made,) = matmul.reads, matmul.makes
        saved = read if self.style == "rowwise" else read._replace(name=self.reads, spread="input")
        narrow, wide = self.names
        base, added = made._replace(name=f"{self.module}.base"), made._replace(name=wide)
        inner = BlockTensor(narrow, self.rank, "stream" if self.style == "replicated" else "whole")
        own = partial(TapeEntry, "matmul", kept_as=self.kept_as, puts_off=True, continues=True)
        return (
            matmul._replace(makes=(base,), is_local=False),
            own((read,), (inner,), (saved,), (f"{narrow}.weight",)),
            own((inner,), (added,), (inner,), (f"{wide}.weight",)),
            TapeEntry(
                "add",
                (base, added),
                (made,),
                shares_gradient=True,
                is_local=self.is_local,
                continues=True,
            ),
            *closing,
        )


@dataclass(frozen=True)
class RescaledLinear(Linear):
    """A frozen matmul with an (IA)³ vector: each element of its input or of its result is multiplied by a factor."""

    scales: Literal["input", "output"] = "output"
    """The side that the vector multiplies."""

    @property
    def name(self) -> str:
        """Module of the vector."""
        return f"{self.module}.ia3"

    @property
    def is_split(self) -> bool:
        """True if tp splits the vector, as it does where it splits that side of the matmul."""
        return self.style == ("rowwise" if self.scales == "input" else "colwise")

    @cached_property
    def weights(self) -> tuple[Weight, ...]:  # type: ignore[override]
        """The matmul's own, and the vector."""
        width = self.inputs if self.scales == "input" else self.outputs
        vector = Weight(f"{self.name}.weight", (width,), "ones", "vector", 0 if self.is_split else None)
        return (*self.own_weights, vector)

    def record(self, options: TapeOptions) -> tuple[TapeEntry, ...]:
        """The frozen matmul and the product, in the order in which they come."""
        matmul, *closing = super().record(options)
        (read,), (made,) = matmul.reads, matmul.makes
        product = partial(TapeEntry, "rescale", weights=(f"{self.name}.weight",))
        if self.scales == "output":
            base = made._replace(name=f"{self.module}.base")
            rescaled = product((base,), (made,), (base,), scratch=(base, base), is_local=self.is_local, continues=True)
            return (matmul._replace(makes=(base,), is_local=False), rescaled, *closing)
        scaled = read._replace(name=self.name)
        saved = read if self.style == "rowwise" else read._replace(name=self.reads, spread="input")
        kept = () if options.compiles else (saved,)
        scale = product((read,), (scaled,), kept, scratch=(read, read))
        return scale, matmul._replace(reads=(scaled,), continues=True), *closing


_WITH_WEIGHTS = (Norm, Linear, RoutedExperts, SelfAttention, Mixer, Elementwise)
"""Operations whose weights an adapter freezes."""


def adapt(described: Description, adapter: Adapter) -> Description:
    """A description with all of its weights frozen, and the adapter at each target of its block.

    Targets that the block lacks are passed over: `find_unmatched` looks at all kinds of blocks.
    """
    targets = {each.module for each in _list_open(described) if _is_target(each, adapter)}
    return Description(
        embedding=replace(described.embedding, trains=False),
        block=tuple(_adapt_operation(each, adapter, targets) for each in described.block),
        final_norm=replace(described.final_norm, trains=False),
        head=replace(described.head, trains=False),
        beside_embedding=tuple(replace(weight, trains=False) for weight in described.beside_embedding),
        beside_head=tuple(replace(weight, trains=False) for weight in described.beside_head),
    )


def find_unmatched(described: Iterable[Description], adapter: Adapter) -> list[str]:
    """Problems of an adapter in a model with these kinds of blocks, one line each."""
    kinds = [*described]
    known = [each.module for kind in kinds for each in _list_open(kind)]
    routers = [kind.experts.router for kind in kinds if kind.experts]
    found = ", ".join(dict.fromkeys(module.rpartition(".")[2] for module in known))
    wanted = adapter.targets or (() if adapter.method == "lora" else IA3_TARGETS)
    missing = [each for each in wanted if not any(_ends_with(module, each) for module in (*known, *routers))]
    routing = [each for each in wanted if any(_ends_with(module, each) for module in routers)]
    return [
        *(f"adapter.targets: no linear layer of a block is called {each}; use some of {found}" for each in missing),
        *(f"adapter.targets: {each} is a router, which stays as it is; leave it out" for each in routing),
    ]


def _list_open(described: Description) -> list[Linear]:
    """Linear layers of a block that can have an adapter: all but a router."""
    router = described.experts.router if described.experts else ""
    return [each for each in described.block if isinstance(each, Linear) and each.module != router]


def _is_target(linear: Linear, adapter: Adapter) -> bool:
    if adapter.method == "lora" and not adapter.targets:
        return True
    return any(_ends_with(linear.module, target) for target in adapter.targets or IA3_TARGETS)


def _ends_with(module: str, target: str) -> bool:
    return f".{module}".endswith(f".{target}")


def _adapt_operation(operation: Operation, adapter: Adapter, targets: Collection[str]) -> Operation:
    """The operation frozen, with an adapter if it is one of the target modules."""
    frozen = replace(operation, trains=False) if isinstance(operation, _WITH_WEIGHTS) else operation
    if not isinstance(operation, Linear) or operation.module not in targets:
        return frozen
    own = {each.name: getattr(operation, each.name) for each in fields(Linear)} | {"trains": False}
    if adapter.method == "lora":
        return LowRankLinear(**own, rank=adapter.rank)
    rescales_input = operation.module.rpartition(".")[2] in IA3_INPUTS
    if operation.bias and operation.style == "rowwise" and not rescales_input:
        raise InvalidConfig(
            f"adapter.targets: {operation.module} adds its bias behind the sum over tp, and ia3 would rescale what "
            f"comes before; leave it out"
        )
    return RescaledLinear(**own, scales="input" if rescales_input else "output")


def list_adapted(described: Description) -> Iterator[LowRankLinear | RescaledLinear]:
    """Matmuls of a block that have an adapter."""
    return (each for each in described.block if isinstance(each, LowRankLinear | RescaledLinear))
