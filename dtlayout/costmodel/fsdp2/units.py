"""FSDP2's units: their parameters on one rank, and what gathering and reducing them holds.

A unit is what FSDP2 gathers together: a block, the embedding, final norm with head; what is tied belongs to the root.
Our trainer's experts are a unit of their own beside their block's, where other ranks share them.
Legend: S = dp_shard · cp, t = tp; p, e, r bytes of the master, compute and reduce formats; a unit has n parameters on a
tp rank, and N ≥ n with the padding to S equal shards. Read off plans/fsdp.py and torch's fsdp/_fully_shard.

[Note: a unit's reduction]
Weight gradients come in the compute format. When a unit's backward is over they are, under ZeRO-1 before the last
backward, added to whole gradients in the reduce format (r·n); else they are reduced. That fills a buffer of r·N from
them, lets them go (but for the last, which a loop variable holds), and writes r·N/S. Where each of several ranks has
the whole state it copies the buffer to divide it, and gloo to sum it up. The buffer stays until the next unit of any of
the rank's stages comes to its turn (before torch 2.13, one with gradients), or the last backward of any stage is over.
Under HSDP the shards of ZeRO-2 and -3 stay in the reduce format until the last backward, which sums them over the
replicas; where masters have another format, what was summed stays beside the gradients until that is over. Where an
engine sums the embedding's gradient over tp it is of all rows; before its reduction each rank gets its own.
Frozen weights lie in the compute format and are gathered, without a cast, and that is all; a unit of frozen weights
alone is not reduced. What lies whole on a rank and needs no cast is not copied by an engine that `computes_in_place`;
frozen weights lie so below ZeRO-3 where it does not `shards_frozen`. A weight that is gathered in fp8 is cast first,
each for itself: by way of fp32, out of what the compute format has of the shard (plans/cast_gather.py).
"""

import functools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache, cached_property, lru_cache
from math import ceil, prod
from typing import NamedTuple

from dtlayout.costmodel.fsdp2.blocks import WeightGradients
from dtlayout.costmodel.fsdp2.phase import IDLE, MemoryKind, Phase, changes, sequence
from dtlayout.costmodel.scenario import (
    Scenario,
    count_expert_shards,
    count_state_shards,
    gathers_weights_cast,
    leaves_frozen_whole,
)
from dtlayout.models.families import describe
from dtlayout.models.weight import Weight
from dtlayout.plans.plan import has_sums, sums_in_blocks, sums_in_head
from dtlayout.spec.base_format import BASE_FORMATS, SCALE
from dtlayout.spec.kernels import Kernels
from dtlayout.spec.layout import Layout
from dtlayout.spec.model_shape import ModelShape
from dtlayout.spec.precision import ALIGNMENT, BYTES
from dtlayout.spec.roles import Role

_P, _G, _B = MemoryKind.PARAMETERS, MemoryKind.GRADIENTS, MemoryKind.BUFFERS

Shape = tuple[int, ...]


@dataclass(frozen=True, eq=False)
class Unit:
    """Parameters that FSDP2 gathers and reduces together, on one tp rank."""

    weights: dict[str, Shape]
    """Local shapes by name, in FSDP2's order."""
    partial: int = 0
    """Parameters of which every tp rank has a gradient, one part of a sum, until it is reduced: all of an embedding, or
    none."""
    of_experts: frozenset[str] = frozenset()
    """Names of the weights that are stacks of experts' matrices, which fewer ranks hold."""
    roles: Mapping[str, Role] = field(default_factory=dict)
    """Name of each trained weight → its role."""
    codes: frozenset[str] = frozenset()
    """Names of the weights of a quantized base that are codes, of a byte each; all others are numbers."""
    scaled: frozenset[str] = frozenset()
    """Names of the weights that are gathered in fp8."""
    summed: frozenset[str] = frozenset()
    """Names of the weights whose matmul may add their gradient to the sum over microbatches, the head's among them."""
    tied: int = 0
    """Parameters of the stage's embedding, where it has its weight from the unit's head."""

    @classmethod
    def of(
        cls,
        weights: Iterable[Weight],
        tp: int,
        ep: int = 1,
        *,
        partial: int = 0,
        tied: int = 0,
        keeps_stacks: bool = False,
        base: str = "compute",
        scales: bool = False,
    ) -> "Unit":
        """The unit of some weights, counters left out; the matrices of a rank's experts lie under each other.

        With `keeps_stacks` whole experts are shards, or rows of all of them where there are more ranks. `base` is that
        of `Precision`: a weight that it quantizes is codes and scales. With `scales` weights that multiply in fp8 are
        gathered so.
        """
        few_bits, codes, scaled, summed = BASE_FORMATS.get(base), set[str](), set[str](), set[str]()
        shapes, of_experts, roles = dict[str, Shape](), set[str](), dict[str, Role]()
        for weight in (each for each in weights if not each.is_counter):
            shape = weight.local_shape(tp, ep)
            if weight.is_of_experts:
                of_experts.add(weight.name)
                shape = shape if keeps_stacks else (shape[0] * shape[1], *shape[2:])
            if few_bits and weight.can_be_quantized:
                codes.add(weight.name)
                shapes[weight.name] = (shape[0], few_bits.code_columns(shape[1]))
                shapes[f"{weight.name}{SCALE}"] = (shape[0], few_bits.scale_columns(shape[1]))
                continue
            shapes[weight.name] = shape
            if scales and weight.is_scaled(ALIGNMENT):
                scaled.add(weight.name)
            if weight.trains:
                roles[weight.name] = weight.role
            if weight.is_summed or (weight.trains and weight.role == "head"):
                summed.add(weight.name)
        return cls(
            shapes, partial, frozenset(of_experts), roles, frozenset(codes), frozenset(scaled), frozenset(summed), tied
        )

    @property
    def is_nested(self) -> bool:
        """True for a unit of experts alone, which lies inside its block's unit."""
        return 0 < len(self.of_experts) == len(self.weights)

    @cached_property
    def trained(self) -> "Unit":
        """The trained weights alone, which have gradients and state."""
        if self.roles.keys() == self.weights.keys():
            return self
        shapes = {name: self.weights[name] for name in self.roles}
        partial, of_experts = self.partial if shapes else 0, self.of_experts & shapes.keys()
        return Unit(shapes, partial, of_experts, self.roles, summed=self.summed, tied=self.tied if shapes else 0)

    def shard_sizes(self, shards: int, expert_shards: int) -> list[int]:
        """Parameters of each weight's largest shard: rows are split over the ranks."""
        return [
            _cut(shape, expert_shards if name in self.of_experts else shards) for name, shape in self.weights.items()
        ]

    def count(self, shards: int = 1, expert_shards: int = 1) -> int:
        """Parameters of the largest shard."""
        return _count_shard(self, shards, is_of_experts=False) + _count_shard(self, expert_shards, is_of_experts=True)


_NOTHING = Unit({})


@lru_cache(maxsize=1024)
def _count_shard(unit: Unit, shards: int, *, is_of_experts: bool) -> int:
    own = (shape for name, shape in unit.weights.items() if (name in unit.of_experts) == is_of_experts)
    return sum(_cut(shape, shards) for shape in own)


def _cut(shape: Shape, shards: int) -> int:
    """Parameters of the largest of so many shards of a weight."""
    rows = shape[0]
    if len(shape) == 3 and rows < shards and shape[1] % shards == 0:  # `plans.experts.place_shards`
        rows = shape[1]
    return ceil(rows / shards) * (prod(shape) // rows)


class StageUnits(NamedTuple):
    """The units of a stage beside its blocks; a stage without embedding or head has none of it."""

    embedding: Unit | None
    """Embedding, where it is not tied."""
    head: Unit | None
    """Final norm and head, where they are not tied."""
    root: Unit | None
    """Embedding, final norm and head where they are tied."""


@lru_cache(maxsize=256)
def stage_units(model: ModelShape, tp: int, *, has_embedding: bool, has_head: bool, sums_embedding: bool) -> StageUnits:
    """Units of a stage beside its blocks; `sums_embedding` is the engine's feature."""
    description = describe(model)
    beside = description.after_blocks
    whole_table = description.embedding.numel if tp > 1 and sums_embedding else 0
    embedding = Unit.of(description.before_blocks, tp, partial=whole_table) if has_embedding else None
    head = Unit.of([*beside, description.head], tp) if has_head else None
    if model.tied_embeddings and embedding and head:  # one weight: the sum of its gradients comes as the head's does
        tied = prod(description.embedding.local_shape(tp))
        return StageUnits(
            None, None, Unit.of([description.head, *beside, *description.beside_embedding], tp, tied=tied)
        )
    if model.tied_embeddings:
        return StageUnits(None, None, head or embedding)
    return StageUnits(embedding, head, None)


class BlockUnits(NamedTuple):
    """The units of a block."""

    whole: Unit
    """All of it, but experts that are a unit of their own."""
    experts: Unit | None
    """Experts, where they are."""


@lru_cache(maxsize=256)
def block_unit(model: ModelShape, tp: int, ep: int, base: str = "compute", *, scales: bool = False) -> Unit:
    """Unit of a whole block, of which other programs have no other."""
    return Unit.of(describe(model).block_weights, tp, ep, base=base, scales=scales)


@lru_cache(maxsize=256)
def block_units(
    model: ModelShape, tp: int, ep: int, *, nests_experts: bool, base: str = "compute", scales: bool = False
) -> BlockUnits:
    """The units of a block; `nests_experts` is the engine's feature, `base` and `scales` are as for `Unit.of`."""
    if not (nests_experts and model.experts):
        return BlockUnits(block_unit(model, tp, ep, base, scales=scales), None)
    weights = describe(model).block_weights
    unit = functools.partial(Unit.of, tp=tp, ep=ep, keeps_stacks=True, base=base, scales=scales)
    if ep == tp == 1:  # `plans.plan.needs_expert_mesh`
        return BlockUnits(unit(weights), None)
    return BlockUnits(*(unit([each for each in weights if each.is_of_experts is has]) for has in (False, True)))


class UnitBytes:
    """Bytes that FSDP2 holds to gather and reduce the units of one layout."""

    def __init__(self, scenario: Scenario, layout: Layout, kernels: Kernels):
        """Formats from the scenario, ZeRO stage and degrees from the layout."""
        formats = scenario.precision
        self.params, self.compute, self.reduce = (BYTES[f] for f in (formats.params, formats.compute, formats.reduce))
        self.zero, self.shards, self.description = layout.zero, count_state_shards(layout), describe(scenario.model)
        self.expert_shards = count_expert_shards(layout)
        self.nests_experts, self.base = scenario.engine.features.nests_experts, formats.base
        self.scales = gathers_weights_cast(scenario)
        """Whether weights that multiply in fp8 are gathered so."""
        self.tp, self.sums_embedding = layout.tp, scenario.engine.features.sums_embedding
        self.on_host = layout.offloads_state
        """Whether masters, gradients and the optimizer's state lie on the host."""
        self.copies_masters = layout.offloads_state and not scenario.is_on_host
        """Whether masters are copied to the device to be gathered; a CPU has them there."""
        self.is_hybrid, self.optimizer = layout.dp_replicate > 1, scenario.optimizer
        features = scenario.engine.features
        self.adds_up_whole = features.adds_up_whole and layout.zero > 1
        """Whether gradients are whole until the last backward although the stage of ZeRO shards them."""
        self.sums_late = layout.zero == 1 or self.adds_up_whole or (self.is_hybrid and layout.splits_backward)
        """Whether gradients are whole until the last backward."""
        adds = features.adds_in_matmuls and has_sums(layout) and layout.num_microbatches(scenario.batch) > 1
        self.sums_in_blocks = adds and sums_in_blocks(layout, formats)
        """True if the matmuls of blocks add weight gradients to the sum over microbatches."""
        self.sums_in_head = adds and sums_in_head(scenario.model, kernels)
        """True if the head's matmul adds its weight gradient to such a sum."""
        self.in_place = features.computes_in_place and not self.copies_masters
        """Whether a rank with all of the state computes with what needs no cast where it lies."""
        self.frozen_whole = leaves_frozen_whole(scenario, layout)
        """Whether each rank has all frozen weights, which are then not gathered."""
        self.bucket_bytes = features.bucket_bytes if self.is_hybrid else 0
        """Bytes a parameter of buffers that hold all gradients, where several ranks have the whole state."""
        self._moved = cache(self._find_moved)
        self.is_on_cpu = scenario.cluster.gpu.device_type == "cpu"
        """True on a CPU, where gloo reduces: it copies its input."""
        self.finish_backward = cache(self._finish_backward)
        """The end of a unit's backward, [Note: a unit's reduction]; `before` has the buffer of the last reduction."""

    def ranks(self, unit: Unit) -> int:
        """Ranks that share a unit's state."""
        return self.expert_shards if unit.is_nested else self.shards

    def shard(self, unit: Unit) -> int:
        """Parameters of a unit's shard, the largest."""
        return unit.count(self.shards, self.expert_shards)

    def shard_bytes(self, unit: Unit) -> int:
        """Bytes of a unit's shard, the largest: masters of trained weights, and frozen ones as they are stored."""
        if self.frozen_whole:
            return sum(n * stored for n, stored, _ in self._list_shards(unit.trained)) + self.frozen_bytes(unit)
        return sum(n * stored for n, stored, _ in self._list_shards(unit))

    def frozen_bytes(self, unit: Unit) -> int:
        """Bytes of a unit's frozen weights that a rank has whole, where it has them so."""
        if not self.frozen_whole:
            return 0
        whole = {name: prod(shape) for name, shape in unit.weights.items() if name not in unit.roles}
        return sum(n * (1 if name in unit.codes else self.compute) for name, n in whole.items())

    def all_gradients(self, unit: Unit) -> int:
        """Bytes of buffers for all gradients of a unit, where the whole state lies on several ranks."""
        return self.bucket_bytes * unit.trained.count() if self.ranks(unit) == 1 else 0

    def _find_moved(self, unit: Unit) -> Unit:
        """The weights of a unit that are copied to be computed with: all, those that are trained, or none."""
        if self.in_place and self.ranks(unit) == 1:
            return unit.trained if self.params != self.compute else _NOTHING
        return unit.trained if self.frozen_whole else unit

    def optimizer_bytes(self, unit: Unit) -> float:
        """Bytes that the optimizer keeps of a unit's shard, by the role of each weight."""
        total: float = 0
        for role, n in zip(unit.trained.roles.values(), self._shard_sizes(unit.trained), strict=True):
            optimizer = self.optimizer.of_role(role)
            total += optimizer.state_bytes(self.params) * n + optimizer.step_bytes
        return total

    def padded(self, unit: Unit) -> int:
        """Parameters of a unit with the padding of its shards."""
        everywhere = self.shards * _count_shard(unit, self.shards, is_of_experts=False)
        return everywhere + self.expert_shards * _count_shard(unit, self.expert_shards, is_of_experts=True)

    def gathered(self, unit: Unit) -> int:
        """Bytes of a unit's parameters to compute with, but for those that lie where they are."""
        unit = self._moved(unit)
        whole = self.compute * self.padded(unit)
        if unit.codes or unit.scaled:
            spared = [self.shards * n * (self.compute - used) for n, _, used in self._list_shards(unit)]
            whole -= sum(spared)
        return whole

    def buffer(self, unit: Unit | None) -> int:
        """Bytes of the buffer through which a unit is gathered; one rank needs none."""
        return self.gathered(unit) if unit and self.ranks(unit) > 1 else 0

    def fill(self, unit: Unit | None) -> list[tuple[MemoryKind, float]]:
        """Shards of trained weights are cast, and all ranks' shards come into the buffer; one rank needs none."""
        if unit is None or self.ranks(unit) == 1:
            return []
        unit = self._moved(unit)
        flat: float = self.compute * self.shard(unit if self.copies_masters else unit.trained)
        cast: list[tuple[MemoryKind, float]] = [(_B, flat)]
        if self.copies_masters:
            cast = [step for each in self._list_shards(unit) for step in self._fetch(*each)]
        elif unit.scaled:
            names = [(name, *each) for name, each in zip(unit.weights, self._list_shards(unit), strict=True)]
            cast = [step for name, *each in names if name in unit.scaled for step in self._fetch(*each)]
            cast.append((_B, self.compute * sum(n for name, n, *_ in names if name in unit.roles.keys() - unit.scaled)))
        flat = sum(size for _, size in cast)
        return [*cast, (_B, self.buffer(unit)), (_B, -flat)]

    def take_out(self, unit: Unit) -> list[tuple[MemoryKind, float]]:
        """A unit's parameters, out of its buffer or, on one rank, each out of its master when the next one comes."""
        if self.ranks(unit) > 1 or (unit.of_experts and self.expert_shards > 1):  # of which other ranks have shards
            return [(_P, self.gathered(unit))]
        unit = self._moved(unit)
        steps: list[tuple[MemoryKind, float]] = []
        last = 0.0  # what was fetched of the weight before, until the next one is there
        for n, stored, used in self._list_shards(unit):
            fetched = self._fetch(n, stored, used)
            steps += [*fetched, (_B, -last), (_P, used * n)]
            last = sum(size for _, size in fetched)
        return [*steps, (_B, -last)]

    def _fetch(self, n: int, stored: int, used: int) -> list[tuple[MemoryKind, float]]:
        """n parameters come from the host, where they lie there, and are cast, where their formats differ.

        Each takes `stored` bytes before and `used` after it.
        """
        if self.scales and used < self.compute:
            fetched, cast = stored * self.copies_masters, self.compute * (stored != self.compute)
            return [(_B, (fetched + cast) * n), (_B, 4 * n), (_B, used * n), (_B, -(4 + fetched + cast) * n)]
        if self.copies_masters and stored != used:
            return [(_B, stored * n), (_B, used * n), (_B, -stored * n)]
        return [(_B, used * n)] if self.copies_masters or stored != used else []

    def _shard_sizes(self, unit: Unit) -> list[int]:
        return unit.shard_sizes(self.shards, self.expert_shards)

    def _list_shards(self, unit: Unit) -> list[tuple[int, int, int]]:
        """Parameters of each weight's largest shard, with the bytes of one as it is stored, and as it is gathered."""
        sizes = zip(unit.weights, self._shard_sizes(unit), strict=True)
        in_bytes = unit.codes | unit.scaled
        frozen = {True: 1, False: self.compute}
        return [
            (n, self.params if name in unit.roles else frozen[name in unit.codes], frozen[name in in_bytes])
            for name, n in sizes
        ]

    def gather(self, unit: Unit, before: Unit | None) -> Phase:
        """In forward: into its buffer, which stays until the next unit is out of its own, and out of it."""
        return changes(*self.fill(unit), *self.take_out(unit), (_B, -self.buffer(before)))

    def begin_backward(self, unit: Unit, *ahead: Unit | None) -> Phase:
        """Under ZeRO-3: out of its buffer, which was filled ahead; the next ones are filled."""
        filled = [step for each in ahead for step in self.fill(each)]
        return changes(*self.take_out(unit), (_B, -self.buffer(unit)), *filled)

    def kept_gathered(self, unit: Unit | None) -> int:
        """Bytes of a unit's parameters that stay gathered from the first use to the last backward, below ZeRO-3."""
        return self.gathered(unit) if unit and self.zero < 3 else 0

    def drop(self, unit: Unit) -> Phase:
        """Gathered parameters go."""
        return changes((_P, -self.gathered(unit)))

    def gradients_of(self, unit: Unit, *, is_first: bool) -> WeightGradients:
        """Weight gradients of one backward; later ones are added at once where whole ones of their format are there."""
        trained = unit.trained
        num_bytes = {name: float(self.compute * prod(shape)) for name, shape in trained.weights.items()}
        if trained.partial:
            num_bytes = dict.fromkeys(num_bytes, float(self.compute * trained.partial))
        sums = {name: self.reduce * float(prod(trained.weights[name])) for name in self._find_summed(trained)}
        num_bytes = {name: size for name, size in num_bytes.items() if name not in sums}
        if trained.tied and self.description.head.name in sums:  # which the sum takes up with the unit's others
            num_bytes[self.description.embedding.name] = float(self.compute * trained.tied)
        adds_at_once = self.sums_late and not is_first and self.compute == self.reduce
        sums = sums if is_first else dict.fromkeys(sums, 0.0)
        return WeightGradients(num_bytes, pile_up=not adds_at_once, summed=sums)

    def _find_summed(self, unit: Unit) -> set[str]:
        """Names of a unit's weights whose matmuls add to the sum of their gradients."""
        head = self.description.head.name
        return {name for name in unit.summed if (self.sums_in_head if name == head else self.sums_in_blocks)}

    def embedding_gradient(self, unit: Unit, *, is_first: bool) -> WeightGradients:
        """The embedding's weight gradient; where a head in the same stage is tied to it, it is added to that one's."""
        embedding = self.description.embedding
        if embedding.name in unit.weights or not embedding.trains or (unit.tied and self.sums_in_head):
            return self.gradients_of(unit, is_first=is_first)
        numel = embedding.numel if self.sums_embedding else prod(embedding.local_shape(self.tp))
        return WeightGradients({embedding.name: float(self.compute * numel)}, pile_up=False)

    def put_off(self, unit: Unit, *, is_first: bool, is_end: bool) -> Phase:
        """The end of the first part of a unit's backward that is split, in which blocks have no gradients."""
        drops = changes((_P, -self.gathered(unit) if self.zero == 3 else 0))
        return sequence((drops, self.add_up(unit, is_first=is_first))) if is_end else drops

    def add_up(self, unit: Unit, *, is_first: bool) -> Phase:
        """A unit's gradients become whole ones in the reduce format, or are added to these."""
        weights = self.gradients_of(unit, is_first=is_first)
        if not is_first or not weights.num_bytes:  # sums are there
            return changes((_G, -weights.left))
        accumulated = self._accumulated(unit) - sum(weights.summed.values())
        copied = [size for name, size in weights.num_bytes.items() if name in unit.weights]
        last = 0.0 if self.compute == self.reduce or not copied else copied[-1]
        return changes((_G, accumulated - weights.left + last), (_G, -last))  # one by one they become copies

    def _accumulated(self, unit: Unit) -> float:
        """Bytes of a unit's whole gradients in the reduce format."""
        return self.reduce * float(unit.trained.partial or unit.trained.count())

    def _finish_backward(
        self, unit: Unit, before: Unit | None, *, is_first: bool, is_last: bool, is_late: bool = False
    ) -> Phase:
        """Gathered parameters go and gradients are reduced; `is_late` where a backward is split and this is the end of
        its second part, after `put_off` and `add_up`."""
        if self.sums_late and not is_last:
            gone = self.drop(unit) if self.adds_up_whole and self.zero == 3 and not is_late else IDLE
            return sequence((gone, self.add_up(unit, is_first=is_first)))
        drops = (_P, -self.gathered(unit) if (is_last and self.zero < 3) or (self.zero == 3 and not is_late) else 0)
        trained = unit.trained
        if not trained.weights:
            return changes(drops, (_B, -self.reduction(before)))
        weights, accumulated = self.gradients_of(unit, is_first=is_first), self._accumulated(unit)
        takes_up = is_late or (self.sums_late and not is_first)
        unreduced, size = (accumulated, self.reduce) if takes_up else (weights.left, self.compute)
        local = size * trained.count()
        last = size * prod([*trained.weights.values()][-1]) if self.ranks(unit) > 1 else 0
        buffer, is_whole = self.reduction(unit), self.ranks(unit) == 1
        copy = buffer if (self.is_hybrid if is_whole else self.is_on_cpu) else 0
        out, shard = self.reduce * self.shard(trained), self.params * self.shard(trained)
        waits = self.is_hybrid and not is_last
        kept = 0 if self.on_host else shard
        left = out if waits else kept
        had = 0.0 if is_first or self.sums_late else out if self.is_hybrid else kept
        cast = 0.0 if self.reduce == self.params or waits else shard
        return changes(
            (_G, -weights.left if takes_up and not is_late else 0.0),
            drops,
            *([(_G, local), (_G, -unreduced)] if trained.partial else []),
            (_B, -self.reduction(before)), (_B, buffer), (_G, last - local),
            (_G, out), (_B, copy), (_B, -copy), (_G, cast), (_G, left - had - out - cast - last),
            (_B, self.summed(unit) if is_last else 0),
        )  # fmt: skip

    def summed(self, unit: Unit) -> float:
        """Bytes of a unit's shard, summed over replicas, that stay until the last backward is over."""
        is_cast = self.is_hybrid and self.reduce != self.params
        return self.reduce * self.shard(unit.trained) if is_cast else 0

    def reduction(self, unit: Unit | None) -> int:
        """Bytes of the buffer through which a unit is reduced."""
        return self.reduce * self.padded(unit.trained) if unit else 0
