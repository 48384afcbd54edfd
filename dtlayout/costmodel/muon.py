"""Muon's update in our trainer: seconds to iterate matrices and to send them, and bytes of its fullest bucket.

Ranks that share matrices are a team, as in training/muon.py: they iterate whole ones in turn and send parts of them, in
bf16 or, where parameters are wider than fp32, in the parameters' format. Elementwise passes are no part of this; they
are `Optimizer.update_bytes`.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import lru_cache
from math import ceil
from typing import NamedTuple

from dtlayout.costmodel.comm import data_link, half_all_reduce_s, tp_link
from dtlayout.costmodel.compute import matmul_s
from dtlayout.costmodel.engine import OWN_ENGINE
from dtlayout.costmodel.parameter_groups import ParameterCount
from dtlayout.costmodel.scenario import Scenario, count_expert_shards, count_state_shards
from dtlayout.models.families import describe
from dtlayout.models.weight import Weight
from dtlayout.pipelining.partition import StageSlice
from dtlayout.spec.layout import Layout
from dtlayout.spec.model_shape import ModelShape
from dtlayout.spec.newton_schulz import BUCKET_ELEMENTS, Sides, plan_buckets
from dtlayout.spec.optimizers import Muon, Optimizer
from dtlayout.spec.precision import BYTES


class Sharing(NamedTuple):
    """How ranks share the matrices of a weight."""

    shards: int
    """Ranks of FSDP2 that share each matrix; 1 where matrices are whole there."""
    tp: int
    """Ranks of tp that share each matrix; 1 where it is whole there."""
    stride: int
    """Distance between neighbours among the ranks of FSDP2."""

    @property
    def num_ranks(self) -> int:
        """Ranks of the team."""
        return self.shards * self.tp


class _Degrees(NamedTuple):
    """Degrees of a layout that say how matrices are shared."""

    tp: int
    ep: int
    shards: int
    expert_shards: int

    @classmethod
    def of(cls, layout: Layout) -> "_Degrees":
        return cls(layout.tp, layout.ep, count_state_shards(layout), count_expert_shards(layout))

    def share(self, weight: Weight) -> Sharing:
        """Sharing of a weight; experts are sharded as `plans.experts.place_shards` says."""
        if not weight.is_of_experts:
            return Sharing(self.shards, 1 if weight.split is None else self.tp, self.tp)
        by_rows = weight.shape[0] // self.ep < self.expert_shards and weight.shape[1] % self.expert_shards == 0
        return Sharing(self.expert_shards if by_rows else 1, 1, self.ep)


def iteration_s(scenario: Scenario, layout: Layout, optimizer: Optimizer, own: ParameterCount) -> tuple[float, float]:
    """Seconds to iterate the matrices of a rank's stages, its `own` parameters after tp and ep, and to send them.

    Both are 0 for an optimizer that is not Muon, and for engines that are not ours. A team is as fast as whole matrices
    can be shared out: no faster than its largest one, and else evenly.
    """
    if not isinstance(optimizer, Muon) or scenario.engine.name != OWN_ENGINE:
        return 0.0, 0.0
    degrees, size = _Degrees.of(layout), _sent_size(scenario)
    weights = _list_weights(scenario.model, scenario.optimizer, optimizer)
    sizes = [sum(count * _numel(weight, degrees) for weight, count in weights if weight.is_of_experts is has)
             for has in (False, True)]  # fmt: skip
    shares = [mine / whole if whole else 0.0 for mine, whole in zip(own, sizes, strict=True)]
    work, longest = defaultdict[Sharing, float](float), defaultdict[Sharing, float](float)
    elements = defaultdict[Sharing, float](float)
    for weight, count in weights:
        sharing, shape = degrees.share(weight), weight.shape[-2:]
        spread = degrees.expert_shards if weight.is_of_experts else sharing.num_ranks
        numbers = shares[weight.is_of_experts] * count * _count_matrices(weight, degrees)
        each_s = _matrix_s(scenario, min(shape), max(shape), optimizer.steps)
        work[sharing] += numbers * each_s / spread
        longest[sharing] = max(longest[sharing], each_s if numbers else 0.0)
        elements[sharing] += numbers * shape[0] * shape[1]
    sending_s = 0.0
    for sharing, number in elements.items():
        if number and sharing.num_ranks > 1:
            rounds = ceil(number / (sharing.num_ranks * BUCKET_ELEMENTS))
            of_rank = size * number / sharing.num_ranks / rounds
            if sharing.shards == 1:
                link = tp_link(scenario, layout)
            else:
                link = data_link(scenario, layout, 1 if sharing.tp > 1 else sharing.stride, sharing.num_ranks)
            sending_s += 2 * rounds * half_all_reduce_s(of_rank, sharing.num_ranks, link)
    return sum(max(work[each], longest[each]) for each in work), sending_s


def workspace_bytes(scenario: Scenario, layout: Layout, chunks: Sequence[StageSlice]) -> float:
    """Bytes beside the state that the update of a rank's stages holds at most; 0 where no optimizer is Muon."""
    if scenario.engine.name != OWN_ENGINE:
        return 0.0
    parts = [part for part in scenario.optimizer.parts if isinstance(part, Muon)]
    stages = tuple(chunks)
    counted = [
        _count_workspace(scenario.model, scenario.optimizer, part, stages, _Degrees.of(layout)) for part in parts
    ]
    return _sent_size(scenario) * max(counted, default=0)


@lru_cache(maxsize=1024)
def _count_workspace(
    model: ModelShape, whole: Optimizer, optimizer: Muon, stages: tuple[StageSlice, ...], degrees: _Degrees
) -> int:
    """Elements of the fullest moment of a rank: two messages, or one beside a batch that is iterated."""
    teams = defaultdict[Sharing, list[tuple[Sides, int]]](list)
    for stage in stages:
        for kind, count in model.kinds(stage.layers):
            for weight in _list_owned(kind, whole, optimizer):
                sharing, shape = degrees.share(weight), (weight.shape[-2], weight.shape[-1])
                number = _count_matrices(weight, degrees)
                if weight.is_of_experts and sharing.shards == 1:  # ranks have different ones
                    number = ceil(number / degrees.expert_shards)
                teams[sharing] += [(shape, _tile(weight, sharing))] * (count * number)
    fullest = 0
    for sharing, matrices in teams.items():
        for owned in (each.owned for each in plan_buckets([shape for shape, _ in matrices], sharing.num_ranks)):
            sent = sum(matrices[place][1] for places in owned for place in places)
            for places in owned:
                iterated = defaultdict[Sides, int](int)
                for place in places:
                    m, n = sorted(matrices[place][0])
                    iterated[m, n] += 1
                whole_ones = sum(count * m * n for (m, n), count in iterated.items())
                batch = max([count * (2 * m * n + m * m) for (m, n), count in iterated.items()], default=0)
                messages = whole_ones + (sent if sharing.num_ranks > 1 else 0)
                fullest = max(fullest, messages, whole_ones + batch)
    return fullest


def _tile(weight: Weight, sharing: Sharing) -> int:
    """Elements of the largest tile of one of a weight's matrices."""
    rows, columns = weight.shape[-2:]
    if weight.split is not None and not weight.is_of_experts:
        rows, columns = (rows // sharing.tp, columns) if weight.split == 0 else (rows, columns // sharing.tp)
    return ceil(rows / sharing.shards) * columns


def _list_owned(kind: ModelShape, whole: Optimizer, optimizer: Optimizer) -> Iterable[Weight]:
    """Weights of a block that an optimizer updates, as the whole optimizer shares them out."""
    return [each for each in describe(kind).block_weights if each.trains and whole.of_role(each.role) == optimizer]


@lru_cache(maxsize=64)
def _list_weights(model: ModelShape, whole: Optimizer, optimizer: Optimizer) -> list[tuple[Weight, int]]:
    """Weights that an optimizer updates, and in how many blocks each is."""
    kinds = model.kinds(range(model.num_layers))
    return [(weight, count) for kind, count in kinds for weight in _list_owned(kind, whole, optimizer)]


def _count_matrices(weight: Weight, degrees: _Degrees) -> int:
    """Matrices of a weight that the ranks share which have the same experts."""
    return weight.shape[0] // degrees.ep if weight.is_of_experts else 1


def _numel(weight: Weight, degrees: _Degrees) -> float:
    """Parameters of a weight on a rank of tp or ep, as `parameter_groups` counts them."""
    return weight.numel / (degrees.ep if weight.is_of_experts else 1 if weight.split is None else degrees.tp)


@lru_cache(maxsize=1024)
def _matrix_s(scenario: Scenario, m: int, n: int, steps: int) -> float:
    """Seconds to iterate a matrix: XXᵀ and A² and the product with X, in bf16 on devices that have it."""
    if scenario.precision.compute == "float32" and not scenario.is_on_host:
        scenario = replace(scenario, precision=replace(scenario.precision, compute="bfloat16"))
    return steps * (matmul_s(scenario, m, m, n) + matmul_s(scenario, m, m, m) + matmul_s(scenario, m, n, m))


def _sent_size(scenario: Scenario) -> int:
    """Bytes of an element that is sent and iterated."""
    params = BYTES[scenario.precision.params]
    return params if params > BYTES["float32"] else BYTES["bfloat16"]
