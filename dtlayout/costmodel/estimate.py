"""Estimate: does a layout fit, how long is a step, and where does the time go.

`Estimator` holds a scenario and computes once what its layouts share, parts.py [Note: results that are remembered]. The
step ends with the pipeline rank that ends last, and is told as the busiest one spends it: its own work, the reduction
of gradients and the optimizer as far as nothing hides them, and waiting for the others.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from math import inf

from dtlayout.costmodel.cache_keys import BlockLayout, CutLayout, PipelineLayout, StageLayout, key_of
from dtlayout.costmodel.compute import BlockTimes, head_time
from dtlayout.costmodel.memory import (
    Components,
    RankMemory,
    count_stage_experts,
    count_stage_parameters,
    rank_estimator,
)
from dtlayout.costmodel.offload import (
    RankParameters,
    copied_s,
    copied_state_bytes,
    host_bytes,
    host_capacity_bytes,
    on_disk_s,
    state_on_disk_bytes,
)
from dtlayout.costmodel.parameter_groups import Apart, count_apart
from dtlayout.costmodel.rank_groups import Stages, group_stages
from dtlayout.costmodel.scenario import Scenario, cut
from dtlayout.costmodel.stage_work import BlocksWork, LayoutWork, StageWork, send_s
from dtlayout.costmodel.update import Update, find_update, update_times
from dtlayout.models.counting import count_model_flops_per_token
from dtlayout.pipelining.partition import StageSlice
from dtlayout.pipelining.timing import PipelineTime, time_pipeline, time_shared_pipeline
from dtlayout.schedules.fast_timing import StageTimes
from dtlayout.schedules.schedules import find_schedule
from dtlayout.spec.kernels import Kernels
from dtlayout.spec.layout import Layout

HOPELESS_SHARE = 1.25
"""Fraction of the capacity above which nobody should try a predicted peak on a GPU: well beyond the model's error, and
in between a try costs only the minute that it takes to run out of memory."""
_THRASH_RAMP = 0.05
"""Share of the memory over which an allocator that is short of it comes to its full cost."""


@dataclass(frozen=True)
class TimeEstimate(Components):
    """Seconds of a step by what the busiest rank spends them on; the total is the step."""

    compute: float
    """Forward and backward, each FLOP once."""
    recompute: float
    """Forward again in backward."""
    tp: float
    """Waiting for tensor and sequence parallelism."""
    pp: float
    """Sending and receiving between stages."""
    bubble: float
    """Waiting for other stages, also after its own end."""
    dp: float
    """Reducing gradients and gathering parameters."""
    optimizer: float
    """Updating parameters."""
    host: float
    """Waiting for the host to start kernels, or for copies to its memory and from there; and fixed time of a step."""


@dataclass(frozen=True)
class Estimate:
    """A layout's memory and step, as predicted."""

    layout: Layout
    kernels: Kernels
    stage_layers: tuple[int, ...]
    """Blocks of each stage, as the engine cuts them."""
    memory: RankMemory
    """Peak of each pipeline rank."""
    capacity_bytes: float
    """Bytes that the allocator of a GPU may hold."""
    time: TimeEstimate
    """Seconds of a step by component."""
    mfu: float
    """Model FLOPs utilization by the study's convention (arXiv:2311.05610), 0 to 1."""
    host_bytes: tuple[float, ...] = ()
    """The most that each pipeline rank has in its host's memory; empty without offload."""
    host_capacity_bytes: float = inf
    """Bytes of its host's memory that a rank may take."""
    knows_time: bool = True
    """Whether seconds may be said, and not only compared (`Scenario.knows_time`)."""
    disk_bytes: tuple[float, ...] = ()
    """Bytes that each pipeline rank has on its host's disk; empty where nothing lies there."""

    @property
    def busiest_rank(self) -> int:
        """The pipeline rank with the highest peak."""
        return self.memory.busiest_rank

    @property
    def peak_bytes(self) -> float:
        """The highest peak of any rank."""
        return self.memory.peak_bytes

    @property
    def needed_bytes(self) -> float:
        """Bytes that the fullest rank cannot run without."""
        return self.memory.needed_bytes

    @property
    def fits_host(self) -> bool:
        """Whether what every rank has on its host is within that one's capacity."""
        return max(self.host_bytes, default=0.0) <= self.host_capacity_bytes

    @property
    def fits(self) -> bool:
        """Whether what every rank needs is within the capacity, of the device and of the host."""
        return self.needed_bytes <= self.capacity_bytes and self.fits_host

    @property
    def step_time_s(self) -> float:
        """Seconds of a step."""
        return self.time.total


def stage_times(schedule: str, work: Sequence[StageWork], delay_s: float) -> StageTimes:
    """Seconds of a schedule's actions, from the work of each stage."""
    splits_backward = find_schedule(schedule).splits_backward
    return StageTimes(
        forward_s=tuple(w.forward_s for w in work),
        backward_s=tuple(w.backward_s for w in work),
        message_s=(delay_s,) * (len(work) - 1),
        backward_weight_s=tuple(w.weight_s for w in work) if splits_backward else (),
    )


def find_busiest(times: Mapping[int, TimeEstimate]) -> tuple[int, TimeEstimate]:
    """The busiest rank and its step: the one whose time without bubble is longest.

    Its bubble becomes the rest of the time until the last of these ranks ends, whichever that is. Which rank ends last
    tells little: they end within a message of each other, and one that has a block less waits that much longer.
    """
    rank = max(times, key=lambda each: times[each].total - times[each].bubble)
    others = times[rank].total - times[rank].bubble
    return rank, replace(times[rank], bubble=max(time.total for time in times.values()) - others)


def estimate(scenario: Scenario, layout: Layout, kernels: Kernels) -> Estimate:
    """The estimate of one layout; many of one scenario cost less through one `Estimator`."""
    return Estimator(scenario).estimate(layout, kernels)


class Estimator:
    """Estimates of many layouts of one scenario."""

    def __init__(self, scenario: Scenario):
        """`scenario` stays; what its layouts share is computed once."""
        self.scenario = scenario
        self.capacity_bytes, self.host_capacity_bytes = scenario.capacity_bytes, host_capacity_bytes(scenario)
        self._cut = cache(partial(cut, scenario))
        self._play, self._play_shared = cache(time_pipeline), cache(time_shared_pipeline)
        self.memory = cache(self._find_memory)
        """Peak of each pipeline rank, from a Layout and kernels."""
        self.groups = cache(self._find_groups)
        """The stages of a PipelineLayout, and its ranks in groups."""
        self.blocks = {kind: cache(BlockTimes(of_kind)) for kind, of_kind in scenario.kinds.items()}
        """A block of each kind, of one microbatch and without recomputation, from a BlockLayout and kernels."""
        self.head = cache(partial(head_time, scenario))
        """Head and loss of one microbatch, from a BlockLayout and kernels."""
        self._blocks_work = cache(partial(BlocksWork, scenario, self.blocks))
        self._without_loss = cache(lambda kernels: replace(kernels, loss=Kernels.loss))  # changes nothing in a block
        self.layout_work = cache(self._find_layout_work)
        """One microbatch on any stage, from a StageLayout and kernels."""

    def _find_layout_work(self, layout: StageLayout, kernels: Kernels) -> LayoutWork:
        blocks = self._blocks_work(layout, self._without_loss(kernels))
        return LayoutWork(blocks, self.head(key_of(layout, BlockLayout), kernels))

    def _find_groups(self, pipeline: PipelineLayout) -> Stages:
        return group_stages(self.stages(pipeline), pipeline, self.scenario.model.num_first)

    def _find_memory(self, layout: Layout, kernels: Kernels) -> RankMemory:
        fullest: Sequence[int] = ()
        if not self.scenario.engine.features.runs_ahead:  # the further, the fewer microbatches are in flight
            fullest = self.groups(PipelineLayout.of(layout)).list_fullest(layout.schedule)
        return RankMemory(rank_estimator(self.scenario, layout, kernels, self.stages(layout)), layout.pp, fullest)

    def estimate(self, layout: Layout, kernels: Kernels) -> Estimate:
        """Memory and time of a layout, legal for our trainer or not."""
        memory = self.memory(layout, kernels)
        time = self.time(layout, kernels, memory)
        stage_layers = tuple(len(stage.layers) for stage in self.stages(layout))
        mfu = self.mfu(time.total, layout.world_size)
        on_host = self.host_bytes(layout, kernels)
        return Estimate(
            layout, kernels, stage_layers, memory, self.capacity_bytes, time, mfu, on_host, self.host_capacity_bytes,
            self.scenario.knows_time, self.disk_bytes(layout),
        )  # fmt: skip

    def peak_reserved_bytes(self, layout: Layout, kernels: Kernels) -> int | None:
        """The most that PyTorch's allocator reserves on any rank: bytes in use, and free fragments too small to use.

        None on a CPU, and for engines that are not FSDP2's, whose fragments are not known.
        """
        engine = self.scenario.engine
        if self.scenario.is_on_host or engine.features.sharding != "fsdp2":
            return None
        features = replace(engine.features, reports_reserved=True)
        reporting = Estimator(replace(self.scenario, engine=replace(engine, features=features)))
        return round(reporting.memory(layout, kernels).peak_bytes)

    def host_bytes(self, layout: Layout, kernels: Kernels) -> tuple[float, ...]:
        """The most that each pipeline rank has in its host's memory; empty without offload."""
        if layout.offload == "none":
            return ()
        return host_bytes(self.scenario, layout, kernels, self.stages(layout), self._count_parameters(layout))

    def disk_bytes(self, layout: Layout) -> tuple[float, ...]:
        """Bytes that each pipeline rank has on its host's disk; empty where nothing lies there."""
        if not layout.has_state_on_disk:
            return ()
        parameters = self._count_parameters(layout)
        return tuple(state_on_disk_bytes(self.scenario, layout, *own) for own in parameters)

    def copied_state_bytes(self, layout: Layout) -> tuple[float, ...]:
        """Bytes of each pipeline rank's copy of its state, from which a checkpoint is written beside the training."""
        return tuple(copied_state_bytes(self.scenario, layout, *own) for own in self._count_parameters(layout))

    def on_disk_s(self, layout: Layout) -> float:
        """Seconds of a step in which a rank's disk reads and writes, hidden or not."""
        return on_disk_s(self.scenario, layout, self._count_parameters(layout))

    def copied_s(self, layout: Layout, kernels: Kernels) -> float:
        """Seconds of a step in which a rank's link to its host copies, hidden or not."""
        return copied_s(self.scenario, layout, kernels, self.stages(layout), self._count_parameters(layout))

    def _count_parameters(self, layout: Layout) -> list[RankParameters]:
        """Parameters of each pipeline rank."""
        stages, model = self.stages(layout), self.scenario.model
        return [
            RankParameters(
                sum(count_stage_parameters(model, chunk, layout.tp, layout.ep) for chunk in chunks),
                self._count_apart(chunks, layout),
                sum(count_stage_experts(model, chunk, layout.ep) for chunk in chunks),
            )
            for chunks in (layout.placement.take(stages, rank) for rank in range(layout.pp))
        ]

    def _count_apart(self, chunks: Sequence[StageSlice], layout: Layout) -> Apart:
        model, optimizer, precision = self.scenario.model, self.scenario.optimizer, self.scenario.precision
        counted = (count_apart(model, optimizer, chunk, layout.tp, layout.ep, precision) for chunk in chunks)
        return Apart.add((apart, 1) for apart in counted)

    def fits_host(self, layout: Layout, kernels: Kernels) -> bool:
        """`Estimate.fits_host`, without the rest."""
        return max(self.host_bytes(layout, kernels), default=0.0) <= self.host_capacity_bytes

    def mfu(self, step_time_s: float, num_gpus: int) -> float:
        """Model FLOPs of a step over what the GPUs could do at their peak meanwhile."""
        model, batch = self.scenario.model, self.scenario.batch
        flops = count_model_flops_per_token(model, batch.seq_len) * batch.num_tokens
        return flops / (step_time_s * num_gpus * self.scenario.cluster.gpu.peak_flops_per_s)

    def stages(self, layout: Layout | PipelineLayout) -> list[StageSlice]:
        """How the engine cuts the model for a layout."""
        return self._cut(key_of(layout, CutLayout))

    def work(self, layout: Layout, kernels: Kernels) -> list[StageWork]:
        """One microbatch on each stage."""
        work = self.layout_work(key_of(layout, StageLayout), kernels)
        return [work.on(stage) for stage in self.groups(PipelineLayout.of(layout)).classes]

    def time(self, layout: Layout, kernels: Kernels, memory: RankMemory) -> TimeEstimate:
        """The step of the busiest rank."""
        return find_busiest(self.rank_times(layout, kernels, memory))[1]

    def rank_times(self, layout: Layout, kernels: Kernels, memory: RankMemory) -> dict[int, TimeEstimate]:
        """Each pipeline rank → its step, until it has ended itself."""
        work = self.work(layout, kernels)
        m = max(1, layout.num_microbatches(self.scenario.batch))
        firsts = self._first_updates(layout, m, work)
        updates = {rank: update for ranks, update in firsts.items() for rank in ranks}
        delay_s = self.delay_s(layout)
        return self.rank_steps(layout, m, work, updates, delay_s=delay_s, peak_bytes=memory.peak_bytes)

    def rank_steps(
        self,
        layout: Layout,
        m: int,
        work: Sequence[StageWork],
        updates: Mapping[int, tuple[float, float]],
        *,
        delay_s: float,
        peak_bytes: float,
    ) -> dict[int, TimeEstimate]:
        """Each rank of `updates` → its step, whose bubble ends with the rank's own pipeline.

        `updates` has the ranks to look at, with the data-parallel and optimizer seconds of each that nothing hides.
        `work` has all stages. Where ranks share cores, all of a rank's own work is longer by what the others took
        meanwhile.
        """
        pipeline = self.play(layout, m, work, delay_s)
        fixed_s = self.fixed_s(m, peak_bytes)

        def split(rank: int, dp_s: float, optimizer_s: float) -> TimeEstimate:
            stages, busy_s = layout.placement.take(work, rank), pipeline.busy_s[rank]
            own, alone_s = StageWork.add(stages), m * sum(w.forward_s + w.backward_s for w in stages)
            times = m * max(1.0, busy_s / alone_s) if alone_s else m
            return TimeEstimate(
                compute=times * own.compute_s,
                recompute=times * own.recompute_s,
                tp=times * own.tp_s + own.unpaired_s,
                pp=times * own.pp_s,
                bubble=max(0.0, pipeline.finished_s[rank] - busy_s),
                dp=dp_s,
                optimizer=optimizer_s,
                host=times * own.host_s + fixed_s,
            )

        return {rank: split(rank, *update) for rank, update in updates.items()}

    def _first_updates(
        self, layout: Layout, m: int, work: Sequence[StageWork]
    ) -> dict[tuple[int, ...], tuple[float, float]]:
        """Ranks of each rank group → `update_s` of its first one, which is that of all."""
        groups = self.groups(PipelineLayout.of(layout)).groups
        return {group.ranks: self.update_s(group.ranks[0], layout, m, work) for group in groups}

    def lower_bound_s(self, layout: Layout, kernels: Kernels) -> float:
        """No step of this layout is shorter: all of the busiest rank's own work, reduction and update, and no bubble.

        It does without the pipeline's actions, which take longest to play.
        """
        work = self.work(layout, kernels)
        m = max(1, layout.num_microbatches(self.scenario.batch))

        def busy_s(rank: int) -> float:
            own = StageWork.add(layout.placement.take(work, rank))
            return m * (own.forward_s + own.backward_s) + own.unpaired_s

        firsts = self._first_updates(layout, m, work)
        return max(busy_s(ranks[0]) + sum(update) for ranks, update in firsts.items()) + self.fixed_s(m, peak_bytes=0.0)

    def update_s(self, rank: int, layout: Layout, m: int, work: Sequence[StageWork]) -> tuple[float, float]:
        """Exposed data-parallel communication and the optimizer of a pipeline rank, seconds."""
        own = StageWork.add(layout.placement.take(work, rank))
        num_layers = sum(len(chunk.layers) for chunk in layout.placement.take(self.stages(layout), rank))
        update = self.update(rank, layout)
        return update_times(self.scenario, layout, update, num_layers, m, own.forward_s, own.backward_s)

    def update(self, rank: int, layout: Layout) -> Update:
        """The end of a step on a pipeline rank, whatever hides it."""
        chunks = layout.placement.take(self.stages(layout), rank)
        model = self.scenario.model
        n = sum(count_stage_parameters(model, chunk, layout.tp, layout.ep) for chunk in chunks)
        of_experts = sum(count_stage_experts(model, chunk, layout.ep) for chunk in chunks)
        has_head = any(chunk.head for chunk in chunks)
        apart = self._count_apart(chunks, layout)
        return find_update(self.scenario, layout, n, has_head=has_head, of_experts=of_experts, apart=apart)

    def play(self, layout: Layout, m: int, work: Sequence[StageWork], delay_s: float) -> PipelineTime:
        """The pipeline of a step, from the work of each stage."""
        times = stage_times(layout.schedule, work, delay_s)
        at_once = self.scenario.cluster.ranks_at_once / (layout.world_size / layout.pp)
        order = (layout.schedule, layout.pp, layout.virtual_stages, m, times)
        return self._play_shared(*order, at_once) if at_once < layout.pp else self._play(*order)

    def delay_s(self, layout: Layout) -> float:
        """Seconds that a stage waits for a message beside its own work; blocking ones are part of the sender's."""
        return send_s(self.scenario, layout) if self.scenario.engine.features.overlap_pp else 0.0

    def fixed_s(self, m: int, peak_bytes: float) -> float:
        """Seconds of a step of m microbatches beside its work: fixed time, and an allocator short of memory."""
        constants = self.scenario.engine.constants
        share = peak_bytes / self.scenario.cluster.gpu.memory_bytes
        shortage = min(1.0, max(0.0, (share - constants.thrash_share) / _THRASH_RAMP))
        return self.scenario.cluster.contention * constants.step_host_s + shortage * constants.thrash_s * m
