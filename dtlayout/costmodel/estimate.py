"""Estimate: does a layout fit, how long is a step, and where does the time go.

`Estimator` holds a scenario and remembers what layouts share: a block's time depends on tp, micro-batch and kernels,
stages on their number. The step is that of the pipeline rank that ends last: its own work, the pipeline's bubble, then
the reduction of gradients and the optimizer as far as nothing hides them.
"""

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from dtlayout.costmodel.comm import message_s
from dtlayout.costmodel.compute import BlockTime, block_time, head_time, recompute_time
from dtlayout.costmodel.memory import (
    MemoryEstimate,
    activation_size,
    count_stage_parameters,
    estimate_memory,
    tokens_of,
)
from dtlayout.costmodel.scenario import Scenario, cut
from dtlayout.costmodel.update import update_times
from dtlayout.kernels import Kernels
from dtlayout.layout import Layout
from dtlayout.models.counting import count_model_flops_per_token
from dtlayout.pipelining.partition import StageSlice
from dtlayout.pipelining.schedules import find_schedule
from dtlayout.pipelining.sharing import time_shared_pipeline
from dtlayout.pipelining.timing import PipelineTime, time_pipeline
from dtlayout.pipelining.waves import StageTimes
from dtlayout.recompute import Recompute

T = TypeVar("T")

HOPELESS_SHARE = 1.25
"""Of the capacity, above which nobody should try a predicted peak on a GPU: well beyond the model's error, and in
between a try costs only the minute that it takes to run out of memory."""
_THRASH_RAMP = 0.05
"""Share of the memory over which an allocator that is short of it comes to its full cost."""


@dataclass(frozen=True)
class TimeEstimate:
    """Seconds of a step on the rank that ends last, by what it is spent on; they add up to the step."""

    compute: float
    """Forward and backward, each FLOP once."""
    recompute: float
    """Forward again in backward."""
    tp: float
    """Waiting for tensor and sequence parallelism."""
    pp: float
    """Sending and receiving between stages."""
    bubble: float
    """Waiting for other stages."""
    dp: float
    """Reducing gradients and gathering parameters."""
    optimizer: float
    """Updating parameters."""
    host: float
    """Waiting for the host to start kernels, and fixed time of a step."""

    @property
    def total(self) -> float:
        """The step."""
        return sum(vars(self).values())

    def as_dict(self) -> dict[str, float]:
        """What it is spent on → seconds."""
        return dict(vars(self))


@dataclass(frozen=True)
class Estimate:
    """What a layout needs and what it reaches."""

    layout: Layout
    """The layout."""
    kernels: Kernels
    """The kernels."""
    stage_layers: tuple[int, ...]
    """Blocks of each stage, as the engine cuts them."""
    memory: tuple[MemoryEstimate, ...]
    """Of each pipeline rank."""
    capacity_bytes: float
    """What the allocator of a GPU may hold."""
    time: TimeEstimate
    """Of a step."""
    mfu: float
    """By the study's convention, arXiv:2311.05610."""

    @property
    def busiest_rank(self) -> int:
        """The pipeline rank with the highest peak."""
        return max(range(len(self.memory)), key=lambda rank: self.memory[rank].total)

    @property
    def peak_bytes(self) -> float:
        """The highest peak of any rank."""
        return self.memory[self.busiest_rank].total

    @property
    def fits(self) -> bool:
        """Whether what every rank needs is within the capacity."""
        return max(rank.needed for rank in self.memory) <= self.capacity_bytes

    @property
    def step_time_s(self) -> float:
        """Seconds of a step."""
        return self.time.total


def estimate(scenario: Scenario, layout: Layout, kernels: Kernels) -> Estimate:
    """The estimate of one layout; many of one scenario cost less through one `Estimator`."""
    return Estimator(scenario).estimate(layout, kernels)


class Estimator:
    """Estimates of many layouts of one scenario."""

    def __init__(self, scenario: Scenario):
        """`scenario` stays; what its layouts share is computed once."""
        self.scenario = scenario
        constants, gpu = scenario.engine.constants, scenario.cluster.gpu
        self.capacity_bytes = gpu.memory_bytes - constants.context_bytes
        self._known: dict[Hashable, Any] = {}

    def estimate(self, layout: Layout, kernels: Kernels) -> Estimate:
        """Memory and time of a layout, legal for our trainer or not."""
        memory = self.memory(layout, kernels)
        time = self.time(layout, kernels, memory)
        return Estimate(
            layout=layout,
            kernels=kernels,
            stage_layers=tuple(len(stage.layers) for stage in self.stages(layout)),
            memory=memory,
            capacity_bytes=self.capacity_bytes,
            time=time,
            mfu=self.mfu(time.total, layout.world_size),
        )

    def mfu(self, step_time_s: float, num_gpus: int) -> float:
        """Model FLOPs of a step over what the GPUs could do at their peak meanwhile."""
        model, batch = self.scenario.model, self.scenario.batch
        flops = count_model_flops_per_token(model, batch.seq_len) * batch.num_tokens
        return flops / (step_time_s * num_gpus * self.scenario.cluster.gpu.peak_flops_per_s)

    def stages(self, layout: Layout) -> list[StageSlice]:
        """How the engine cuts the model for a layout."""
        key = ("stages", layout.num_stages, layout.stage_layers)
        return self._remember(key, lambda: cut(self.scenario, layout))

    def memory(self, layout: Layout, kernels: Kernels) -> tuple[MemoryEstimate, ...]:
        """Peak of each pipeline rank."""
        key = ("memory", layout, kernels)
        return self._remember(key, lambda: estimate_memory(self.scenario, layout, kernels, self.stages(layout)))

    def time(self, layout: Layout, kernels: Kernels, memory: Sequence[MemoryEstimate]) -> TimeEstimate:
        """The step of the rank that ends last."""
        work = [self.stage_work(stage, layout, kernels) for stage in self.stages(layout)]
        m = max(1, layout.num_microbatches(self.scenario.batch))
        updates = {rank: self.update_s(rank, layout, m, work) for rank in range(layout.pp)}
        peak_bytes = max(rank.total for rank in memory)
        return self.step(layout, m, work, updates, delay_s=self.delay_s(layout), peak_bytes=peak_bytes)

    def step(
        self,
        layout: Layout,
        m: int,
        work: Sequence["StageWork"],
        updates: Mapping[int, tuple[float, float]],
        *,
        delay_s: float,
        peak_bytes: float,
    ) -> TimeEstimate:
        """The step of the rank that ends last, of those whose `update_s` is given; `work` is that of all stages."""
        pipeline = self.play(layout, m, work, delay_s)
        fixed_s = self.fixed_s(m, peak_bytes)
        ranks = [
            _split_time(rank, layout.placement.take(work, rank), m, pipeline, *update, fixed_s)
            for rank, update in updates.items()
        ]
        return max(ranks, key=lambda time: time.total)

    def lower_bound_s(self, layout: Layout, kernels: Kernels) -> float:
        """No step of this layout is shorter: the busiest rank's own work, without bubble, reduction and update."""
        work = [self.stage_work(stage, layout, kernels) for stage in self.stages(layout)]
        m = max(1, layout.num_microbatches(self.scenario.batch))
        ranks = (layout.placement.take(work, rank) for rank in range(layout.pp))
        return m * max(sum(w.forward_s + w.backward_s for w in own) for own in ranks)

    def stage_work(self, stage: StageSlice, layout: Layout, kernels: Kernels) -> "StageWork":
        """One microbatch on one stage."""
        key = (
            "work", stage.layers, stage.embedding, stage.head, layout.pp, layout.dp, layout.cp, layout.tp,
            layout.shards_sequence, layout.micro_batch, layout.recompute, kernels,
        )  # fmt: skip
        return self._remember(key, lambda: self._stage_work(stage, layout, kernels))

    def update_s(self, rank: int, layout: Layout, m: int, work: Sequence["StageWork"]) -> tuple[float, float]:
        """Exposed data-parallel communication and the optimizer of a pipeline rank, seconds."""
        chunks, own = layout.placement.take(self.stages(layout), rank), layout.placement.take(work, rank)
        n = sum(count_stage_parameters(self.scenario.model, chunk, layout.tp) for chunk in chunks)
        forward_s, backward_s = sum(w.forward_s for w in own), sum(w.backward_s for w in own)
        num_layers = sum(len(chunk.layers) for chunk in chunks)
        return update_times(self.scenario, layout, n, num_layers, m, forward_s, backward_s)

    def _stage_work(self, stage: StageSlice, layout: Layout, kernels: Kernels) -> "StageWork":
        block = self.block(layout, kernels)
        recompute = Recompute.parse(layout.recompute)
        covered, num_layers = sum(recompute.covers(layer) for layer in stage.layers), len(stage.layers)
        again_s, again_tp_s = (covered * each for each in recompute_time(self.scenario, layout, kernels, block))
        forward_s, backward_s = num_layers * block.forward_s, num_layers * block.backward_s
        forward_tp_s, backward_tp_s = num_layers * block.forward_tp_s, num_layers * block.backward_tp_s + again_tp_s
        host_forward_s, host_backward_s = self._host_s(stage, layout, block, recompute)
        if not self.scenario.is_on_host:  # the host works ahead, and is waited for where it needs longer
            gpu_s = forward_s + backward_s + forward_tp_s + backward_tp_s + again_s
            waited = max(0.0, 1 - gpu_s / max(gpu_s, host_forward_s + host_backward_s, 1e-30))
            host_forward_s, host_backward_s = waited * host_forward_s, waited * host_backward_s
        if stage.head:
            head = self.head(layout, kernels)
            forward_s, backward_s = forward_s + head.forward_s, backward_s + head.backward_s
            forward_tp_s, backward_tp_s = forward_tp_s + head.forward_tp_s, backward_tp_s + head.backward_tp_s
        send_s = self._message_s(layout) if self.scenario.engine.habits.blocking_messages else 0.0
        send_forward_s = 0.0 if stage.head else send_s
        send_backward_s = 0.0 if stage.embedding else send_s
        return StageWork(
            compute_s=forward_s + backward_s,
            recompute_s=again_s,
            tp_s=forward_tp_s + backward_tp_s,
            pp_s=send_forward_s + send_backward_s,
            host_s=host_forward_s + host_backward_s,
            forward_s=forward_s + forward_tp_s + host_forward_s + send_forward_s,
            backward_s=backward_s + backward_tp_s + again_s + host_backward_s + send_backward_s,
            weight_s=num_layers * (block.forward_s - block.attention_s - block.elementwise_s),
        )

    def _host_s(self, stage: StageSlice, layout: Layout, block: BlockTime, recompute: Recompute) -> tuple[float, float]:
        """The host's time for one microbatch on a stage, forward and backward.

        Backward has twice the operations of forward, beside those that it does again. On a GPU only blocks count: the
        head's long kernels leave the host time enough.
        """
        constants, is_tp = self.scenario.engine.constants, layout.tp > 1
        both_s, messages_s = len(stage.layers) * block.host_s, 0.0
        if self.scenario.is_on_host:
            both_s += (stage.head + stage.embedding) / 2 * constants.head_host_s
            messages_s = ((not stage.head) + (not stage.embedding)) * constants.message_host_s  # one sent, one received
        if recompute.is_selective:
            again_s = constants.selective_host_tp_s if is_tp else constants.selective_host_s
        else:
            again_s = constants.full_host_tp_s if is_tp else constants.full_host_s
        covered = sum(recompute.covers(layer) for layer in stage.layers)
        return both_s / 3 + messages_s, both_s * 2 / 3 + messages_s + covered * again_s

    def play(self, layout: Layout, m: int, work: Sequence["StageWork"], delay_s: float) -> PipelineTime:
        """The pipeline of a step, from the work of each stage."""
        splits_backward = find_schedule(layout.schedule).splits_backward
        times = StageTimes(
            forward_s=tuple(w.forward_s for w in work),
            backward_s=tuple(w.backward_s for w in work),
            message_s=(delay_s,) * (len(work) - 1),
            backward_weight_s=tuple(w.weight_s for w in work) if splits_backward else (),
        )
        at_once = self.scenario.cluster.ranks_at_once / (layout.world_size / layout.pp)
        key = ("play", layout.schedule, layout.pp, layout.virtual_stages, m, times, at_once < layout.pp)
        order = (layout.schedule, layout.pp, layout.virtual_stages, m, times)
        if at_once < layout.pp:
            return self._remember(key, lambda: time_shared_pipeline(*order, at_once))
        return self._remember(key, lambda: time_pipeline(*order))

    def delay_s(self, layout: Layout) -> float:
        """What a stage waits for a message beside its own work; blocking ones are part of the sender's."""
        return 0.0 if self.scenario.engine.habits.blocking_messages else self._message_s(layout)

    def fixed_s(self, m: int, peak_bytes: float) -> float:
        """What a step of m microbatches takes beside its work: fixed time, and an allocator short of memory."""
        constants = self.scenario.engine.constants
        share = peak_bytes / self.scenario.cluster.gpu.memory_bytes
        shortage = min(1.0, max(0.0, (share - constants.thrash_share) / _THRASH_RAMP))
        return self.scenario.cluster.crowding * constants.step_host_s + shortage * constants.thrash_s * m

    def _message_s(self, layout: Layout) -> float:
        habits = self.scenario.engine.habits
        split = layout.tp if layout.shards_sequence or habits.scatters_messages else 1
        size = tokens_of(self.scenario, layout) * self.scenario.model.hidden_size * activation_size(self.scenario)
        return message_s(self.scenario, layout, size / split)

    def block(self, layout: Layout, kernels: Kernels) -> BlockTime:
        """A block of one microbatch, without recomputation."""
        crosses = layout.pp > 1 and layout.world_size > self.scenario.cluster.gpus_per_node
        nodes = layout.world_size if layout.cp > 1 else 1  # cp's ring may cross them
        key = ("block", nodes, layout.tp, layout.cp, layout.shards_sequence, layout.micro_batch, kernels, crosses)
        return self._remember(key, lambda: block_time(self.scenario, layout, kernels))

    def head(self, layout: Layout, kernels: Kernels) -> BlockTime:
        """Head and loss of one microbatch."""
        key = ("head", layout.tp, layout.cp, layout.micro_batch, kernels.loss)
        return self._remember(key, lambda: head_time(self.scenario, layout, kernels))

    def _remember(self, key: Hashable, compute: Callable[[], T]) -> T:
        if key not in self._known:
            self._known[key] = compute()
        found: T = self._known[key]
        return found


@dataclass(frozen=True)
class StageWork:
    """Seconds of one microbatch on one stage, by what they are spent on and by direction."""

    compute_s: float
    """Forward and backward, each FLOP once."""
    recompute_s: float
    """Forward again."""
    tp_s: float
    """Waiting for tp."""
    pp_s: float
    """Waiting for a message to have gone, where that blocks."""
    host_s: float
    """Waiting for the host."""
    forward_s: float
    """All of forward."""
    backward_s: float
    """All of backward."""
    weight_s: float = 0.0
    """Of backward, gradients of the blocks' weights: each matmul of forward once more; the head's are left out."""


def _split_time(
    rank: int,
    work: Sequence[StageWork],
    m: int,
    pipeline: PipelineTime,
    dp_s: float,
    optimizer_s: float,
    fixed_s: float,
) -> TimeEstimate:
    """A pipeline rank's step by what it is spent on; the bubble is what is left of the pipeline's time.

    Where ranks share cores all of its own work is longer by what the others took meanwhile.
    """
    alone_s = m * sum(w.forward_s + w.backward_s for w in work)
    longer = max(1.0, pipeline.busy_s[rank] / alone_s) if alone_s else 1.0

    def total(part: Callable[[StageWork], float]) -> float:
        return longer * m * sum(part(w) for w in work)

    return TimeEstimate(
        compute=total(lambda w: w.compute_s),
        recompute=total(lambda w: w.recompute_s),
        tp=total(lambda w: w.tp_s),
        pp=total(lambda w: w.pp_s),
        bubble=max(0.0, pipeline.finished_s[rank] - pipeline.busy_s[rank]),
        dp=dp_s,
        optimizer=optimizer_s,
        host=total(lambda w: w.host_s) + fixed_s,
    )
