"""Candidates: what is left of a space when all is gone that is not legal, has slower kernels or surely does not fit.

    families ─▶ with a recomputation ─▶ works ─▶ candidates ─▶ variants

A *family* is all that is legal and has the same tensors in a block, a *work* one way to compute a microbatch in it with
some recomputation, and a *candidate* a work spread over ranks in some way, of which nothing is open but how
data-parallel ranks share the state (`space.StateSharding`): whatever that is, its stages do the same work, and hold the
same beside their state. Its *variants* are the ways that may fit. There are hundreds, thousands, tens of thousands and
hundreds of thousands of these, so each is made of the one before where a search asks for it.
"""

from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from itertools import product, starmap
from math import inf
from operator import add, itemgetter, le
from typing import Any, Literal, NamedTuple, TypeVar

from dtlayout.costmodel.cache_keys import BlockLayout, PipelineLayout, StageLayout, StateLayout, key_of
from dtlayout.costmodel.compute import recompute_time
from dtlayout.costmodel.estimate import Estimator
from dtlayout.costmodel.rank_groups import Counts, Stages
from dtlayout.costmodel.scenario import find_kernel_refusals, find_unsupported
from dtlayout.costmodel.stage_work import LayoutWork
from dtlayout.costmodel.update import Sent, Update, find_update, hidden_share, least_update_s
from dtlayout.planner.peaks import BlockBytes, InFlight, Peaks, RankSizes
from dtlayout.planner.space import Degrees, SortKey, Space, StateSharding
from dtlayout.schedules.schedules import find_schedule
from dtlayout.spec.kernels import Kernels
from dtlayout.spec.layout import Layout
from dtlayout.spec.recompute import Recompute

Reason = Literal["not legal", "slower kernels", "does not fit", "bounded", "slower", "alike", "ranked"]
"""A layout's end in a search; "bounded" may fit, but is slower by its lower bound alone, "slower" was simulated, and
"alike" is a variant of a ranked one."""


class State(NamedTuple):
    """Parameters, gradients and optimizer of ranks."""

    sizes: tuple[RankSizes, ...]
    """Parameters of a rank of each group."""
    ways: tuple[tuple[StateSharding, tuple[float, ...]], ...]
    """Least bytes whenever much is in flight, for each way to share them."""
    least: tuple[float, ...]
    """The least in any of them."""


class Pipeline(NamedTuple):
    """A pipeline with a number of microbatches, or with any larger one that holds no more, whatever they compute."""

    stages: Stages
    in_flight: list[InFlight]
    """What each group of ranks has in flight."""
    state: State
    """The state of these groups, and meanwhile."""


class StepMapping(NamedTuple):
    """How a step is spread over ranks and microbatches; the state is shared in any way."""

    degrees: Degrees
    schedule: str
    virtual_stages: int
    num_microbatches: int
    num_ways: int
    """Ways to share the state."""

    @property
    def pp(self) -> int:
        """Pipeline ranks."""
        return self.degrees.pp


T = TypeVar("T")
RankLoad = tuple[int, int, int]
"""Blocks that a rank waits for and computes in a step, forward and backward; blocks of these computed again; heads."""


class BlockClass(NamedTuple):
    """Legal layouts with the same tensors in a block, and a pipeline, or a split backward, in all of them or none.

    They differ in recomputation, tp_overlap and how they are spread.
    """

    layout: Layout
    """One of them."""
    overlaps: list[bool]
    """Their values of tp_overlap."""
    spreads: tuple[StepMapping, ...]


class RecomputedMapping(NamedTuple):
    """A spread of layouts with one recomputation."""

    spread: StepMapping
    pipeline: PipelineLayout
    busy: list[RankLoad]
    """What the last rank of each group of ranks is busy with."""

    def bound_s(self, block_s: float, recompute_s: float, head_s: float) -> float:
        """A lower bound of its step, from the least seconds of a block, of computing one again, and of the head:
        `StepTimes.bound_s`, without host and messages.
        """
        return max([n * block_s + again * recompute_s + heads * head_s for n, again, heads in self.busy])


BoundSpread = tuple[float, RecomputedMapping]
"""A lower bound of a step, and how that is spread."""


class Recomputing(NamedTuple):
    """The layouts of a family with one recomputation."""

    layout: Layout
    """One of them."""
    parts: dict[StageLayout, Layout]
    """Each part on which a stage's work depends, and the layout with that tp_overlap."""


class MicrobatchCost(NamedTuple):
    """What a microbatch is computed with in a family; a step is at least as long, however it is spread."""

    layout: Layout
    """A layout of the family with this recomputation and tp_overlap."""
    part: StageLayout
    """The part of it on which its work depends."""
    kernels: Kernels
    times: LayoutWork
    """Seconds of a microbatch on any stage."""
    block: BlockBytes
    """Bytes that it holds in a block and in the head."""


class Costs(NamedTuple):
    """What speaks against a way to compute, beside another one."""

    spent: tuple[float, ...]
    """Seconds and bytes."""
    waits_s: float = 0.0
    """How long the GPU waits for the host, which no less of the others makes good."""


class Candidate(NamedTuple):
    """Layouts that differ in nothing but how their ranks share the state, one of which may fit."""

    work: MicrobatchCost
    spread: StepMapping
    stages: Stages
    """The stages of its pipeline."""
    sizes: tuple[RankSizes, ...]
    """Parameters of a rank of each group of ranks."""
    variants: dict[StateSharding, float]
    """Ways to share the state that may fit, and what the fullest rank needs at least."""

    @property
    def layout(self) -> Layout:
        """One of the layouts, with all of the state on every data-parallel rank or shard."""
        pp, dp = self.spread.pp, self.spread.degrees.dp
        order: dict[str, Any] = {"schedule": self.spread.schedule, "virtual_stages": self.spread.virtual_stages}
        return replace(self.work.layout, pp=pp, dp_shard=dp, **order)


class Candidates:
    """Finds the candidates of one space; what layouts share is computed once."""

    def __init__(self, space: Space, estimator: Estimator, peaks: Peaks, allowed_bytes: float):
        """A rank may hold `allowed_bytes`."""
        self.space, self.estimator, self.peaks, self.allowed_bytes = space, estimator, peaks, allowed_bytes
        self.examples = cache(self._find_examples)
        """Every way to share the state at some degrees, with a layout of these degrees that does."""
        self.undominated = cache(self._find_undominated)
        """StageLayouts and kernels, of several StageLayouts, that are not both slower and larger than others; where
        backwards are split, of the kernels that may be there."""
        self._costs = cache(self._find_costs)
        self._kernels, self._able_kernels = cache(self._find_kernels), cache(self._find_able_kernels)
        self._states = cache(self._find_states)
        self._pipelines, self._short_pipelines = cache(self._find_pipeline), cache(self._find_short_pipeline)
        self._group_states, self._overlaps = cache(self._find_group_states), cache(self._find_overlaps)
        self._allows_pipeline, self._orders = cache(space.allows_pipeline), cache(self._find_orders)
        self._busy, self._ways = cache(self._find_busy), cache(self._find_ways)
        self._spreadings = cache(self._find_spreadings)
        self._hidden = hidden_share(space.scenario)
        self.updates = cache(self._find_updates)
        """Reductions and updates of ranks with these RankSizes at some degrees, with a head or without, by Sharding."""

    def find(self, counts: Counter[Reason]) -> list[BlockClass]:
        """All that is legal, and what is not is counted; the former is "bounded" until more is known of it."""
        space, spreads = self.space, defaultdict[tuple[Any, ...], list[StepMapping]](list)
        for degrees in space.degrees:
            tp, pp, cp, ep, dp = degrees
            methods, num_shardings = space.cp_methods(cp), len(space.shardings(degrees))
            num_all = len(methods) * len(space.sequence_parallel(tp)) * len(space.tp_overlap(tp)) * num_shardings
            num_all *= len(space.recompute) * len(space.kernels)
            for splits, orders in self._orders(pp).items():
                num_legal = num_shardings * sum(
                    len(overlaps) * len(self._kernels(tp, cp, method, splits, recompute))
                    for method in methods
                    for overlaps in self._overlaps(tp, cp, method, splits).values()
                    for recompute in space.recompute * bool(overlaps)
                )
                steps = list(product(orders, space.micro_batches(cp)))
                legal = [each for each in steps if num_legal and self._allows_pipeline(pp, dp, *each)]
                counts["bounded"] += num_legal * len(legal)
                counts["not legal"] += num_all * len(steps) - num_legal * len(legal)
                for order, micro_batch in legal:
                    m = space.scenario.batch.global_batch // (dp * micro_batch)
                    alike = tp, cp, ep, micro_batch, pp > 1, splits
                    spreads[alike].append(StepMapping(degrees, *order, m, num_shardings))
        families = []
        for (tp, cp, ep, micro_batch, _, splits), found in spreads.items():
            pp, dp = found[0].pp, found[0].degrees.dp
            pipeline: dict[str, Any] = {"schedule": found[0].schedule, "virtual_stages": found[0].virtual_stages}
            for method, (sp, overlaps) in (
                (each, mode) for each in space.cp_methods(cp) for mode in self._overlaps(tp, cp, each, splits).items()
            ):
                layout = Layout(
                    tp=tp, pp=pp, cp=cp, cp_method=method, ep=ep, dp_shard=dp, micro_batch=micro_batch,
                    sequence_parallel=sp, **pipeline, **space.constant,
                )  # fmt: skip
                has_kernels = any(self._kernels_with(layout, recompute) for recompute in space.recompute)
                families += [BlockClass(layout, overlaps, tuple(found))] if overlaps and has_kernels else []
        return families

    def recomputing(self, family: BlockClass) -> list[tuple[Recomputing, list[BoundSpread]]]:
        """A family with each recomputation, and its spreads with lower bounds of their steps."""
        found, (block_s, head_s) = [], self._least_s(family)
        for recompute in self.space.recompute:
            layouts = [replace(family.layout, recompute=recompute, tp_overlap=each) for each in family.overlaps]
            parts = {key_of(layout, StageLayout): layout for layout in layouts}
            if kernels := _with_one_loss(self._kernels_of(layouts[0])):
                recompute_s = min([self._again_s(part, each) for part in parts for each in kernels])
                spreadings = self._spreadings(family.spreads, Recompute.parse(recompute).every)
                bound = [(each.bound_s(block_s, recompute_s, head_s), each) for each in spreadings]
                found.append((Recomputing(layouts[0], parts), bound))
        return found

    def works(self, recomputing: Recomputing) -> tuple[list[MicrobatchCost], int]:
        """The works with a recomputation that may be the fastest, and how many have slower kernels."""
        layout, parts = recomputing
        best = self.undominated(tuple(parts), layout.splits_backward)
        found = [self.work(parts[part], part, kernels) for part, kernels in best]
        return found, len(parts) * len(self._kernels_of(layout)) - len(found)

    def work(self, layout: Layout, part: StageLayout, kernels: Kernels) -> MicrobatchCost:
        """What a microbatch of a layout, of which this is a part, is computed with."""
        times, block = self.estimator.layout_work(part, kernels), self.peaks.block_bytes(part, kernels)
        return MicrobatchCost(layout, part, kernels, times, block)

    def need(self, layout: Layout, kernels: Kernels) -> tuple[float, float]:
        """What the fullest rank of a layout needs, and its peak, as far as that is allowed."""
        return self.peaks.need(layout, kernels, self.allowed_bytes)

    def with_update_s(self, least_s: float, spread: StepMapping) -> float:
        """A lower bound of a step whose microbatches take `least_s` at least, with reduction and update of the first
        ranks, in any way in which the state alone fits.

        No more is hidden than a share of what the rank is busy, so a step that takes longer hides no more than it is
        longer: what is bound for the least time is for any.
        """
        m = spread.num_microbatches
        hidden_s = self._hidden * least_s / m
        return least_s + least_update_s(self._ways(spread), m, hidden_s)

    def make(self, work: MicrobatchCost, spread: StepMapping, layout: PipelineLayout) -> Candidate | None:
        """The candidate of a work that is spread over this pipeline; None if no variant can fit."""
        pipeline = self._pipelines(spread, layout)
        state, allowed = pipeline.state, self.allowed_bytes
        held: list[float] = []
        for beside, state_bytes in zip(self.peaks.held_bytes(work.block, pipeline.in_flight), state.least, strict=True):
            if beside + state_bytes > allowed:  # in any way
                return None
            held.append(beside)
        needs = {sharding: max(map(add, held, least)) for sharding, least in state.ways}
        if not (fitting := {sharding: need for sharding, need in needs.items() if need <= allowed}):
            return None
        return Candidate(work, spread, pipeline.stages, state.sizes, fitting)

    def sort_by_need(self) -> list[tuple[float, Candidate, StateSharding]]:
        """Every variant with what it needs at least, the smallest first."""
        counts = Counter[Reason]()
        parts = [each for family in self.find(counts) for each in self.recomputing(family)]
        works = (
            (work, spread, pipeline)
            for part, spreads in parts
            for work in self.works(part)[0]
            for _, (spread, pipeline, _) in spreads
        )
        candidates = filter(None, starmap(self.make, works))
        least = [
            (need, candidate, sharding) for candidate in candidates for sharding, need in candidate.variants.items()
        ]
        return sorted(least, key=itemgetter(0))

    def least_of_family_s(self, family: BlockClass) -> float:
        """A lower bound of all steps of a family: its blocks and its head shared out evenly, and nothing else."""
        (block_s, head_s), spread = self._least_s(family), family.spreads[0]
        busy_s = self.space.scenario.model.num_layers * block_s + head_s
        return spread.num_microbatches * busy_s / spread.pp  # the same for all spreads of a family

    def _least_s(self, family: BlockClass) -> tuple[float, float]:
        """Seconds that a microbatch takes at least in a block and in the head, which nothing waits for."""
        kernels = list(
            dict.fromkeys(each for kind in self.space.recompute for each in self._kernels_with(family.layout, kind))
        )
        parts = [key_of(replace(family.layout, tp_overlap=overlap), BlockLayout) for overlap in family.overlaps]
        of_kinds = product(self.estimator.blocks.values(), parts, _with_one_loss(kernels))
        block_s = min([block_of(part, each).gpu_s for block_of, part, each in of_kinds])
        return block_s, min([self.estimator.head(part, each).gpu_s for part, each in product(parts, kernels)])

    def _again_s(self, part: StageLayout, kernels: Kernels) -> float:
        """Seconds that computing a block again takes at least."""
        of_block, kinds = key_of(part, BlockLayout), self.space.scenario.kinds
        blocks = [(scenario, self.estimator.blocks[kind](of_block, kernels)) for kind, scenario in kinds.items()]
        return min([sum(recompute_time(scenario, part, kernels, block)) for scenario, block in blocks])  # type: ignore[arg-type]

    def _find_orders(self, pp: int) -> dict[bool, list[SortKey]]:
        """The space's, by whether they split backwards."""
        found = defaultdict[bool, list[SortKey]](list)
        for order in self.space.orders(pp):
            found[pp > 1 and find_schedule(order[0]).splits_backward].append(order)
        return found

    def _find_overlaps(self, tp: int, cp: int, method: str, splits: bool) -> dict[bool, list[bool]]:
        """Values of sequence_parallel, and which of tp_overlap are legal beside them; a split backward allows none."""
        space = self.space
        tried = [overlap for overlap in space.tp_overlap(tp) if not (overlap and splits)]
        return {
            sp: [overlap for overlap in tried if space.allows_tensor(tp, cp, method, sp, overlap)]
            for sp in space.sequence_parallel(tp)
        }

    def _find_examples(self, degrees: Degrees) -> dict[StateSharding, Layout]:
        tp, pp, cp, ep, dp = degrees
        plain = Layout(tp=tp, pp=pp, cp=cp, ep=ep, dp_shard=dp, offload=self.space.offload)
        return {sharding: sharding.of(plain) for sharding in self.space.shardings(degrees)}

    def _find_pipeline(self, spread: StepMapping, pipeline: PipelineLayout) -> Pipeline:
        return self._short_pipelines(pipeline, spread.degrees, pipeline.shorten(spread.num_microbatches))

    def _find_short_pipeline(self, pipeline: PipelineLayout, degrees: Degrees, m: int) -> Pipeline:
        stages, in_flight = self.estimator.groups(pipeline), self.peaks.in_flight(pipeline, m)
        counts = [group.counts for group in stages.groups]
        moments = [(each.group.counts, each.has_gradients) for each in in_flight]
        return Pipeline(stages, in_flight, self._states(degrees, tuple(counts), tuple(moments)))

    def _find_spreadings(self, spreads: tuple[StepMapping, ...], recompute_every: int) -> list[RecomputedMapping]:
        """Of layouts that compute again each `recompute_every`-th block."""
        pipelines = [self._pipeline_of(each, recompute_every) for each in spreads]
        return [
            RecomputedMapping(each, pipeline, self._busy(pipeline, each.num_microbatches))
            for each, pipeline in zip(spreads, pipelines, strict=True)
        ]

    def _pipeline_of(self, spread: StepMapping, recompute_every: int) -> PipelineLayout:
        """The pipeline of layouts that are spread in this way."""
        cuts = self.space.constant.get("stage_layers", ())
        return PipelineLayout(spread.pp, spread.schedule, spread.virtual_stages, cuts, recompute_every)

    def _find_busy(self, pipeline: PipelineLayout, m: int) -> list[RankLoad]:
        waits, found = not find_schedule(pipeline.schedule).splits_backward, []
        for group in self.estimator.groups(pipeline).groups:
            done = [(each, waits * count) for each, count in group.before] + [(each, m) for each in group.classes]
            blocks = sum([each.num_layers * times for each, times in done])
            found.append((blocks, sum([each.num_recomputed * times for each, times in done]), m * group.has_head))
        return found

    def _find_ways(self, spread: StepMapping) -> list[Sent]:
        """What the first ranks send, in those ways to share the state in which that alone fits that cost no more in all
        than another one.
        """
        degrees, m, scenario = spread.degrees, spread.num_microbatches, self.space.scenario
        stages, _, state = self._pipelines(spread, self._pipeline_of(spread, recompute_every=0))
        examples, updates = self.examples(degrees), self.updates(degrees, state.sizes[0], stages.groups[0].has_head)
        ways = [way for way, least in state.ways if max(least) <= self.allowed_bytes]
        # What sends more of anything takes no less.
        sent = dict.fromkeys(Sent.of(scenario, examples[way], updates[way], m) for way in ways)
        return [each for each in sent if not any(other is not each and all(map(le, other, each)) for other in sent)]

    def _find_states(
        self, degrees: Degrees, counts: tuple[Counts, ...], moments: tuple[tuple[Counts, bool], ...]
    ) -> State:
        sizes = {each: self.peaks.sizes(each, degrees.tp, degrees.ep) for each in counts}
        least = [self._group_states(degrees, sizes[each], has_gradients) for each, has_gradients in moments]
        ways = tuple(zip(self.examples(degrees), zip(*least, strict=True), strict=True))
        return State(tuple([sizes[each] for each in counts]), ways, tuple([min(each, default=inf) for each in least]))

    def _find_group_states(self, degrees: Degrees, size: RankSizes, has_gradients: bool) -> list[float]:
        ways = [key_of(example, StateLayout) for example in self.examples(degrees).values()]
        return [self.peaks.state_bytes(way, size, has_gradients) for way in ways]

    def _find_updates(self, degrees: Degrees, size: RankSizes, has_head: bool) -> dict[StateSharding, Update]:
        n, scenario, of_experts = size.num_parameters, self.space.scenario, size.num_of_experts
        return {
            sharding: find_update(scenario, layout, n, has_head=has_head, of_experts=of_experts)
            for sharding, layout in self.examples(degrees).items()
        }

    def _kernels_of(self, layout: Layout) -> list[Kernels]:
        """Those that may be beside what a layout says of tp, cp and recomputation."""
        return self._kernels_with(layout, layout.recompute)

    def _kernels_with(self, layout: Layout, recompute: str) -> list[Kernels]:
        return self._kernels(layout.tp, layout.cp, layout.cp_method, layout.splits_backward, recompute)

    def _find_kernels(self, tp: int, cp: int, method: str, splits: bool, recompute: str) -> list[Kernels]:
        layout = Layout(tp=tp, cp=cp, cp_method=method, recompute=recompute, offload=self.space.offload)
        layout = self.space.without_granted(layout)
        asked = layout.asked_of_kernels | {"splits_backward": splits}
        return [] if find_unsupported(self.space.scenario, layout) else self._able_kernels(**asked)

    def _find_able_kernels(self, **asked: Any) -> list[Kernels]:
        scenario = self.space.scenario
        return [each for each in self.space.kernels if not find_kernel_refusals(scenario, each, **asked)]

    def _find_undominated(
        self, parts: tuple[StageLayout, ...], splits: bool = False
    ) -> list[tuple[StageLayout, Kernels]]:
        """All but those that are no faster in any direction than others, and keep no less, in the same layout.

        The loss is apart from all else that kernels compute, so what is worse with one loss is so with each, and a loss
        that is worse in one part is so in each.
        """
        first = parts[0]
        kernels = self._kernels(first.tp, first.cp, first.cp_method, splits, first.recompute)
        if len(kernels) * len(parts) < 2:
            return [(part, each) for part in parts for each in kernels]
        left = _leave_best({(p, each): self._costs(p, each) for p in parts for each in _with_one_loss(kernels)})
        of_loss = {each.loss: each for each in kernels}
        losses = list(of_loss)
        if len(losses) > 1:
            losses = _leave_best({loss: self._head_costs(first, each) for loss, each in of_loss.items()})
        return [(part, replace(each, loss=loss)) for part, each in left for loss in losses]

    def _find_costs(self, part: StageLayout, kernels: Kernels) -> Costs:
        """Of a block; the head costs as much in all that have one loss."""
        blocks = self.estimator.layout_work(part, kernels).blocks
        block, recompute_s = blocks.kinds[0]
        forward_s, backward_s = block.forward_s + block.forward_tp_s, block.backward_s + block.backward_tp_s
        waits_s = max(0.0, blocks.block_host_s - block.forward_s - block.backward_s)
        return Costs((forward_s, backward_s, sum(recompute_s), *self.peaks.block_bytes(part, kernels)), waits_s)

    def _head_costs(self, part: StageLayout, kernels: Kernels) -> Costs:
        head = self.estimator.head(key_of(part, BlockLayout), kernels)
        return Costs((head.forward_s + head.backward_s, self.peaks.block_bytes(part, kernels).logits))


def _leave_best(compared: Mapping[T, Costs]) -> list[T]:
    """All but those for which there is another that costs no more, and makes nobody wait; of equal ones the first."""
    return [
        each
        for i, (each, own) in enumerate(compared.items())
        if not any(
            other.waits_s == 0.0 and all(map(le, other.spent, own.spent)) and (j < i or other != own)
            for j, other in enumerate(compared.values()) if j != i
        )
    ]  # fmt: skip


def _with_one_loss(kernels: list[Kernels]) -> list[Kernels]:
    """Those with the loss of the first: the loss belongs to the head, and changes nothing in a block."""
    return [each for each in kernels if each.loss == kernels[0].loss]
