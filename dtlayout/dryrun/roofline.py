"""A second estimate of the step, from dry runs: a time for each operator and message by the cluster's constants.

It shares with the cost model the constants and the playing of the pipeline. Work, traffic and messages come from the
dry runs, where the cost model has formulas. Stages that nobody ran are taken to be like the first one with blocks,
block by block. No torch.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import prod

from dtlayout.costmodel.attention import attention_s
from dtlayout.costmodel.comm import all_reduce_s, data_link, exchange_s, half_all_reduce_s, message_s, tp_link
from dtlayout.costmodel.compute import block_tp_s, host_s, operation_s
from dtlayout.costmodel.context import block_cp_s
from dtlayout.costmodel.estimate import Estimator, TimeEstimate, find_busiest
from dtlayout.costmodel.scenario import Scenario
from dtlayout.costmodel.stage_work import StageWork, split_host_s, wait_for_host
from dtlayout.costmodel.update import hidden_share
from dtlayout.dryrun.report import Done, Message, RankReport
from dtlayout.mesh.axes import (
    AXES,
    CP,
    EP,
    EXPERT_COPIES,
    EXPERT_SHARDS,
    PP,
    TP,
    axis_sizes,
    axis_strides,
    expert_sizes,
)
from dtlayout.models.description import EMBEDDING
from dtlayout.models.families import describe
from dtlayout.models.operations import ATTENDED, Linear
from dtlayout.schedules.actions import Action, Kind
from dtlayout.spec.kernels import Kernels
from dtlayout.spec.layout import Layout


def roofline_time(
    scenario: Scenario, layout: Layout, kernels: Kernels, reports: Sequence[RankReport]
) -> TimeEstimate | None:
    """Time of the step on the busiest of the ranks that were run.

    None unless both ends of the pipeline and some block were run. None with offload, since operators do not tell what
    hides its copies.
    """
    if layout.offload != "none":
        return None
    by_pp_rank = {report.coordinate[PP]: report for report in reports}
    placement = layout.placement
    if not {placement.rank_of(0), placement.rank_of(layout.num_stages - 1)} <= by_pp_rank.keys():
        return None
    estimator, m = Estimator(scenario), layout.num_microbatches(scenario.batch)
    ranks = {rank: _Rank(scenario, layout, kernels, report) for rank, report in by_pp_rank.items()}
    contention = scenario.cluster.contention
    layers = [len(stage.layers) for stage in estimator.stages(layout)]
    known = {stage: seconds for rank in ranks.values() for stage, seconds in rank.stages.items()}
    example = next((stage for stage in sorted(known) if layers[stage]), None)
    if example is None:
        return None
    # Seconds of a block, without the embedding.
    blocks = {key: seconds / layers[example] for key, seconds in known[example].items() if not key[1]}
    work = [
        _to_work(
            known[i] if i in known else {key: count * s for key, s in blocks.items()},
            count * host_s(scenario, layout, kernels),
            is_on_host=scenario.is_on_host,
        )
        for i, count in enumerate(layers)
    ]
    steps = estimator.rank_steps(
        layout, m, work,
        {rank: (contention * own.dp_s, contention * own.optimizer_s) for rank, own in ranks.items()},
        delay_s=max(rank.message_s for rank in ranks.values()),
        peak_bytes=max(report.peak_bytes for report in reports) + scenario.engine.constants.overhead_bytes,
    )  # fmt: skip
    return find_busiest(steps)[1]


_Seconds = defaultdict[tuple[str, bool, Kind], float]
"""(purpose: compute, recompute or tp; whether of the embedding; kind of action) → seconds of one microbatch."""
_BETWEEN_STAGES = ("send", "recv")


class _Rank:
    """Seconds of one rank, by stage and purpose."""

    def __init__(self, scenario: Scenario, layout: Layout, kernels: Kernels, report: RankReport):
        self.scenario, self.layout, self.kernels = scenario, layout, kernels
        linears = [each for each in describe(scenario.model).block if isinstance(each, Linear)]
        self.attentions = tuple(f".{each.module.rpartition('.')[0]}" for each in linears if each.reads == ATTENDED)
        """Ends of the names of modules in which cp's ranks attend to each other; other messages over cp carry
        parameters and gradients."""
        self.stages: defaultdict[int, _Seconds] = defaultdict(lambda: defaultdict(float))
        """Stage → seconds of one microbatch, on average."""
        self.dp_s = self.optimizer_s = self.message_s = 0.0
        alone = replace(layout, tp_overlap=False)
        self.tp_exposed = sum(block_tp_s(scenario, layout)) / (sum(block_tp_s(scenario, alone)) or 1.0)
        """Share of tp's messages that matmuls do not hide, as the cost model says."""
        hidden_by = attention_s(scenario, layout, kernels)
        self.ring_exposed = sum(block_cp_s(scenario, layout, *hidden_by)) / (
            sum(block_cp_s(scenario, layout, 0.0, 0.0)) or 1.0
        )
        """Share of the messages of cp's ring that attention does not hide, as the cost model says."""
        computing, sending = defaultdict[Action, float](float), defaultdict[Action, float](float)
        m = report.num_microbatches
        for done in report.done:
            spent, seconds = self._place_seconds(done)
            action = done.place.action
            repeats = report.repeats(action)
            if action is None and isinstance(done.what, Message):
                # Of two stages that exchange a tied gradient, each waits for the gradient of the other.
                self.dp_s += 0.0 if done.what.name == "send" else seconds
            elif action is None:
                self.optimizer_s += seconds
            elif spent == PP:
                self.message_s = max(self.message_s, seconds / done.count)
            elif spent == "dp":
                sending[action] += seconds * repeats
            else:
                computing[action] += seconds * repeats
                is_embedding = done.place.module == EMBEDDING
                self.stages[action.stage][spent, is_embedding, action.kind] += seconds * repeats / m
        hidden = hidden_share(scenario)
        self.dp_s += sum(max(0.0, seconds - hidden * computing[action]) for action, seconds in sending.items())

    def _place_seconds(self, done: Done) -> tuple[str, float]:
        """Purpose of work or a message (compute, recompute, tp, pp or dp), and seconds of all its repetitions."""
        what = done.what
        if isinstance(what, Message):
            waits = what.axis in (TP, EP) or (what.axis == CP and done.place.module.endswith(self.attentions))
            spent = PP if what.name in _BETWEEN_STAGES else TP if waits else "dp"
            return spent, done.count * self._message_s(what, is_of_update=done.place.action is None)
        spent = "recompute" if done.place.is_again else "compute"
        return spent, done.count * operation_s(self.scenario, self.kernels, what)

    def _message_s(self, message: Message, *, is_of_update: bool) -> float:
        scenario, layout = self.scenario, self.layout
        if message.name in _BETWEEN_STAGES:
            return message_s(scenario, layout, message.nbytes)
        if message.axis == EP:
            return exchange_s(scenario, layout, message.nbytes, copies=1)
        if message.axis in (EXPERT_SHARDS, EXPERT_COPIES):
            return self._sum_of_experts_s(message)
        sizes, strides = axis_sizes(layout), axis_strides(layout)
        if message.name == "all_to_all" and layout.attends_in_parts and not is_of_update:  # a hop of cp's ring
            link = data_link(scenario, layout, layout.tp, layout.cp)
            return self.ring_exposed * (message.nbytes / link.bytes_per_s + link.latency_s)
        axes = [axis for axis in AXES if sizes[axis] > 1 and (message.axis == "all" or axis in message.axis.split("·"))]
        num_ranks = prod(sizes[axis] for axis in axes)
        if axes == [TP]:
            link, exposed = tp_link(scenario, layout), scenario.engine.constants.tp_exposed * self.tp_exposed
        else:
            link, exposed = data_link(scenario, layout, strides[axes[-1]], num_ranks), 1.0
        collective_s = all_reduce_s if message.name == "all_reduce" else half_all_reduce_s
        return exposed * collective_s(message.nbytes, num_ranks, link)

    def _sum_of_experts_s(self, message: Message) -> float:
        """Seconds of a collective of ranks that only experts join."""
        axes = [*expert_sizes(self.layout).items()]
        place = [axis for axis, _ in axes].index(message.axis)
        num_ranks, stride = axes[place][1], prod(size for _, size in axes[place + 1 :])
        collective_s = all_reduce_s if message.name == "all_reduce" else half_all_reduce_s
        return collective_s(message.nbytes, num_ranks, data_link(self.scenario, self.layout, stride, num_ranks))


def _to_work(seconds: Mapping[tuple[str, bool, Kind], float], host_s: float, *, is_on_host: bool) -> StageWork:
    """Work of a stage. A GPU waits only for as long as the host is slower; a CPU does both in turn."""

    def spent_on(*names: str, kinds: Sequence[Kind] = (Kind.FORWARD, Kind.BACKWARD)) -> float:
        return sum(value for (name, _, kind), value in seconds.items() if name in names and kind in kinds)

    everything = ("compute", "recompute", TP)
    forward_s = spent_on(*everything, kinds=[Kind.FORWARD])
    backward_s = spent_on(*everything, kinds=[Kind.BACKWARD])
    waits_s = split_host_s(host_s) if is_on_host else wait_for_host((forward_s, backward_s), split_host_s(host_s))
    return StageWork(
        compute_s=spent_on("compute"),
        recompute_s=spent_on("recompute"),
        tp_s=spent_on(TP),
        pp_s=0.0,
        host_s=sum(waits_s),
        forward_s=forward_s + waits_s[0],
        backward_s=backward_s + waits_s[1],
    )
