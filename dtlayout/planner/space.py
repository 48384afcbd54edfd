"""Space: the layouts and kernels that a search looks at, within what a user fixes or rules out.

N GPUs, n GPUs of a node, L blocks, B global batch.

| axis | values |
|---|---|
| tp | divisors of N; beyond the fast links too, the cost model knows that it is slow there |
| pp | divisors of N / tp |
| cp | divisors of N / (tp · pp), without a common divisor with the micro-batch |
| ep | for mixtures of experts: common divisors of the experts and of dp · cp · tp |
| schedule | 1f1b; for pp > 1 all `is_searched`, with the fewest virtual stages for each size of a stage |
| virtual_stages | 64 at most |
| dp_shard | 1, 2, 4, …, dp over these, the ranks of a node, of all that fast links join; dp_replicate is the rest |
| zero | 1, 2, 3 as the engine has them; where nothing is sharded 1, of our trainer at dp = 1 also 3 |
| micro_batch | divisors of B |
| cp_method | beside cp, all that the engine has |
| sequence_parallel, tp_overlap | on and off; for tp > 1 also off, and on |
| ep_overlap | off; for ep > 1 on, where the engine has it and the order allows it |
| ep_dispatcher | the usual one; where ep leaves the fast links all that the engine has |
| recompute | none, selective, keep-attention, full, every-2, every-4, every-8 |
| offload | none; layouts that fit only with it are named by suggestions.py, and `explain` tries each value |
| attention, loss, compile | of our trainer what auto is; sdpa-flash; chunked, linear; none |
| every kernel | of other engines all that they have |
| norm, rope, swiglu | of our trainer what auto is |

Of all this only what the engine has (`Features.axes`, `schedules`, `kernels`, …). Two sequences of which two ranks have
a half each are never better than one each, so cp and micro-batch have no common divisor. What is fixed takes the place
of an axis's values, whatever they are.
"""

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cache, cached_property
from itertools import product
from math import gcd
from typing import Any, NamedTuple, TypeVar

from dtlayout.base.errors import InvalidConfig
from dtlayout.costmodel.cache_keys import StateLayout
from dtlayout.costmodel.engine import OWN_ENGINE
from dtlayout.costmodel.engine_rules import (
    allows_ep_overlap,
    check_base,
    check_copies_of_experts,
    check_data_parallel,
    check_fake_quant,
    check_recompute,
    check_scaled,
    check_zero,
    find_kept_whole,
    find_layout_lacks,
)
from dtlayout.costmodel.scenario import (
    Scenario,
    count_state_shards,
    engine_kernels,
    find_refusals,
    find_scenario_lacks,
    find_unsupported,
    find_update_problems,
    known_kernels,
)
from dtlayout.schedules.schedules import DEFAULT_SCHEDULE, SCHEDULES
from dtlayout.spec.context_parallel import DEFAULT_CONTEXT_METHOD
from dtlayout.spec.kernel_records import Kernel
from dtlayout.spec.kernel_table import list_kernels
from dtlayout.spec.kernels import COMPILE_OPTIONS, Kernels, OpenKernels
from dtlayout.spec.layout import Layout
from dtlayout.spec.model_shape import divisors
from dtlayout.spec.recompute import Recompute

T = TypeVar("T")
ScheduleChoice = tuple[str, int]
"""Values of schedule and virtual_stages."""

RECOMPUTE = ("none", "selective", "keep-attention", "full", "every-2", "every-4", "every-8")
_OFF = Layout()
_CONSTANT = ("stage_layers", "offload")
"""Fields of Layout that are not searched: each has the value that a user fixes, or else its default."""
MOST_VIRTUAL_STAGES = 64
"""Most virtual stages of a rank. With v of them the bubble is 1/v of 1F1B's, so more would gain nothing."""
KERNEL_NAMES = [f.name for f in fields(Kernels) if f.name not in COMPILE_OPTIONS]


def searched_kernels() -> dict[str, list[str]]:
    """Kernels that a search compares, by operation; the default before the others."""
    found = defaultdict[str, list[str]](list)
    for kernel in list_kernels(Kernel):
        if kernel.is_searched:
            found[kernel.operation].append(kernel.name)
            found[kernel.operation].sort(key=lambda name: name != getattr(Kernels(), kernel.operation))
    return dict(found)


class Degrees(NamedTuple):
    """The degrees of a layout, with dp as one number."""

    tp: int
    pp: int
    cp: int
    ep: int
    dp: int

    @classmethod
    def of(cls, layout: Layout) -> "Degrees":
        """The degrees of `layout`."""
        return cls(layout.tp, layout.pp, layout.cp, layout.ep, layout.dp)


class StateSharding(NamedTuple):
    """Number of data-parallel ranks that share the state, and the stage of ZeRO."""

    dp_shard: int
    zero: int

    def of(self, layout: Layout) -> Layout:
        """The layout with its state shared in this way."""
        return replace(layout, dp_shard=self.dp_shard, dp_replicate=layout.dp // self.dp_shard, zero=self.zero)  # type: ignore[arg-type]


@dataclass(frozen=True)
class Space:
    """The layouts that a search looks at, by axis."""

    scenario: Scenario
    """Model, batch, cluster and engine."""
    fixed: Mapping[str, Any] = field(default_factory=dict)
    """Name → the only value that a user allows."""
    avoided: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    """Name → values that a user rules out."""
    granted: tuple[str, ...] = ()
    """Axes that the engine does not have, but that are searched to say what they would be worth."""

    def __post_init__(self) -> None:
        problems, asked = find_scenario_lacks(self.scenario), dict(self.constant)
        asked.pop("stage_layers", None)  # of which each layout says whether it is legal
        asked |= {name: self.fixed[name] for name in ("ep_overlap", "ep_dispatcher") if name in self.fixed}
        if any(value != getattr(_OFF, name) for name, value in asked.items()):
            problems = find_unsupported(self.scenario, Layout(**asked))
        if problems:
            raise InvalidConfig(problems)

    def choose(self, name: str, values: Iterable[T]) -> list[T]:
        """Values of an axis that a user allows."""
        values = [self.fixed[name]] if name in self.fixed else values
        return [value for value in values if value not in self.avoided.get(name, ())]

    def has(self, layout: Layout, kernels: Kernels) -> bool:
        """Whether a layout and kernels have every fixed value, and no avoided one."""
        values = {**vars(layout), **vars(kernels)}
        asked = (*self.fixed, *self.avoided)
        return all(self.choose(name, [values[name]]) == [values[name]] for name in asked if name in values)

    def has_axis(self, name: str) -> bool:
        """Whether one of `KNOWN_AXES` is searched."""
        return name not in self._kept_whole and (name in self.granted or name in self.scenario.engine.features.axes)

    @cached_property
    def _kept_whole(self) -> Collection[str]:
        """Axes over which our trainer does not split this model, and other features of layouts that it allows not; of
        another program those over which no program does."""
        return find_kept_whole(self.scenario.engine, self.scenario.model)

    @cached_property
    def degrees(self) -> list[Degrees]:
        """All degrees; there are none if a fixed degree does not divide the GPUs, or the experts."""
        experts, num_gpus = self.scenario.model.experts, self.scenario.cluster.num_gpus
        found = []
        for tp in self._choose_degree("tp", num_gpus):
            for pp in self._choose_degree("pp", num_gpus // tp):
                for cp in self._choose_degree("cp", num_gpus // (tp * pp)):
                    dp, left = divmod(num_gpus, tp * pp * cp)
                    if left or not dp:
                        continue
                    shared = gcd(experts.number, dp * cp * tp) if experts else 1
                    found += [
                        Degrees(tp, pp, cp, ep, dp) for ep in self._choose_degree("ep", shared) if shared % ep == 0
                    ]
        return found

    def _choose_degree(self, name: str, num_ranks: int) -> list[int]:
        return self.choose(name, divisors(max(1, num_ranks)) if self.has_axis(name) else (1,))

    def orders(self, pp: int) -> list[ScheduleChoice]:
        """Schedules for `pp` pipeline ranks, each with a number of virtual stages."""
        layers = self.scenario.model.num_layers
        found: list[ScheduleChoice] = [(DEFAULT_SCHEDULE, 1)]
        if pp > 1:
            smallest = -(-layers // (pp * MOST_VIRTUAL_STAGES))
            fewest = {-(-layers // (pp * size)) for size in range(smallest, layers // pp + 1)}
            virtual_stages = {self.fixed["virtual_stages"]} if "virtual_stages" in self.fixed else fewest | {1}
            usable = [v for v in sorted(virtual_stages) if v == 1 or pp * v <= layers]
            tried = [each for each in SCHEDULES.values() if each.is_searched or each.name == self.fixed.get("schedule")]
            found = [(each.name, v) for each in tried for v in usable if each.takes(pp, v)]
        if "schedule" in self.fixed:  # also one that is not legal here, which is then refused as such
            wanted = self.fixed["schedule"]
            found = [order for order in found if order[0] == wanted] or [(wanted, self.fixed.get("virtual_stages", 1))]
        stages = self.choose("virtual_stages", sorted({v for _, v in found}))
        schedules = self.choose("schedule", dict.fromkeys(schedule for schedule, _ in found))
        return [(schedule, v) for schedule, v in found if schedule in schedules and v in stages]

    def shardings(self, degrees: Degrees) -> list[StateSharding]:
        """Ways to share the state among data-parallel ranks, the least sharded first."""
        cluster, (tp, pp, cp, ep, dp) = self.scenario.cluster, degrees
        joined = [max(1, gpus // (tp * cp)) for gpus in (cluster.gpus_per_node, cluster.gpus_linked)]
        powers = [2**i for i in range(dp.bit_length())]
        groups = {n for n in (*joined, *powers, *(dp // n for n in powers)) if dp % n == 0}
        if "dp_replicate" in self.fixed:
            copies = self.fixed["dp_replicate"]
            groups = {dp // copies} if dp % copies == 0 else set()
        shards = [n for n in self.choose("dp_shard", sorted(groups)) if dp % n == 0]
        shards = [n for n in shards if dp // n not in self.avoided.get("dp_replicate", ())]
        shards = [n for n in shards if dp // n == self.fixed.get("dp_replicate", dp // n)]
        are_shared = {n: count_state_shards(StateLayout(pp, dp, n, cp, tp, ep, 1, "device")) > 1 for n in shards}  # type: ignore[arg-type]
        # Our trainer computes with copies in another format, which zero 3 frees between uses on one rank too.
        alone = (1, 3) if dp == 1 and self.scenario.engine.name == OWN_ENGINE else (1,)
        # A fixed stage of ZeRO asks for shards where there are ranks to share the state.
        zeros = {n: (1, 2, 3) if are_shared[n] else alone for n in shards}
        ways = [
            StateSharding(n, zero)
            for n in shards
            for zero in self.choose("zero", zeros[n])
            if dp == 1 or zero in zeros[n]
        ]
        engine = self.scenario.engine
        return [
            way
            for way in ways
            if not check_zero(engine, way.zero, pp)
            and not check_data_parallel(engine, dp // way.dp_shard, way.dp_shard)
            and not check_copies_of_experts(engine, ep, dp // way.dp_shard, way.dp_shard * cp * tp)
            and self._allows_update(way.dp_shard)
        ]

    @cached_property
    def _allows_update(self) -> Callable[[int], bool]:
        """Whether the optimizer's update is right for a state in so many shards."""
        return cache(lambda shards: not find_update_problems(self.scenario, Layout(dp_shard=shards)))

    def micro_batches(self, cp: int) -> list[int]:
        """Sizes of the micro-batch: divisors of the global batch that go with `cp`."""
        found = self.choose("micro_batch", divisors(self.scenario.batch.global_batch))
        return found if {"cp", "micro_batch"} <= self.fixed.keys() else [n for n in found if gcd(n, cp) == 1]

    def sequence_parallel(self, tp: int) -> list[bool]:
        """Values of sequence_parallel: on, and off if that makes a difference."""
        wanted = (False,) if "sequence_parallel" in self._kept_whole else (True, False)
        return self.choose("sequence_parallel", wanted if tp > 1 else (True,))

    def cp_methods(self, cp: int) -> list[str]:
        """Values of cp_method: all of the engine's that the model allows if they make a difference, else one."""
        methods = [name for name in self.scenario.engine.features.cp_methods if name not in self._kept_whole]
        return self.choose("cp_method", methods) if cp > 1 else [self.fixed.get("cp_method", DEFAULT_CONTEXT_METHOD)]

    def tp_overlap(self, tp: int) -> list[bool]:
        """Values of tp_overlap: off, and on if that makes a difference."""
        return self.choose("tp_overlap", (False, True) if tp > 1 and self.has_axis("tp_overlap") else (False,))

    def exchanges(self, ep: int, *, is_interleaved: bool, recompute: str) -> list[tuple[bool, str]]:
        """Values of ep_overlap and ep_dispatcher, the usual ones first: further ones where they make a difference."""
        overlaps = self.choose("ep_overlap", (False, True) if ep > 1 and self.has_axis("ep_overlap") else (False,))
        is_allowed = ep == 1 or allows_ep_overlap(self.scenario.engine, recompute, is_interleaved)
        legal = [each for each in overlaps if not each or is_allowed]
        known = self.scenario.engine.features.ep_dispatchers if ep > 1 else (_OFF.ep_dispatcher,)
        leaves_links = ep > self.scenario.cluster.gpus_linked
        return list(product(legal, self.choose("ep_dispatcher", known if leaves_links else known[:1])))

    @cached_property
    def recompute(self) -> list[str]:
        """Kinds of recomputation that the engine has."""
        layers, engine = self.scenario.model.num_layers, self.scenario.engine
        kinds = [kind for kind in RECOMPUTE if Recompute.parse(kind).every <= layers]
        return self.choose(
            "recompute", [kind for kind in kinds if not check_recompute(engine, kind, self.scenario.model)]
        )

    @cached_property
    def kernels(self) -> list[Kernels]:
        """Kernels that the engine has, its usual ones first."""
        values = {name: self.choose(name, found) for name, found in self.known_kernels.items()}
        combinations: list[dict[str, Any]] = [
            dict(zip(values, each, strict=True)) for each in product(*values.values())
        ]
        if self.scenario.engine.name != OWN_ENGINE:
            return [Kernels(**each) for each in combinations]
        return [engine_kernels(self.scenario, OpenKernels(**each), Layout()) for each in combinations]

    @cached_property
    def known_kernels(self) -> dict[str, list[str]]:
        """Kernels that are compared, by operation, the usual one first: some of ours, or all of another engine."""
        if self.scenario.engine.name != OWN_ENGINE:
            return {name: list(found) for name, found in known_kernels(self.scenario.engine).items()}
        searched = searched_kernels() | {"compile": ["none"]}
        usual = engine_kernels(self.scenario, OpenKernels(), Layout()).choices
        return {name: list(dict.fromkeys([kernel, *searched.get(name, ())])) for name, kernel in usual.items()}

    @cached_property
    def constant(self) -> dict[str, Any]:
        """Fields of Layout that no axis varies."""
        return {name: self.fixed[name] for name in _CONSTANT if name in self.fixed}

    @property
    def offload(self) -> Any:
        """Value of offload: none, unless another one is fixed."""
        return self.fixed.get("offload", _OFF.offload)

    def allows_kernels(self, kernels: Kernels, layout: Layout = _OFF) -> bool:
        """Whether the engine runs these kernels on this device and in this precision, with a layout."""
        return not find_refusals(self.scenario, self.without_granted(layout), kernels)

    def allows_tensor(self, tp: int, cp: int, method: str, sequence_parallel: bool, overlap: bool = False) -> bool:
        """Whether tp and cp split the model: `_allows`, with pp and dp off."""
        layout = Layout(tp=tp, cp=cp, cp_method=method, sequence_parallel=sequence_parallel, tp_overlap=overlap)
        return self._allows(layout)

    def allows_pipeline(self, pp: int, dp: int, order: ScheduleChoice, micro_batch: int) -> bool:
        """Whether stages and microbatches come out even: `_allows`, with tp and cp off."""
        if self.scenario.batch.global_batch % (dp * micro_batch):
            return False  # by far the most frequent reason, found without building a layout
        schedule, v = order
        cuts = {name: value for name, value in self.constant.items() if name == "stage_layers"}
        return self._allows(
            Layout(pp=pp, schedule=schedule, virtual_stages=v, dp_shard=dp, micro_batch=micro_batch, **cuts)
        )

    def without_granted(self, layout: Layout) -> Layout:
        """The layout without the axes that were granted, which the engine does not have."""
        off: dict[str, Any] = {name: getattr(_OFF, name) for name in self.granted}
        return replace(layout, **off) if off else layout

    def _allows(self, layout: Layout) -> bool:
        """Whether a layout is legal, and the engine has all of it that was not granted."""
        scenario, had = self.scenario, self.without_granted(layout)
        legal = layout.is_legal(scenario.model, scenario.batch)
        lacks = find_layout_lacks(scenario.engine, had, scenario.model) if legal else []
        broken = check_base(scenario.precision, scenario.model, layout.tp)
        broken += check_scaled(scenario.engine, scenario.precision, scenario.model, had)
        broken += check_fake_quant(scenario.precision, scenario.model, had)
        return legal and not lacks and not broken
