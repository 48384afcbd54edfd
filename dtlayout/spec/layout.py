"""Layout: how one training step is spread over the ranks, and the rules that a layout must keep.

Axes, outermost first: pp, dp_replicate, dp_shard, cp, tp. A degree of 1 means that the axis is off. `Layout.problems`
lists everything that is wrong with a layout at once, each problem in one line with the nearest values that work.
"""

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from itertools import chain
from math import gcd, inf
from typing import Any, Literal, NamedTuple

from dtlayout.base import toml
from dtlayout.base.errors import InvalidConfig, InvalidLayout
from dtlayout.base.formatting import plural
from dtlayout.base.validators import one_of, ranged
from dtlayout.schedules.placement import Placement
from dtlayout.schedules.schedules import DEFAULT_SCHEDULE, SCHEDULES, PipelineSchedule, find_schedule
from dtlayout.spec.batch import Batch
from dtlayout.spec.context_parallel import CONTEXT_METHODS, DEFAULT_CONTEXT_METHOD, ContextMethod
from dtlayout.spec.layout_names import name_layout, read_name
from dtlayout.spec.model_shape import ModelShape, divisors
from dtlayout.spec.recompute import Recompute

AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
OFFLOADS = ("none", "activations", "optimizer", "both")
"""Values of `layout.offload`."""
_CHOICES: dict[str, Collection[Any]] = {
    "zero": (1, 2, 3), "cp_method": CONTEXT_METHODS, "ep_dispatcher": ("alltoall", "deepep"),
    "offload": OFFLOADS,
}  # fmt: skip
_NO_VIRTUAL_STAGES: dict[str, Any] = {"schedule": DEFAULT_SCHEDULE, "virtual_stages": 1}


class Offload:
    """What `offload` says lies in the host's memory."""

    offload: str
    """One of OFFLOADS."""

    @property
    def offloads_activations(self) -> bool:
        """Whether what blocks keep for their backward lies in the host's memory until then."""
        return self.offload in ("activations", "both")

    @property
    def offloads_state(self) -> bool:
        """Whether parameters, gradients and the optimizer's state lie in the host's memory."""
        return self.offload in ("optimizer", "both")


@dataclass(frozen=True, kw_only=True)
class Layout(Offload):
    """Degrees, micro-batch, schedule, ZeRO stage and recomputation of one training step."""

    pp: int = ranged("must be at least 1", 1)
    """Pipeline-parallel degree: ranks that each hold some of the blocks."""
    dp_replicate: int = ranged("must be at least 1", 1)
    """Copies of the sharded model state; with a dp_shard above 1 this is HSDP."""
    dp_shard: int = ranged("must be at least 1", 1)
    """Ranks over which FSDP2 shards the model state."""
    cp: int = ranged("must be at least 1", 1)
    """Context-parallel degree: ranks that share one sequence."""
    cp_method: str = one_of(CONTEXT_METHODS, DEFAULT_CONTEXT_METHOD)
    """How cp's ranks attend to each other's tokens: keys and values go from rank to rank (ring), all come at once
    (gather), or each rank attends for some heads to all tokens (all-to-all); without effect at cp = 1."""
    tp: int = ranged("must be at least 1", 1)
    """Tensor-parallel degree: ranks that share every matmul; keep it inside one node."""
    ep: int = ranged("must be at least 1", 1)
    """Expert-parallel degree: ranks of a stage, neighbours among those of dp, cp and tp, that share the experts, which
    can only be predicted."""
    sequence_parallel: bool = True
    """Shard the residual stream and the norms over tp along the sequence; without effect at tp = 1."""
    tp_overlap: bool = False
    """Send what sequence parallelism gathers and scatters in pieces, while matmuls work on others; without effect at
    tp = 1."""
    ep_overlap: bool = False
    """Exchange the tokens of one microbatch while another one is computed; without effect at ep = 1."""
    ep_dispatcher: Literal["alltoall", "deepep"] = "alltoall"
    """How tokens are exchanged: a copy for each of a token's experts, or one for each node that has some of them
    (DeepEP, HybridEP); without effect inside a node."""
    micro_batch: int = ranged("must be at least 1", 1)
    """Sequences in one forward of one data-parallel rank."""
    schedule: str = one_of(SCHEDULES, DEFAULT_SCHEDULE)
    """Order of forwards and backwards in the pipeline."""
    virtual_stages: int = ranged("must be at least 1", 1)
    """Stages on each pipeline rank; above 1 only with a schedule that takes them."""
    stage_layers: tuple[int, ...] = ()
    """Blocks of each stage, first to last, where embedding and head may have stages of their own, with 0; empty deals
    them out by cost."""
    zero: Literal[1, 2, 3] = 1
    """What dp_shard shards: 1 optimizer state, 2 also gradients, 3 also parameters."""
    recompute: str = "none"
    """Blocks computed again in backward: none, full, every-N, or selective, keep-attention and keep-matmuls, which keep
    the results of both or of one of these operations."""
    offload: Literal["none", "activations", "optimizer", "both"] = "none"
    """What lies in the host's memory: what blocks keep for their backward, or parameters with their gradients and the
    optimizer's state, which the host updates; or both."""

    def __post_init__(self) -> None:
        values = vars(self)
        problems = [f"layout.{name}={values[name]} must be at least 1" for name in _POSITIVE if values[name] < 1]
        if min(self.stage_layers[1:-1], default=1) < 1 or min(self.stage_layers, default=0) < 0:
            problems.append(
                f"layout.stage_layers={list(self.stage_layers)} has a stage of nothing; only the first and the last "
                f"one, with embedding and head, need no blocks"
            )
        try:
            find_schedule(self.schedule)
        except InvalidConfig as error:
            problems += [f"layout.{problem}" for problem in error.problems]
        for name, allowed in _CHOICES.items():
            if values[name] not in allowed:
                problems.append(f"layout.{name}={values[name]!r} is unknown; use one of {list(allowed)}")
        try:
            Recompute.parse(self.recompute)
        except InvalidConfig as error:
            problems += error.problems
        if problems:
            raise InvalidLayout(problems)

    @property
    def dp(self) -> int:
        """Data-parallel degree: ranks that see different sequences."""
        return self.dp_replicate * self.dp_shard

    @property
    def world_size(self) -> int:
        """Ranks of the whole job."""
        return self.pp * self.dp * self.cp * self.tp

    @property
    def expert_dp(self) -> int:
        """Ranks of a stage that hold the same experts."""
        return self.dp * self.cp * self.tp // self.ep

    @property
    def num_stages(self) -> int:
        """Pieces that the model is cut into."""
        return self.pp * self.virtual_stages

    @property
    def is_pipelined(self) -> bool:
        """Whether stages lie on several ranks."""
        return self.pp > 1

    @property
    def placement(self) -> Placement:
        """Which pipeline rank holds which stage."""
        return find_schedule(self.schedule).place(self.pp, self.virtual_stages)

    @property
    def splits_backward(self) -> bool:
        """Whether gradients of weights come apart from those of inputs."""
        return self.is_pipelined and find_schedule(self.schedule).splits_backward

    @property
    def shards_sequence(self) -> bool:
        """Whether sequence parallelism has an effect."""
        return self.sequence_parallel and self.tp > 1

    @property
    def overlaps_tp(self) -> bool:
        """Whether matmuls hide a part of what tp sends."""
        return self.tp_overlap and self.shards_sequence

    @property
    def overlaps_ep(self) -> bool:
        """Whether computation hides a part of what ep exchanges."""
        return self.ep_overlap and self.ep > 1

    @property
    def sends_tokens_once(self) -> bool:
        """Whether a token goes once to each node that has any of its experts."""
        return self.ep_dispatcher == "deepep" and self.ep > 1

    @property
    def context_method(self) -> ContextMethod:
        """How cp's ranks attend to each other's tokens."""
        return CONTEXT_METHODS[self.cp_method]

    @property
    def attends_in_parts(self) -> bool:
        """Whether attention is joined from parts, each by a kernel that gives its log-sum-exp."""
        return self.cp > 1 and not self.context_method.splits_heads

    @property
    def asked_of_kernels(self) -> dict[str, Any]:
        """What `Kernels.problems` and `Need` want to know of a layout, by their names for it."""
        return {
            "tp": self.tp, "recompute": self.recompute, "in_parts": self.attends_in_parts,
            "splits_backward": self.splits_backward,
            "offloads_activations": self.offloads_activations,
        }  # fmt: skip

    def num_microbatches(self, batch: Batch) -> int:
        """Forwards of one data-parallel rank in a step."""
        return batch.global_batch // (self.dp * self.micro_batch)

    def problems(self, model: ModelShape, batch: Batch) -> list[str]:
        """Everything that keeps this layout from training `model` with `batch`, one line each; empty if it is legal."""
        broken = _find_broken(self, model, batch)
        return [f"{b.what}; {_advise(b, broken, self, model, batch)}" for b in broken]

    def is_legal(self, model: ModelShape, batch: Batch) -> bool:
        """Whether `problems` is empty, without looking for advice."""
        return not _find_broken(self, model, batch)

    def check(self, model: ModelShape, batch: Batch) -> None:
        """Raise InvalidLayout with every problem, or return."""
        if problems := self.problems(model, batch):
            raise InvalidLayout(problems)

    def __str__(self) -> str:
        """The short form of logs and tables: axes above 1, then what differs from the defaults.

        >>> str(Layout(pp=2, tp=2, micro_batch=4))
        'pp2·tp2+sp mb4 1f1b zero1'
        """
        return name_layout(self)

    @classmethod
    def read(cls, name: str) -> dict[str, Any]:
        """The fields that a printed name sets (`layout_names`); InvalidConfig if it is none.

        >>> Layout(**Layout.read("pp2·tp2+sp mb4 1f1b zero1")) == Layout(pp=2, tp=2, micro_batch=4)
        True
        """
        fields = read_name(name)
        toml.parse(fields, cls, "layout")
        return fields


_POSITIVE = tuple(f.name for f in fields(Layout) if "rule" in f.metadata)


@dataclass(frozen=True, kw_only=True)
class OpenLayout(Layout):
    """A layout as TOML writes it, before the world size is known: dp_shard = -1 means the ranks that are left."""

    dp_shard: int = ranged("must be at least 1, or -1", -1)
    """Ranks over which FSDP2 shards the model state; -1 for all that the other axes leave."""

    def __post_init__(self) -> None:
        if self.dp_shard == -1:
            Layout(**vars(self) | {"dp_shard": 1})  # refuses what the other fields say wrongly
        else:
            super().__post_init__()

    @property
    def smallest_world_size(self) -> int:
        """Ranks that the layout needs at least."""
        return Layout(**vars(self) | {"dp_shard": max(1, self.dp_shard)}).world_size

    def resolve(self, world_size: int) -> Layout:
        """The layout on `world_size` ranks; InvalidLayout if the degrees don't multiply to it."""
        smallest = self.smallest_world_size
        if self.dp_shard == -1 and world_size > 0 and world_size % smallest == 0:
            return Layout(**vars(self) | {"dp_shard": world_size // smallest})
        if world_size == smallest:
            return Layout(**vars(self))
        works = [smallest]
        if self.dp_shard == -1:
            works = sorted({max(1, n) * smallest for n in (world_size // smallest, world_size // smallest + 1)})
        raise InvalidLayout(self.describe_mismatch(world_size, works))

    def describe_mismatch(self, world_size: int, works: Sequence[int]) -> str:
        """Why this layout is not one of `world_size` ranks, and which numbers of ranks work."""
        degrees = [f"{axis}={getattr(self, axis)}" for axis in AXES if getattr(self, axis) > 1]
        return (
            f"world size {world_size} does not fit the layout: {' * '.join(degrees) or 'every axis 1'} needs "
            f"{'a multiple of ' if self.dp_shard == -1 else ''}{plural(self.smallest_world_size, 'rank')}; "
            f"start {' or '.join(map(str, works))}, or change the degrees"
        )


class _Broken(NamedTuple):
    """A rule that a layout does not keep."""

    rule: str
    what: str
    """What was asked and what breaks, with numbers."""
    repairs: Iterable[dict[str, Any]]
    """Changes of the layout or the batch that may help, best first; `_advise` tries them, once."""


def _find_broken(layout: Layout, model: ModelShape, batch: Batch) -> list[_Broken]:
    broken = [*_check_tensor_parallel(layout, model, batch), *_check_pipeline(layout, model)]
    broken += _check_batch(layout, batch)
    return broken + _check_context_parallel(layout, model, batch) + _check_experts(layout, model)


def _advise(problem: _Broken, broken: list[_Broken], layout: Layout, model: ModelShape, batch: Batch) -> str:
    """The first repairs that end this problem and start no other one, each tried before it is recommended."""
    works: list[dict[str, Any]] = []
    for repair in problem.repairs:
        changes = {name: value for name, value in repair.items() if name != "global_batch"}
        new_batch = replace(batch, global_batch=repair.get("global_batch", batch.global_batch))
        left = {b.rule for b in _find_broken(replace(layout, **changes), model, new_batch)}
        is_third_of_its_kind = sum(repair.keys() == other.keys() for other in works) == 2
        if left <= {b.rule for b in broken} - {problem.rule} and not is_third_of_its_kind:
            works.append(repair)
        if len(works) == 3:
            break
    alternatives = [" with ".join(f"{name}={show_value(value)}" for name, value in repair.items()) for repair in works]
    return f"use {' or '.join(alternatives)}" if works else "no change of one setting mends it"


def show_value(value: Any) -> str:
    """A field's value as an override takes it: true, [3,4], full."""
    if isinstance(value, bool):
        return str(value).lower()
    return str(list(value)).replace(" ", "") if isinstance(value, tuple) else str(value)


def _check_tensor_parallel(layout: Layout, model: ModelShape, batch: Batch) -> list[_Broken]:
    tp = layout.tp
    sizes = {name: getattr(model, name) for name in ("num_heads", "num_kv_heads", "ffn_size", "vocab_size")}
    if layout.shards_sequence:
        sizes["seq_len"] = batch.seq_len
    broken = []
    if layout.tp_overlap and tp > 1 and not layout.sequence_parallel:
        what = "tp_overlap without sequence_parallel: only what lies split along the sequence goes in pieces"
        broken.append(_Broken("overlap", what, [{"sequence_parallel": True}, {"tp_overlap": False}]))
    if layout.overlaps_tp and layout.splits_backward:
        what = f"tp_overlap beside schedule={layout.schedule}: gradients of weights hide what tp sends, and cannot wait"
        broken.append(_Broken("overlap", what, [{"tp_overlap": False}, *_list_unsplit()]))
    if not any(size % tp for size in sizes.values()):
        return broken
    repairs: list[dict[str, Any]] = [{"tp": degree} for degree in _nearest(tp, divisors(gcd(*sizes.values())))]
    replicated: list[dict[str, Any]] = [{"sequence_parallel": False}]
    return broken + [
        _Broken(f"tp/{name}", f"tp={tp} does not divide {name}={size}", replicated * (name == "seq_len") + repairs)
        for name, size in sizes.items()
        if size % tp
    ]


def _check_context_parallel(layout: Layout, model: ModelShape, batch: Batch) -> list[_Broken]:
    """Each cp rank has as many tokens of a sequence, two halves of them or heads to attend for, and a share for tp."""
    cp, method, seq_len = layout.cp, layout.context_method, batch.seq_len
    if cp == 1:
        return []
    in_parts = [{"cp_method": name} for name, other in CONTEXT_METHODS.items() if not other.splits_heads]
    broken, repairs = [], [{"cp": degree} for degree in _nearest(cp, divisors(seq_len))]
    if seq_len % (granule := method.granule(cp)):
        asked = f"cp={cp}" if granule == cp else f"{granule // cp} * cp = {granule}"
        by_heads = [{"cp_method": name} for name, other in CONTEXT_METHODS.items() if other.splits_heads]
        what = f"{asked} does not divide seq_len={seq_len}, as cp_method={method.name} needs it"
        broken.append(_Broken("cp", what, repairs + by_heads))
    elif layout.shards_sequence and seq_len // cp % layout.tp:
        what = f"cp={cp} * tp={layout.tp} does not divide seq_len={seq_len}"
        broken.append(_Broken("cp", what, [*repairs, {"sequence_parallel": False}]))
    if method.splits_heads:
        for name in ("num_heads", "num_kv_heads"):
            heads = getattr(model, name)
            if heads % (cp * layout.tp):
                fewer = [{"cp": degree} for degree in _nearest(cp, divisors(heads // layout.tp or 1))]
                ranks = f"cp={cp}" + f" * tp={layout.tp}" * (layout.tp > 1)
                what = f"{ranks} does not divide {name}={heads}, which cp_method={method.name} splits"
                broken.append(_Broken(f"cp/{name}", what, in_parts + fewer))
    return broken


def _check_experts(layout: Layout, model: ModelShape) -> list[_Broken]:
    ep = layout.ep
    if ep > 1 and model.experts is None:
        return [_Broken("ep", f"ep={ep}, but model {model.name} has no experts", [{"ep": 1}])]
    sizes = {"dp * cp * tp": layout.dp * layout.cp * layout.tp}
    if model.experts:
        sizes["experts.number"] = model.experts.number
    repairs = [{"ep": degree} for degree in _nearest(ep, divisors(gcd(*sizes.values())))]
    return [
        _Broken(f"ep/{name}", f"ep={ep} does not divide {name}={size}", repairs)
        for name, size in sizes.items()
        if size % ep
    ]


def _check_pipeline(layout: Layout, model: ModelShape) -> list[_Broken]:
    pp, v, layers, stage_layers = layout.pp, layout.virtual_stages, model.num_layers, layout.stage_layers
    broken = []
    if layout.num_stages > layers and len(stage_layers) != layout.num_stages:
        repairs: list[dict[str, Any]] = [{"virtual_stages": fewer} for fewer in range(min(v, layers // pp), 1, -1)]
        repairs += [_NO_VIRTUAL_STAGES] * (v > 1) + [{"pp": fewer} for fewer in range(layers // v, 0, -1)]
        what = f"pp={pp} * virtual_stages={v} makes {layout.num_stages} stages, more than num_layers={layers}"
        broken.append(_Broken("stages", what, repairs))
    broken += _check_virtual_stages(layout, find_schedule(layout.schedule))
    if layout.offload != "none" and layout.splits_backward:
        what = f"offload={layout.offload} beside schedule={layout.schedule}: copies to the host follow whole backwards"
        broken.append(_Broken("offload", what, [{"offload": "none"}, *_list_unsplit()]))
    by_cost: dict[str, Any] = {"stage_layers": ()}
    if stage_layers and len(stage_layers) != layout.num_stages:
        what = (
            f"stage_layers={list(stage_layers)} names {plural(len(stage_layers), 'stage')}, but pp={pp} * "
            f"virtual_stages={v} makes {layout.num_stages}"
        )
        broken.append(_Broken("split", what, [by_cost]))
    elif stage_layers and sum(stage_layers) != layers:
        num_blocks = plural(sum(stage_layers), "block")
        what = f"stage_layers={list(stage_layers)} adds up to {num_blocks}, but num_layers={layers}"
        last = layers - sum(stage_layers[:-1])
        completed = [{"stage_layers": (*stage_layers[:-1], last)}] if last > 0 else []
        broken.append(_Broken("split", what, [*completed, by_cost]))
    return broken


def _list_unsplit() -> list[dict[str, Any]]:
    """Schedules whose backwards are whole."""
    return [{"schedule": other.name} for other in SCHEDULES.values() if not other.splits_backward]


def _check_virtual_stages(layout: Layout, schedule: PipelineSchedule) -> list[_Broken]:
    pp, v = layout.pp, layout.virtual_stages
    if schedule.num_ranks not in (None, pp):
        written: dict[str, Any] = {"pp": schedule.num_ranks, "virtual_stages": schedule.least_virtual_stages}
        what = f"schedule={layout.schedule} is written for pp={schedule.num_ranks}, but pp={pp}"
        return [_Broken("virtual", what, [written, _NO_VIRTUAL_STAGES])]
    least, most = schedule.least_virtual_stages, schedule.most_virtual_stages
    if schedule.takes(pp, v):
        return []
    if most == 1:
        others = [{"schedule": name} for name, other in SCHEDULES.items() if other.takes(pp, v)]
        what = f"virtual_stages={v} has no meaning for schedule={layout.schedule}"
        return [_Broken("virtual", what, [{"virtual_stages": 1}, *others])]
    number = f"= {least}" if least == most else f"> {least - 1}" if most == inf else f"from {least} to {most}"
    needs = "pp > 1 and " * (least > 1) + f"virtual_stages {number}"
    what = f"schedule={layout.schedule} needs {needs}, but pp={pp} and virtual_stages={v}"
    return [_Broken("virtual", what, [{"virtual_stages": int(min(max(v, least), most))}, _NO_VIRTUAL_STAGES])]


def _check_batch(layout: Layout, batch: Batch) -> list[_Broken]:
    """The global batch makes whole microbatches, as many as the schedule needs."""
    pp, size, unit = layout.pp, batch.global_batch, layout.dp * layout.micro_batch
    m, schedule = layout.num_microbatches(batch), find_schedule(layout.schedule)
    least = schedule.least_rounds * pp
    has_odd_microbatches = schedule.whole_rounds and m % pp > 0
    if schedule.num_microbatches not in (None, m) and layout.is_pipelined:
        written = schedule.num_microbatches
        what = (
            f"schedule={layout.schedule} is written for {plural(written, 'microbatch')}, but global_batch={size} with "
            f"dp={layout.dp} and micro_batch={layout.micro_batch} gives {m}"
        )
        return [_Broken("microbatches", what, [{"global_batch": unit * written}])]
    if not (size % unit or m < least or has_odd_microbatches):
        return []
    # Every schedule is content with some number of microbatches at most pp away from m, or from what it needs at least.
    near = range(max(1, m - pp) * unit, (max(m, pp, least) + pp + 1) * unit, unit)
    batches = ({"global_batch": n} for n in _nearest(size, near))
    smaller = ({"micro_batch": n} for n in _nearest(layout.micro_batch, divisors(size)))
    if size % unit:
        product = f"dp * micro_batch = {layout.dp} * {layout.micro_batch} = {unit}"
        what = f"global_batch={size} is not a multiple of {product}"
        return [_Broken("multiple", what, chain(smaller, batches))]
    times = f"{schedule.least_rounds} * " if schedule.least_rounds > 1 else ""
    needs = f"at least {times}pp={pp}" if m < least else f"a multiple of pp={pp}"
    what = (
        f"schedule={layout.schedule} needs {needs} microbatches, but global_batch={size} with dp={layout.dp} and "
        f"micro_batch={layout.micro_batch} gives {m}"
    )
    fewer = ({"pp": n} for n in range(min(m, pp - 1), 0, -1) if m < least)
    return [_Broken("microbatches", what, chain(smaller, batches, fewer, [_NO_VIRTUAL_STAGES] * has_odd_microbatches))]


def _nearest(value: int, candidates: Iterable[int]) -> Iterator[int]:
    """The candidates, those closest to `value` first; sorted when the first is asked for."""
    yield from sorted(candidates, key=lambda c: (abs(c - value), c))
