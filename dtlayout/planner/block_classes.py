"""Block classes: the legal layouts of a space in classes, and the first lower bounds of their steps.

A *block class* has all legal layouts whose blocks have the same tensors, since tp, cp, cp_method, ep, micro-batch and
sequence parallelism are the same. A *mapping* says how a step is spread over ranks and microbatches: all degrees, the
schedule and its virtual stages. The *load* of a rank says how many blocks and heads it computes in a step. Loads times
the least seconds of one block and one head bound the step of a mapping.
"""

from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from itertools import product
from typing import Any, Literal, NamedTuple

from dtlayout.costmodel.cache_keys import BlockLayout, PipelineLayout, StageLayout, key_of
from dtlayout.costmodel.engine_rules import allows_ep_overlap
from dtlayout.costmodel.estimate import Estimator
from dtlayout.costmodel.forward_only import has_forward_only
from dtlayout.costmodel.recomputation import recompute_time
from dtlayout.planner.kernel_choices import KernelChoices, with_one_loss
from dtlayout.planner.space import Degrees, ScheduleChoice, Space
from dtlayout.schedules.schedules import find_schedule
from dtlayout.spec.kernels import Kernels
from dtlayout.spec.layout import Layout

Reason = Literal["not legal", "slower kernels", "does not fit", "bounded", "slower", "alike", "ranked"]
"""Why a layout left the search.

"slower kernels": dominated by other kernels; "bounded": may fit, but its bound alone is too slow; "slower": simulated,
and too slow; "alike": differs from a ranked layout only in what its group leaves open.
"""
RankLoad = tuple[int, int, int]
"""Blocks that a rank waits for or computes in a step, forward and backward; recomputed blocks among them; heads."""


class StepMapping(NamedTuple):
    """How a step is spread over ranks and microbatches; the state sharding is open."""

    degrees: Degrees
    schedule: str
    virtual_stages: int
    num_microbatches: int
    num_shardings: int
    """Number of state shardings at these degrees."""

    @property
    def pp(self) -> int:
        """Pipeline ranks."""
        return self.degrees.pp


class RecomputedMapping(NamedTuple):
    """A mapping with a share of recomputed blocks."""

    mapping: StepMapping
    pipeline: PipelineLayout
    loads: list[RankLoad]
    """Load of the last rank of each rank group."""

    def bound_s(self, block_s: float, recompute_s: float, head_s: float) -> float:
        """Lower bound of the step, from the least seconds of a block, of recomputing a block, and of the head.

        `StepTimes.bound_s` is the tighter one, with the host's time and messages.
        """
        return max([n * block_s + again * recompute_s + heads * head_s for n, again, heads in self.loads])


BoundMapping = tuple[float, RecomputedMapping]
"""Lower bound of a step in seconds, and the mapping that it is for."""


class BlockClass(NamedTuple):
    """Legal layouts with the same tensors in a block; all have a pipeline or none, and all split the backward or none.

    They differ in tp_overlap, kernels and mapping, and in recomputation until `BlockClasses.with_recompute` sets it.
    """

    layouts: tuple[Layout, ...]
    """A layout for each legal combination of tp_overlap, ep_overlap and ep_dispatcher."""
    mappings: tuple[StepMapping, ...]


class BlockClasses:
    """Finds the block classes of one space, and bounds their steps."""

    def __init__(self, space: Space, estimator: Estimator, kernels: KernelChoices):
        """`estimator` says the seconds of a block, `kernels` which kernels are legal."""
        self.space, self.estimator, self.kernels = space, estimator, kernels
        self._allows_pipeline, self._orders = cache(space.allows_pipeline), cache(self._find_orders)
        self._overlaps, self._loads = cache(self._find_overlaps), cache(self._find_loads)
        self._recomputed_mappings = cache(self._find_recomputed_mappings)

    def find(self, counts: Counter[Reason]) -> list[BlockClass]:
        """All block classes of the space; adds its layouts to `counts`, the legal ones as "bounded" for now."""
        space, mappings = self.space, defaultdict[tuple[Any, ...], list[StepMapping]](list)
        for degrees in space.degrees:
            tp, pp, cp, ep, dp = degrees
            methods, num_shardings = space.cp_methods(cp), len(space.shardings(degrees))
            num_all = len(methods) * len(space.sequence_parallel(tp)) * len(space.tp_overlap(tp)) * num_shardings
            num_all *= (
                len(space.recompute)
                * len(space.kernels)
                * len(space.exchanges(ep, is_interleaved=True, recompute="none"))
            )
            for (splits, interleaves), orders in self._orders(pp).items():
                num_legal = num_shardings * sum(
                    len(overlaps)
                    * len(self.kernels.legal(tp, cp, method, splits, recompute))
                    * len(space.exchanges(ep, is_interleaved=interleaves, recompute=recompute))
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
                    shared = tp, cp, ep, micro_batch, splits, interleaves, pp > 1
                    mappings[shared].append(StepMapping(degrees, *order, m, num_shardings))
        return [each for shared, found in mappings.items() for each in self._list_with(found, *shared)]

    def _list_with(
        self,
        mappings: list[StepMapping],
        tp: int,
        cp: int,
        ep: int,
        micro_batch: int,
        splits: bool,
        interleaves: bool,
        _: bool,
    ) -> Iterator[BlockClass]:
        """Block classes with these mappings, one for each legal cp_method and sequence parallelism."""
        first = mappings[0]
        for method in self.space.cp_methods(cp):
            for sp, overlaps in self._overlaps(tp, cp, method, splits).items():
                shared: dict[str, Any] = {
                    "tp": tp, "pp": first.pp, "cp": cp, "cp_method": method, "ep": ep, "dp_shard": first.degrees.dp,
                    "micro_batch": micro_batch, "sequence_parallel": sp, "schedule": first.schedule,
                    "virtual_stages": first.virtual_stages,
                }  # fmt: skip
                exchanges = self.space.exchanges(ep, is_interleaved=interleaves, recompute="none")
                layouts = tuple([
                    Layout(tp_overlap=each, ep_overlap=exchange, ep_dispatcher=name, **shared, **self.space.constant)  # type: ignore[arg-type]
                    for each, (exchange, name) in product(overlaps, exchanges)
                ])  # fmt: skip
                if layouts and any(self.kernels.legal_for(layouts[0], each) for each in self.space.recompute):
                    yield BlockClass(layouts, tuple(mappings))

    def with_recompute(self, block_class: BlockClass) -> list[tuple[BlockClass, list[BoundMapping]]]:
        """The block class once for each recomputation that has legal kernels.

        With each come its mappings, and a first lower bound of each mapping's step, the least tight one.
        """
        found, (block_s, head_s) = [], self._least_s(block_class)
        for recompute in self.space.recompute:
            allows_overlap = allows_ep_overlap(self.space.scenario.engine, recompute, True)
            layouts = tuple([
                replace(each, recompute=recompute)
                for each in block_class.layouts
                if allows_overlap or not each.overlaps_ep
            ])  # fmt: skip
            if layouts and (kernels := with_one_loss(self.kernels.legal_for(layouts[0], recompute))):
                parts = [key_of(layout, StageLayout) for layout in layouts]
                recompute_s = min([self._least_recompute_s(part, each) for part in parts for each in kernels])
                mappings = self._recomputed_mappings(block_class.mappings, PipelineLayout.find_period(recompute))
                bounds = [(each.bound_s(block_s, recompute_s, head_s), each) for each in mappings]
                found.append((block_class._replace(layouts=layouts), bounds))
        return found

    def bound_s(self, block_class: BlockClass) -> float:
        """Lower bound of all steps of a block class: blocks and head dealt out evenly over the pipeline's ranks."""
        (block_s, head_s), mapping = self._least_s(block_class), block_class.mappings[0]
        busy_s = self.space.scenario.model.num_layers * block_s + head_s
        return mapping.num_microbatches * busy_s / mapping.pp  # equal for all mappings of a block class

    def _least_s(self, block_class: BlockClass) -> tuple[float, float]:
        """Least GPU seconds of a microbatch in a block and in the head."""
        first, parts = block_class.layouts[0], [key_of(each, BlockLayout) for each in block_class.layouts]
        kernels = list(
            dict.fromkeys(each for kind in self.space.recompute for each in self.kernels.legal_for(first, kind))
        )
        of_kinds = product(self.estimator.blocks.values(), parts, with_one_loss(kernels))
        blocks = [block_of(part, each) for block_of, part, each in of_kinds]
        if has_forward_only(self.space.scenario.model):
            blocks = [block.forward_only for block in blocks]
        block_s = min([block.gpu_s for block in blocks])
        return block_s, min([self.estimator.head(part, each).gpu_s for part, each in product(parts, kernels)])

    def _least_recompute_s(self, part: StageLayout, kernels: Kernels) -> float:
        """Least seconds of recomputing a block; the model's blocks may differ."""
        if has_forward_only(self.space.scenario.model):
            return 0.0
        of_block, kinds = key_of(part, BlockLayout), self.space.scenario.kinds
        blocks = [(scenario, self.estimator.blocks[kind](of_block, kernels)) for kind, scenario in kinds.items()]
        return min([sum(recompute_time(scenario, part, kernels, block)) for scenario, block in blocks])  # type: ignore[arg-type]

    def _find_orders(self, pp: int) -> dict[tuple[bool, bool], list[ScheduleChoice]]:
        """Schedules with their virtual stages, by whether they split the backward, and whether stages are interleaved.

        The second is of mixtures whose ep can be overlapped; elsewhere, and without a pipeline, it is True.
        """
        found = defaultdict[tuple[bool, bool], list[ScheduleChoice]](list)
        matters = pp > 1 and self.space.scenario.model.experts is not None and self.space.has_axis("ep_overlap")
        for name, v in self.space.orders(pp):
            splits = pp > 1 and find_schedule(name).splits_backward
            found[splits, v > 1 or not matters].append((name, v))
        return found

    def _find_overlaps(self, tp: int, cp: int, method: str, splits: bool) -> dict[bool, list[bool]]:
        """sequence_parallel → legal values of tp_overlap beside it; beside a split backward only False is legal."""
        space = self.space
        tried = [overlap for overlap in space.tp_overlap(tp) if not (overlap and splits)]
        return {
            sp: [overlap for overlap in tried if space.allows_tensor(tp, cp, method, sp, overlap)]
            for sp in space.sequence_parallel(tp)
        }

    def _find_recomputed_mappings(
        self, mappings: tuple[StepMapping, ...], recomputed: tuple[int, int]
    ) -> list[RecomputedMapping]:
        """The mappings with blocks recomputed as in `PipelineLayout.recomputed`."""
        pipelines = [self.pipeline_of(each, recomputed) for each in mappings]
        return [
            RecomputedMapping(each, pipeline, self._loads(pipeline, each.num_microbatches))
            for each, pipeline in zip(mappings, pipelines, strict=True)
        ]

    def pipeline_of(self, mapping: StepMapping, recomputed: tuple[int, int]) -> PipelineLayout:
        """The part of a mapping's layouts that stages depend on."""
        cuts = self.space.constant.get("stage_layers", ())
        return PipelineLayout(mapping.pp, mapping.schedule, mapping.virtual_stages, cuts, recomputed)

    def _find_loads(self, pipeline: PipelineLayout, m: int) -> list[RankLoad]:
        waits, found = not find_schedule(pipeline.schedule).splits_backward, []
        for group in self.estimator.groups(pipeline).groups:
            done = [(each, waits * count) for each, count in group.before] + [(each, m) for each in group.classes]
            blocks = sum([each.num_layers * times for each, times in done])
            found.append((blocks, sum([each.num_recomputed * times for each, times in done]), m * group.has_head))
        return found
