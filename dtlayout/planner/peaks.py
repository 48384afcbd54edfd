"""Peaks: the least that many layouts need, from what they share, and what one of them needs exactly.

What a rank *holds* (activations, logits) depends on the microbatch, recomputation and the schedule; its *state*
(parameters, gradients, optimizer) on how data-parallel ranks share it. So h ways to hold and s ways to share cost h + s
evaluations. Their sum is a lower bound of the rank's need: the need itself where `costmodel.memory` adds components up
(distributed optimizer), and what is there at the end of a forward where it plays the step (fsdp2): of the fullest
forward, and of the fullest after which gradients of all stages wait for more. Pipeline ranks with the same blocks are
one group: of a group the first rank, which warms up longest, holds most.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache, partial
from math import inf
from typing import Any, NamedTuple

from dtlayout.costmodel import memory
from dtlayout.costmodel.cache_keys import BlockLayout, PipelineLayout, key_of
from dtlayout.costmodel.estimate import Estimator
from dtlayout.costmodel.fsdp2.sizes import Sizes
from dtlayout.costmodel.offload import state_on_host_bytes
from dtlayout.costmodel.rank_groups import Counts, RankGroup
from dtlayout.costmodel.scenario import Scenario, count_expert_shards, count_state_shards, tokens_of
from dtlayout.pipelining.timing import in_flight_peaks, weigh_moments
from dtlayout.schedules.actions import PASS_BACK, RELEASE
from dtlayout.spec.kernels import Kernels
from dtlayout.spec.layout import Layout
from dtlayout.spec.precision import BYTES
from dtlayout.spec.recompute import Recompute

Moments = set[tuple[float, float]]
"""At some moments of a step: blocks in flight that keep all, and blocks that are computed again."""


class InFlight(NamedTuple):
    """What a group of ranks has in flight when that is most."""

    group: RankGroup
    has_gradients: bool
    """Whether gradients of all its stages are there meanwhile."""
    moments: Moments


class RankSizes(NamedTuple):
    """Parameters of a rank."""

    num_parameters: float
    """Those of its stages."""
    largest_unit: float
    """Those of the largest FSDP unit."""
    num_of_experts: float = 0.0
    """Those of experts, a part of all."""


class BlockBytes(NamedTuple):
    """Bytes that one microbatch holds."""

    whole: float
    """Held in a block for its backward."""
    kept: float
    """Held in a block that is recomputed."""
    again: float
    """Added to `kept` while a block is recomputed, one block at a time."""
    logits: float
    """Logits and what the loss makes of them."""
    running: float = 0.0
    """Held in a block while it runs, where what it keeps goes to the host."""


class Peaks:
    """Peak bytes of many layouts of one scenario."""

    def __init__(self, estimator: Estimator):
        """`estimator` says how the model is cut; parts.py, [Note: results that are remembered]."""
        self.estimator = estimator
        self.scenario = estimator.scenario
        self._is_fsdp2 = self.scenario.engine.features.sharding == "fsdp2"
        kinds = self.scenario.kinds.values()
        self.block_bytes = cache(partial(_count_block_bytes, [(each, cache(partial(Sizes, each))) for each in kinds]))
        """Bytes that blocks and head hold of a microbatch, from a StageLayout and kernels."""
        self.sizes = cache(partial(_count_sizes, self.scenario))
        """Parameters of ranks with a group's `counts` at some tp and ep."""
        self.in_flight = cache(self._find_in_flight)
        """What each group of ranks of a PipelineLayout has in flight in a step of m microbatches."""
        # What weights' gradients are made of may be less than what the first part of a backward needs.
        self._in_flight_peaks = cache(partial(in_flight_peaks, until=PASS_BACK if self._is_fsdp2 else RELEASE))
        self.need = cache(self.exact)
        """`exact`, remembered."""

    def held_bytes(self, block: BlockBytes, in_flight: Iterable[InFlight]) -> Iterator[float]:
        """Least bytes that a group of ranks holds beside its state, for each of these."""
        for group, _, moments in in_flight:
            blocks = max([n * block.whole + covered * block.kept for n, covered in moments])
            again = block.again if group.recomputes else 0.0
            logits = block.logits if group.has_head and not (self._is_fsdp2 and len(group.classes) > 1) else 0.0
            yield blocks + (max(again, logits, block.running) if self._is_fsdp2 else again + logits)

    def state_bytes(self, way: Any, size: RankSizes, has_gradients: bool) -> float:
        """The least bytes of a rank's state, whatever it computes: `least_state_bytes` and what is there anyway."""
        return self.scenario.engine.constants.overhead_bytes + self.least_state_bytes(way, size, has_gradients)

    def _find_in_flight(self, pipeline: PipelineLayout, m: int) -> list[InFlight]:
        """A group that has its gradients when it holds most comes once; where it has them later, twice."""
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
        """The fullest rank's need, and its peak; no rank is looked at after one that needs more than allowed.

        What asks more of the host than it has needs more than there can be.
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
        """The least bytes that parameters take of a rank, whatever it computes.

        Under fsdp2 masters with the optimizer's state, what is computed with where it stays, and accumulated gradients.
        Infinite where the host has no room for its part.
        """
        n, unit, of_experts = size
        if not self._is_fsdp2:
            return sum(memory.state_bytes(self.scenario, layout, n, unit, of_experts).values())
        precision = self.scenario.precision
        params, compute, reduce = (BYTES[f] for f in (precision.params, precision.compute, precision.reduce))
        if layout.offloads_state:
            if state_on_host_bytes(self.scenario, layout, n) > self.estimator.host_capacity_bytes:
                return inf
            whole = (compute if layout.zero < 3 else 0.0) + (reduce if layout.zero == 1 and has_gradients else 0.0)
            return whole * n
        own = (n - of_experts) / count_state_shards(layout)
        own += of_experts / count_expert_shards(layout) if of_experts else 0.0
        gradients = reduce * n if layout.zero == 1 else min(reduce, params) * own
        state = (params + self.scenario.optimizer.state_bytes(params)) * own
        state += compute * n if layout.zero < 3 else 0.0
        return state + (gradients if has_gradients else 0.0)


def _count_sizes(scenario: Scenario, counts: Counts, tp: int, ep: int = 1) -> RankSizes:
    model, examples = scenario.model, [(each.example, count) for each, count in counts]
    n = sum([count * memory.count_stage_parameters(model, stage, tp, ep) for stage, count in examples])
    of_experts = sum([count * memory.count_stage_experts(model, stage, ep) for stage, count in examples])
    return RankSizes(n, memory.largest_unit(model, [stage for stage, _ in examples], tp, ep), of_experts)


SizesOf = Callable[[BlockLayout, Kernels], Sizes]


def _count_block_bytes(kinds: Sequence[tuple[Scenario, SizesOf]], layout: Layout, kernels: Kernels) -> BlockBytes:
    """Those of a block; where a model has different ones, none has less."""
    found = [_count_bytes_of_kind(scenario, size_of, layout, kernels) for scenario, size_of in kinds]
    return found[0] if len(found) == 1 else BlockBytes(*map(min, zip(*found, strict=True)))


def _count_bytes_of_kind(scenario: Scenario, size_of: SizesOf, layout: Layout, kernels: Kernels) -> BlockBytes:
    if scenario.engine.features.sharding != "fsdp2":
        tokens = tokens_of(scenario, layout)
        whole, kept = memory.block_bytes_per_token(scenario, layout, kernels)
        logits = memory.logit_bytes(scenario, layout)
        return BlockBytes(tokens * whole, tokens * kept, tokens * (whole - kept), logits)
    size, recompute = size_of(key_of(layout, BlockLayout), kernels), Recompute.parse(layout.recompute)
    kept = size.kept(recompute, recompute.every - 1) if recompute.every else size.block
    # A backward begins where most is in flight, with a block that is surely recomputed only if all are.
    again = size.recomputed(recompute, 0) if recompute.every == 1 else 0.0
    if layout.offloads_activations:  # nothing but what two blocks keep, of which one may be the last of a stage
        return BlockBytes(0.0, 0.0, again, size.loss, running=min(kept, size.block))
    return BlockBytes(size.block, kept, again, size.loss)
