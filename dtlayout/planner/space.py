"""Space: the layouts and kernels that a search looks at, and what a user fixes or rules out.

N GPUs, n GPUs of a node, L blocks, B global batch.

| axis | values |
|---|---|
| tp | divisors of N; beyond the fast links too, the cost model knows that it is slow there |
| pp | divisors of N / tp |
| schedule | 1f1b; for pp > 1 all that are known, with the fewest virtual stages for each size of a stage |
| virtual_stages | 64 at most |
| dp_shard | 1, all of dp, groups of 1, 2, 4, … whole nodes or of all that fast links join; dp_replicate is the rest |
| zero | 1, 2, 3 as the engine has them; only 1 at dp_shard = 1, where nothing is sharded |
| micro_batch | divisors of B |
| sequence_parallel | on; for tp > 1 also off |
| recompute | none, selective, keep-attention, full, every-2, every-4, every-8 |
| attention, norm | what they are by default; sdpa-flash, sdpa-math; fused, eager |
| loss, rope, swiglu, compile | what they are by default, for our trainer what auto is; others where they are fixed |

cp and ep stay 1, which is all that the trainer takes, and models with experts are refused. What is fixed takes the
place of an axis's values.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cached_property
from itertools import product
from typing import Any, NamedTuple, TypeVar

from dtlayout import toml
from dtlayout.costmodel.scenario import Scenario, engine_kernels, find_refusals
from dtlayout.errors import InvalidConfig
from dtlayout.kernel import Kernel, list_kernels
from dtlayout.kernels import Kernels, OpenKernels
from dtlayout.layout import Layout
from dtlayout.model_shape import divisors
from dtlayout.pipelining.schedules import DEFAULT_SCHEDULE, SCHEDULES
from dtlayout.recompute import Recompute

T = TypeVar("T")
Order = tuple[str, int]
"""schedule and virtual_stages."""

RECOMPUTE = ("none", "selective", "keep-attention", "full", "every-2", "every-4", "every-8")
MOST_VIRTUAL_STAGES = 64
"""Virtual stages of a rank: with v the bubble is 1/v of 1F1B's, and more than these have nothing left to win."""
KERNEL_NAMES = [f.name for f in fields(Kernels)]
CHOICES: dict[str, type] = {f.name: type(getattr(Layout(), f.name)) for f in fields(Layout)}
CHOICES |= dict.fromkeys(KERNEL_NAMES, str)
"""Everything that can be fixed or avoided: name → type."""


def searched_kernels() -> dict[str, list[str]]:
    """Kernels that a search compares, by operation; the default before the others."""
    found = defaultdict[str, list[str]](list)
    for kernel in list_kernels(Kernel):
        if kernel.is_searched:
            found[kernel.operation].append(kernel.name)
            found[kernel.operation].sort(key=lambda name: name != getattr(Kernels(), kernel.operation))
    return dict(found)


def parse_choice(text: str) -> tuple[str, Any]:
    """`name=value` of a layout's field or a kernel, the value as TOML writes it; InvalidConfig says what would work.

    >>> parse_choice("recompute=full"), parse_choice("tp=2")
    (('recompute', 'full'), ('tp', 2))
    """
    name, equals, written = (part.strip() for part in text.partition("="))
    name = name.removeprefix("layout.").removeprefix("kernels.")
    if not equals or not written:
        raise InvalidConfig(f"{text!r} is no choice; write name=value, such as tp=2")
    if name not in CHOICES:
        raise InvalidConfig(toml.describe_unknown_key(name, CHOICES))
    value: Any = toml.parse_value(written)
    value = tuple(value) if isinstance(value, list) else value
    if type(value) is not CHOICES[name]:
        kinds = {int: "a whole number", bool: "true or false", str: "a word", tuple: "a list such as [3, 3, 2]"}
        raise InvalidConfig(f"{name}={written} must be {kinds[CHOICES[name]]}")
    checked: dict[str, Any] = {name: value}
    OpenKernels(**checked) if name in KERNEL_NAMES else Layout(**checked)
    return name, value


class Sharding(NamedTuple):
    """How data-parallel ranks share the state."""

    dp_shard: int
    zero: int

    def of(self, layout: Layout) -> Layout:
        """The layout with its state shared this way."""
        return replace(layout, dp_shard=self.dp_shard, dp_replicate=layout.dp // self.dp_shard, zero=self.zero)  # type: ignore[arg-type]


@dataclass(frozen=True)
class Space:
    """The layouts that a search looks at, by axis."""

    scenario: Scenario
    """Model, batch, cluster and engine."""
    fixed: Mapping[str, Any] = field(default_factory=dict)
    """Name → the only value."""
    avoided: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    """Name → values that are left out."""

    def __post_init__(self) -> None:
        if problems := self.scenario.engine.model_problems(self.scenario.model):
            raise InvalidConfig(problems)
        if self.scenario.model.experts is not None:
            raise InvalidConfig(
                f"model {self.scenario.model.name} is a mixture of experts, whose layouts are not searched yet; "
                f"dtlayout explain --engine megatron predicts one of them"
            )

    def choose(self, name: str, values: Iterable[T]) -> list[T]:
        """The values of an axis that a user leaves."""
        values = [self.fixed[name]] if name in self.fixed else values
        return [value for value in values if value not in self.avoided.get(name, ())]

    @cached_property
    def degrees(self) -> list[tuple[int, int, int]]:
        """tp, pp and dp; a degree that is fixed and does not divide the GPUs leaves none."""
        num_gpus, cp = self.scenario.cluster.num_gpus, self.fixed.get("cp", 1)
        return [
            (tp, pp, num_gpus // (cp * tp * pp))
            for tp in self.choose("tp", divisors(num_gpus))
            for pp in self.choose("pp", divisors(max(1, num_gpus // (cp * tp))))
            if num_gpus % (cp * tp * pp) == 0
        ]

    def orders(self, pp: int) -> list[Order]:
        """Schedules with their virtual stages."""
        layers = self.scenario.model.num_layers
        found: list[Order] = [(DEFAULT_SCHEDULE, 1)]
        if pp > 1:
            smallest = -(-layers // (pp * MOST_VIRTUAL_STAGES))
            fewest = {-(-layers // (pp * size)) for size in range(smallest, layers // pp + 1)}
            virtual_stages = {self.fixed["virtual_stages"]} if "virtual_stages" in self.fixed else fewest | {1}
            usable = [v for v in sorted(virtual_stages) if v == 1 or pp * v <= layers]
            found = [(name, v) for name, schedule in SCHEDULES.items() for v in usable if schedule.takes(pp, v)]
        if "schedule" in self.fixed:  # also one that is not legal here, which is then refused as such
            wanted = self.fixed["schedule"]
            found = [order for order in found if order[0] == wanted] or [(wanted, self.fixed.get("virtual_stages", 1))]
        stages = self.choose("virtual_stages", sorted({v for _, v in found}))
        schedules = self.choose("schedule", dict.fromkeys(schedule for schedule, _ in found))
        return [(schedule, v) for schedule, v in found if schedule in schedules and v in stages]

    def shardings(self, tp: int, dp: int) -> list[Sharding]:
        """Ways to share the state, the least sharded first."""
        cluster = self.scenario.cluster
        group = max(1, cluster.gpus_per_node // tp)
        groups = {1, dp, max(1, cluster.gpus_linked // tp)}
        while group < dp:
            groups.add(group)
            group *= 2
        groups = {n for n in groups if dp % n == 0}
        if "dp_replicate" in self.fixed:
            copies = self.fixed["dp_replicate"]
            groups = {dp // copies} if dp % copies == 0 else set()
        shards = [n for n in self.choose("dp_shard", sorted(groups)) if dp % n == 0]
        shards = [n for n in shards if dp // n not in self.avoided.get("dp_replicate", ())]
        shards = [n for n in shards if dp // n == self.fixed.get("dp_replicate", dp // n)]
        pp = cluster.num_gpus // (self.constant.get("cp", 1) * tp * dp)
        ways = [Sharding(n, zero) for n in shards for zero in self.choose("zero", (1, 2, 3) if n > 1 else (1,))]
        return [way for way in ways if not self.scenario.engine.zero_problems(way.zero, pp)]

    @cached_property
    def micro_batches(self) -> list[int]:
        """Divisors of the global batch."""
        return self.choose("micro_batch", divisors(self.scenario.batch.global_batch))

    def sequence_parallel(self, tp: int) -> list[bool]:
        """On, and off where that makes a difference."""
        return self.choose("sequence_parallel", (True, False) if tp > 1 else (True,))

    @cached_property
    def recompute(self) -> list[str]:
        """How much is computed again, as far as the engine can."""
        layers, engine = self.scenario.model.num_layers, self.scenario.engine
        kinds = [kind for kind in RECOMPUTE if Recompute.parse(kind).every <= layers]
        return self.choose("recompute", [kind for kind in kinds if not engine.recompute_problems(kind)])

    @cached_property
    def kernels(self) -> list[Kernels]:
        """Kernels that the trainer has; the fast ones first."""
        searched = searched_kernels()
        usual = asdict(engine_kernels(self.scenario, OpenKernels(), Layout()))
        values = {name: list(dict.fromkeys([kernel, *searched.get(name, ())])) for name, kernel in usual.items()}
        chosen = [self.choose(name, found) for name, found in values.items()]
        combinations = [OpenKernels(**dict(zip(values, each, strict=True))) for each in product(*chosen)]
        return [engine_kernels(self.scenario, each, Layout()) for each in combinations]

    @cached_property
    def constant(self) -> dict[str, Any]:
        """Fields of Layout that no axis varies."""
        return {name: self.fixed[name] for name in ("cp", "stage_layers", "tp_overlap") if name in self.fixed}

    def allows_kernels(self, kernels: Kernels, tp: int = 1, recompute: str = "none") -> bool:
        """Whether the trainer has these kernels on this device in this precision, with these choices beside them."""
        return not find_refusals(self.scenario, Layout(tp=tp, recompute=recompute), kernels)

    def allows_tensor(self, tp: int, sequence_parallel: bool) -> bool:
        """Whether tp splits the model: `Layout.is_legal`, with every other axis off."""
        overlap = self.fixed.get("tp_overlap", False)
        layout = Layout(tp=tp, sequence_parallel=sequence_parallel, tp_overlap=overlap)
        return layout.is_legal(self.scenario.model, self.scenario.batch)

    def allows_pipeline(self, pp: int, order: Order, dp: int, micro_batch: int) -> bool:
        """Whether stages and microbatches come out even, `Layout.is_legal`, and the engine has the schedule."""
        if self.scenario.batch.global_batch % (dp * micro_batch):
            return False  # by far the most frequent reason, found without building a layout
        schedule, v = order
        layout = Layout(
            pp=pp, schedule=schedule, virtual_stages=v, dp_shard=dp, micro_batch=micro_batch, **self.constant
        )
        legal = layout.is_legal(self.scenario.model, self.scenario.batch)
        return legal and not self.scenario.engine.layout_problems(layout)
