"""Peaks: lower bounds of the memory of many layouts, from what they share, and the exact memory of one layout.

The bytes that a rank *holds* for its microbatches (activations, logits) depend on the microbatch, recomputation and the
schedule. The bytes of its *state* (parameters, gradients, optimizer) depend on how data-parallel ranks share it. So h
ways to hold and s ways to share take h + s evaluations instead of h · s.

The sum of both is a lower bound of what the rank needs. For engines with a distributed optimizer it is exact, since
`costmodel.memory` adds components up there. For fsdp2, where `costmodel.memory` plays the step, the sum is taken at the
end of two forwards: the fullest, and the fullest of those after which all stages have gradients to add to.

Pipeline ranks with the same blocks are one rank group. Its first rank warms up longest, so it holds most.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache, partial
from math import inf
from typing import Any, NamedTuple

from dtlayout.costmodel import memory
from dtlayout.costmodel.cache_keys import BlockLayout, PipelineLayout, key_of
from dtlayout.costmodel.estimate import Estimator
from dtlayout.costmodel.forward_only import find_first_differentiated, has_forward_only
from dtlayout.costmodel.fsdp2.sizes import Sizes
from dtlayout.costmodel.offload import state_on_host_bytes
from dtlayout.costmodel.parameter_groups import NONE_APART, Apart, count_apart, list_trained
from dtlayout.costmodel.rank_groups import Counts, RankGroup
from dtlayout.costmodel.scenario import (
    Scenario,
    count_state_shards,
    leaves_frozen_whole,
    saved_by_casts,
    tokens_of,
)
from dtlayout.pipelining.timing import in_flight_peaks, weigh_moments
from dtlayout.schedules.actions import PASS_BACK, RELEASE
from dtlayout.spec.kernels import Kernels
from dtlayout.spec.layout import Layout
from dtlayout.spec.precision import BYTES
from dtlayout.spec.recompute import Recompute

Moments = set[tuple[float, float]]
"""Some moments of a step, each as two numbers of blocks in flight: without recomputation, and with."""


class InFlight(NamedTuple):
    """The moments at which a rank group may have most blocks in flight."""

    group: RankGroup
    has_gradients: bool
    """Whether gradients of all its stages exist at these moments."""
    moments: Moments


class RankSizes(NamedTuple):
    """Numbers of parameters of a rank, after tp and ep."""

    num_parameters: float
    """Parameters of all its stages."""
    largest_unit: float
    """Parameters of its largest FSDP unit."""
    num_of_experts: float = 0.0
    """Parameters of experts among `num_parameters`."""
    apart: Apart = NONE_APART
    """Parameters among `num_parameters` that the scenario's own optimizer does not update."""


class BlockBytes(NamedTuple):
    """Bytes that one microbatch holds in a block and in the head."""

    saved: float
    """Bytes held for the backward of a block without recomputation."""
    kept: float
    """Bytes held for the backward of a recomputed block."""
    recomputed: float
    """Bytes added to `kept` while a block is recomputed, one block at a time."""
    logits: float
    """Bytes of the logits and of tensors that the loss makes of them."""
    running: float = 0.0
    """Bytes held in a block while it runs, if activations are offloaded to the host; else 0."""


class Peaks:
    """Lower bounds and exact peaks of many layouts of one scenario, in bytes."""

    def __init__(self, estimator: Estimator):
        """`estimator` says how the model is cut; costmodel/cache_keys.py, [Note: results that are remembered]."""
        self.estimator = estimator
        self.scenario = estimator.scenario
        self._is_fsdp2 = self.scenario.engine.features.sharding == "fsdp2"
        kinds = self.scenario.kinds.values()
        self.block_bytes = cache(partial(_count_block_bytes, [(each, cache(partial(Sizes, each))) for each in kinds]))
        """BlockBytes of a StageLayout and kernels; the least of each if the model's blocks differ."""
        self.sizes = cache(partial(_count_sizes, self.scenario))
        """RankSizes of a rank group, from its `counts`, tp and ep."""
        self.in_flight = cache(self._find_in_flight)
        """InFlight of the rank groups of a PipelineLayout, in a step of m microbatches."""
        # What weights' gradients are made of may be less than what the first part of a backward needs.
        self._in_flight_peaks = cache(partial(in_flight_peaks, until=PASS_BACK if self._is_fsdp2 else RELEASE))
        self.need = cache(self.exact)
        """`exact`, remembered."""

    def held_bytes(self, block: BlockBytes, in_flight: Iterable[InFlight]) -> Iterator[float]:
        """Least bytes that a rank holds beside its state, for each InFlight."""
        for group, _, moments in in_flight:
            blocks = max([n * block.saved + covered * block.kept for n, covered in moments])
            again = block.recomputed if group.recomputes else 0.0
            logits = block.logits if group.has_head and not (self._is_fsdp2 and len(group.classes) > 1) else 0.0
            yield blocks + (max(again, logits, block.running) if self._is_fsdp2 else again + logits)

    def state_bytes(self, way: Any, size: RankSizes, has_gradients: bool) -> float:
        """`least_state_bytes` and the engine's constant overhead; `way` is a StateLayout."""
        return self.scenario.engine.constants.overhead_bytes + self.least_state_bytes(way, size, has_gradients)

    def _find_in_flight(self, pipeline: PipelineLayout, m: int) -> list[InFlight]:
        """Each rank group once; twice if its gradients come only after it has held most."""
        found = []
        for group in self.estimator.groups(pipeline).groups:
            whole, covered = [c[0] - c[1] for c in group.classes], [c[1] for c in group.classes]
            step = pipeline.schedule, pipeline.pp, pipeline.virtual_stages, m, group.ranks[0]
            peaks = {False: self._in_flight_peaks(*step)}
            if self._is_fsdp2 and (later := self._in_flight_peaks(*step, with_gradients=True)):
                peaks = {True: later} if later == peaks[False] else peaks | {True: later}
            for has_gradients, each in peaks.items():
                moments = set(zip(weigh_moments(each, whole), weigh_moments(each, covered), strict=True))
                found.append(InFlight(group, has_gradients, moments))
        return found

    def exact(self, layout: Layout, kernels: Kernels, allowed_bytes: float = inf) -> tuple[float, float]:
        """Bytes that the fullest rank needs, and its peak; both infinite if the host's memory is too small.

        Once a rank needs more than `allowed_bytes`, the other ranks are not looked at.
        """
        if layout.offload != "none" and not self.estimator.fits_host(layout, kernels):
            return inf, inf
        needed = peak = 0.0
        for rank in self.estimator.memory(layout, kernels).may_be_fullest:
            needed, peak = max(needed, rank.needed), max(peak, rank.total)
            if needed > allowed_bytes:
                break
        return needed, peak

    def least_state_bytes(self, layout: Layout, size: RankSizes, has_gradients: bool) -> float:
        """The least bytes of a rank's parameters, gradients and optimizer state, whatever it computes.

        For fsdp2: master weights with the optimizer's state, copies to compute with where they are not freed after use,
        and accumulated gradients. Infinite if the host has no room for the part that lies there.
        """
        n, unit, of_experts, apart = size
        if not self._is_fsdp2:
            return sum(memory.state_bytes(self.scenario, layout, n, unit, of_experts, apart).values())
        trained, frozen = n - apart.frozen.total, apart.stored
        precision, is_whole = self.scenario.precision, leaves_frozen_whole(self.scenario, layout)
        params, compute, reduce = (BYTES[f] for f in (precision.params, precision.compute, precision.reduce))
        lies_there = self.scenario.engine.features.computes_in_place and count_state_shards(layout) == 1
        copied = trained if is_whole else trained + frozen
        if lies_there and not layout.offloads_state:  # frozen ones are not cast
            copied = trained if params != compute else 0.0
        gathered = compute * copied - saved_by_casts(self.scenario) * apart.scaled
        gathered = gathered if layout.zero < 3 else 0.0
        if layout.offloads_state:
            if state_on_host_bytes(self.scenario, layout, n, apart, of_experts) > self.estimator.host_capacity_bytes:
                return inf
            gathered += compute * frozen if is_whole else 0.0
            return gathered + (reduce * trained if layout.zero == 1 and has_gradients else 0.0)
        groups = list_trained(self.scenario.optimizer, n, of_experts, apart)
        shards = [(optimizer, own.shard(layout)) for optimizer, own in groups]
        gradients = reduce * trained if layout.zero == 1 else min(reduce, params) * sum([own for _, own in shards])
        state = sum([(params + optimizer.state_bytes(params)) * own for optimizer, own in shards])
        held = frozen if is_whole else apart.frozen.shard(layout) - apart.spared / count_state_shards(layout)
        state += compute * held
        return state + gathered + (gradients if has_gradients else 0.0)


def _count_sizes(scenario: Scenario, counts: Counts, tp: int, ep: int = 1) -> RankSizes:
    model, examples = scenario.model, [(each.example, count) for each, count in counts]
    n = sum([count * memory.count_stage_parameters(model, stage, tp, ep) for stage, count in examples])
    of_experts = sum([count * memory.count_stage_experts(model, stage, ep) for stage, count in examples])
    optimizer, precision = scenario.optimizer, scenario.precision
    apart = Apart.add([(count_apart(model, optimizer, each, tp, ep, precision), number) for each, number in examples])
    return RankSizes(n, memory.largest_unit(model, [stage for stage, _ in examples], tp, ep), of_experts, apart)


SizesOf = Callable[[BlockLayout, Kernels], Sizes]


def _count_block_bytes(kinds: Sequence[tuple[Scenario, SizesOf]], layout: Layout, kernels: Kernels) -> BlockBytes:
    """`Peaks.block_bytes`, from the scenario and the sizes of each kind of block."""
    found = [_count_bytes_of_kind(scenario, size_of, layout, kernels) for scenario, size_of in kinds]
    if (first := find_first_differentiated(kinds[0][0].model)) is not None:  # whose input needs no gradient
        of_first = kinds[0][0].kinds[kinds[0][0].model.kind_of(first)]
        found.append(_count_bytes_of_kind(of_first, partial(Sizes, of_first, ends_gradients=True), layout, kernels))
    if has_forward_only(kinds[0][0].model):
        found.append(BlockBytes(0.0, 0.0, 0.0, found[0].logits))
    return found[0] if len(found) == 1 else BlockBytes(*map(min, zip(*found, strict=True)))


def _count_bytes_of_kind(scenario: Scenario, size_of: SizesOf, layout: Layout, kernels: Kernels) -> BlockBytes:
    if scenario.engine.features.sharding != "fsdp2":
        tokens = tokens_of(scenario, layout)
        block = memory.block_bytes_per_token(scenario, layout, kernels)
        logits = memory.logit_bytes(scenario, layout)
        return BlockBytes(tokens * block.whole, tokens * block.kept, tokens * block.again, logits)
    size, recompute = size_of(key_of(layout, BlockLayout), kernels), Recompute.parse(layout.recompute)
    kept = size.kept(recompute, recompute.every - 1) if recompute.every else size.block
    # A backward begins where most is in flight, with a block that is surely recomputed only if all are.
    again = size.recomputed(recompute, 0) if recompute.every == 1 else 0.0
    if layout.offloads_activations:  # nothing but what two blocks keep, of which one may be the last of a stage
        return BlockBytes(0.0, 0.0, again, size.loss, running=min(kept, size.block))
    return BlockBytes(size.block, kept, again, size.loss)
