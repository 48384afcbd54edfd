"""Neighbours: the layouts near one that are worth trying, for everybody who tries some.

| who tries them | neighbours |
|---|---|
| explain.py, on the same GPUs | `find_moves`, `find_splits`, `other_kernels` |
| explain.py, on more GPUs | `grow` |
| verdicts.py: other choices than the best's | `list_choices`, `choose` |
| suggestions.py: what no search tries | `has_splits`, `with_schedule` |
| baselines.py: the Playbook's last step | `list_playbook_changes` |

A neighbour need not be legal, or fit, unless its function says so: whoever tries it looks.
"""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import product
from typing import Any, Literal

from dtlayout.costmodel.engine_rules import check_recompute
from dtlayout.costmodel.estimate import Estimate, Estimator
from dtlayout.costmodel.scenario import Scenario
from dtlayout.planner.space import KERNEL_NAMES, RECOMPUTE, Space
from dtlayout.planner.stage_balance import MOST_STAGES, balance_memory, balance_time
from dtlayout.schedules.record import PipelineSchedule
from dtlayout.schedules.schedules import DEFAULT_SCHEDULE, SCHEDULES, schedule_with
from dtlayout.spec.batch import Batch
from dtlayout.spec.kernel_records import Kernel
from dtlayout.spec.kernel_table import list_kernels
from dtlayout.spec.kernels import Kernels
from dtlayout.spec.layout import Layout
from dtlayout.spec.layout_keys import OFFLOADS
from dtlayout.spec.model_shape import divisors

MICRO_BATCHES = (8, 4, 2, 1)
"""Sequences of a micro-batch that baselines try, largest first."""
_TRADES = (
    ("tp", "dp_shard"), ("tp", "dp_replicate"), ("tp", "pp"), ("pp", "dp_shard"), ("pp", "dp_replicate"),
    ("dp_replicate", "dp_shard"), ("cp", "dp_shard"), ("cp", "dp_replicate"), ("cp", "tp"), ("cp", "pp"),
)  # fmt: skip
"""Pairs of degrees of which one grows as the other one shrinks."""
_ZERO: tuple[Literal[1, 2, 3], ...] = (1, 2, 3)
_RECOMPUTE = ("none", "selective", "keep-attention", "every-4", "every-2", "full")
"""Kinds of recomputation that moves try."""
_COMPARED_RECOMPUTE = RECOMPUTE[:4]
"""Kinds of recomputation that are compared with the best layout's."""
_MOST_VIRTUAL_STAGES = 8


def find_moves(layout: Layout, batch: Batch, num_layers: int) -> Iterator[tuple[str, Layout]]:
    """Each single change on as many GPUs: the key that changes, and the layout then. Some layouts come twice."""
    for knob, partner in _TRADES:
        both = getattr(layout, knob) * getattr(layout, partner)
        for degree in divisors(both):
            yield knob, _settle(layout, {knob: degree, partner: both // degree})
    settings: dict[str, Iterable[Any]] = {
        "micro_batch": divisors(max(1, batch.global_batch // layout.dp)),
        "zero": _ZERO,
        "recompute": _RECOMPUTE,
        "sequence_parallel": (False, True) if layout.tp > 1 else (),
        "tp_overlap": (False, True) if layout.shards_sequence else (),
        "ep": divisors(layout.dp * layout.cp * layout.tp) if layout.ep > 1 else (),
        "stage_layers": ((),),
        "offload": OFFLOADS,
    }
    for knob, values in settings.items():
        for value in values:
            yield knob, replace(layout, **{knob: value})
    if layout.pp > 1:
        most = max(1, min(_MOST_VIRTUAL_STAGES, num_layers // layout.pp))
        for (name, schedule), v in product(SCHEDULES.items(), range(1, most + 1)):
            is_tried = schedule.is_searched or v == schedule.least_virtual_stages
            if is_tried and schedule.takes(layout.pp, v):
                yield "schedule", _settle(layout, {"schedule": name, "virtual_stages": v})


def has_splits(layout: Layout) -> bool:
    """Whether other numbers of blocks on the stages are worth trying: there are several stages, and not too many."""
    return 1 < layout.num_stages <= MOST_STAGES


def find_splits(estimator: Estimator, layout: Layout, kernels: Kernels) -> Iterator[Layout]:
    """The layout with other numbers of blocks on its stages: balanced by time, and by memory."""
    if has_splits(layout):
        yield balance_time(estimator, layout, kernels)
        yield balance_memory(estimator, layout, kernels)


def other_kernels(kernels: Kernels) -> Iterator[tuple[str, Kernels]]:
    """Each change of one kernel to one that needs no package: the key that changes, and the kernels then.

    Kernels that predictions do not tell apart are left out.
    """
    own = [(each.operation, each.name) for each in list_kernels(Kernel) if each.is_priced and not each.package]
    for knob, value in (*own, ("compile", "blocks"), ("compile", "none")):
        others = replace(kernels, **{knob: value})  # type: ignore[arg-type]
        if others != kernels:
            yield knob, others


def grow(scenario: Scenario, layout: Layout, factor: int) -> Iterator[Layout]:
    """Legal layouts on `factor` (a power of 2) times the GPUs; tp stays among those that fast links join."""
    most_tp = max(layout.tp, scenario.cluster.gpus_linked)
    for tp, pp in product(divisors(factor), repeat=2):
        if factor % (tp * pp) or layout.tp * tp > most_tp:
            continue
        degrees = {"tp": layout.tp * tp, "pp": layout.pp * pp, "dp_shard": layout.dp_shard * (factor // (tp * pp))}
        for micro_batch in {1, layout.micro_batch}:
            grown = _settle(layout, {**degrees, "micro_batch": micro_batch})
            if grown.is_legal(scenario.model, scenario.batch):  # whatever ZeRO and recomputation
                yield from (replace(grown, zero=z, recompute=r) for z, r in product(_ZERO, _RECOMPUTE))


def list_choices(space: Space, best: Estimate) -> Iterator[tuple[str, Any]]:
    """Names and values of the choices that are compared with those of the best; a user's own choices stay."""
    layout, num_gpus = best.layout, space.scenario.cluster.num_gpus
    others: dict[str, list[Any]] = {}
    for axis in ("tp", "pp", "cp", "ep"):
        degree = getattr(layout, axis)
        around = [degree // 2] * (degree % 2 == 0) + [2 * degree] * (num_gpus % (2 * degree) == 0)
        others[axis] = around if space.has_axis(axis) and (axis != "ep" or space.scenario.model.experts) else []
    others["cp_method"] = space.cp_methods(layout.cp) if layout.cp > 1 else []
    size = layout.micro_batch
    others["micro_batch"] = [size // 2] * (size % 2 == 0) + [2 * size]
    is_open = layout.pp > 1 and "schedule" not in space.fixed  # which says with how many virtual stages it goes
    others["virtual_stages"] = [1 if layout.virtual_stages > 1 else 2] if is_open else []
    others["zero"] = [1, 2, 3] if layout.dp > 1 else []
    others["recompute"] = [
        each for each in _COMPARED_RECOMPUTE if not check_recompute(space.scenario.engine, each, space.scenario.model)
    ]
    others["sequence_parallel"] = [not layout.sequence_parallel] if layout.tp > 1 else []
    others["tp_overlap"] = [not layout.tp_overlap] if layout.shards_sequence and space.has_axis("tp_overlap") else []
    others |= space.known_kernels
    own = vars(layout) | vars(best.kernels)
    for name, values in others.items():
        if name not in space.fixed:
            yield from ((name, value) for value in space.choose(name, values) if value != own[name])


def choose(best: Estimate, name: str, value: Any, num_gpus: int) -> tuple[Layout, Kernels]:
    """The best with one choice changed; data parallelism takes up the GPUs where that comes out even."""
    if name in KERNEL_NAMES:
        return best.layout, replace(best.kernels, **{name: value})
    changed = _without_schedule_alone(replace(best.layout, **{name: value}))
    if not changed.sequence_parallel:
        changed = replace(changed, tp_overlap=False)  # which has no effect alone
    if changed.is_pipelined and name == "virtual_stages":
        changed = replace(changed, schedule=schedule_with(value))
    return spread(changed, num_gpus) or changed if name in ("tp", "pp", "cp") else changed, best.kernels


def with_schedule(layout: Layout, kernels: Kernels, schedule: PipelineSchedule) -> tuple[Layout, Kernels]:
    """The layout in another order, and the kernels; tp_overlap and compile are off where that order excludes them."""
    v = int(min(max(layout.virtual_stages, schedule.least_virtual_stages), schedule.most_virtual_stages))
    overlaps = layout.tp_overlap and not schedule.splits_backward
    ordered = replace(layout, schedule=schedule.name, virtual_stages=v, tp_overlap=overlaps)
    is_eager = schedule.splits_backward and kernels.compiles_blocks
    return ordered, replace(kernels, compile="none") if is_eager else kernels


def spread(layout: Layout, num_gpus: int) -> Layout | None:
    """The layout with data parallelism over all GPUs that its other axes leave; None where they don't come out even."""
    alone = replace(layout, dp_shard=1, dp_replicate=1)
    dp, left = divmod(num_gpus, alone.world_size)
    return None if left else replace(alone, dp_shard=dp)


def list_playbook_changes(name: str, space: Space, layout: Layout) -> list[dict[str, Any]]:
    """Changes of a degree, or of the micro-batch, that the Playbook's step 3 tries, in its order."""
    cluster, layers = space.scenario.cluster, space.scenario.model.num_layers
    match name:
        case "tp":  # up to what fast links join
            return [{"tp": tp} for tp in divisors(cluster.gpus_linked) if tp > layout.tp]
        case "dp":  # more of it with ZeRO-3, or with fewer stages, at the same batch
            fewer = [{"pp": pp} for pp in reversed(divisors(layout.pp)) if pp < layout.pp]
            return [*fewer, *({"pp": 1, "zero": 3, "recompute": r} for r in (layout.recompute, "full"))]
        case "pp":  # where data-parallel communication is what is waited for
            stages = [pp for pp in divisors(cluster.num_gpus) if layout.pp < pp <= layers]
            return [{"pp": pp, "zero": min(layout.zero, 2)} for pp in stages]
    return [{"micro_batch": n} for n in MICRO_BATCHES if n != layout.micro_batch]


def _settle(layout: Layout, changes: dict[str, Any]) -> Layout:
    """The changed layout, without a schedule if it has no pipeline, and without a stage split of other stages."""
    changed = _without_schedule_alone(replace(layout, **changes))
    return changed if changed.num_stages == layout.num_stages else replace(changed, stage_layers=())


def _without_schedule_alone(layout: Layout) -> Layout:
    """The layout with the default schedule if it has no pipeline."""
    return layout if layout.is_pipelined else replace(layout, schedule=DEFAULT_SCHEDULE, virtual_stages=1)
