"""Layout: how one training step is spread over the ranks, and the rules that a layout must keep.

Axes, outermost first: pp, dp_replicate, dp_shard, cp, tp. A degree of 1 means that the axis is off. `Layout.problems`
lists everything that is wrong with a layout at once, each problem in one line with the nearest values that work.
"""

from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import Any, Literal, get_args

from dtlayout.batch import Batch
from dtlayout.errors import InvalidConfig, InvalidLayout
from dtlayout.model_shape import ModelShape, divisors
from dtlayout.recompute import Recompute

ScheduleName = Literal["gpipe", "1f1b", "interleaved-1f1b"]
AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Degrees, micro-batch, schedule, ZeRO stage and recomputation of one training step."""

    pp: int = 1
    """Pipeline-parallel degree: ranks that each hold some of the blocks."""
    dp_replicate: int = 1
    """Copies of the sharded model state; with dp_shard > 1 this is HSDP."""
    dp_shard: int = 1
    """Ranks over which FSDP2 shards the model state."""
    cp: int = 1
    """Context-parallel degree: ranks that share one sequence."""
    tp: int = 1
    """Tensor-parallel degree: ranks that share every matmul; keep it inside one node."""
    sequence_parallel: bool = True
    """Shard the residual stream and the norms over tp along the sequence; without effect at tp = 1."""
    micro_batch: int = 1
    """Sequences in one forward of one data-parallel rank."""
    schedule: ScheduleName = "1f1b"
    """Order of forwards and backwards in the pipeline."""
    virtual_stages: int = 1
    """Stages on each pipeline rank; above 1 only with interleaved-1f1b."""
    stage_layers: tuple[int, ...] = ()
    """Blocks of each stage, first to last; empty shares them out by cost."""
    zero: Literal[1, 2, 3] = 1
    """What dp_shard shards: 1 optimizer state, 2 also gradients, 3 also parameters."""
    recompute: str = "none"
    """Blocks computed again in backward: none, full, selective or every-N."""

    def __post_init__(self) -> None:
        positive = (*AXES, "micro_batch", "virtual_stages")
        problems = [f"layout.{n}={getattr(self, n)} must be at least 1" for n in positive if getattr(self, n) < 1]
        problems += [f"layout.stage_layers={list(self.stage_layers)} has a stage without blocks"] * (
            min(self.stage_layers, default=1) < 1
        )
        for name, allowed in (("schedule", get_args(ScheduleName)), ("zero", (1, 2, 3))):
            if getattr(self, name) not in allowed:
                problems.append(f"layout.{name}={getattr(self, name)!r} is unknown; use one of {list(allowed)}")
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
    def num_stages(self) -> int:
        """Pieces that the model is cut into."""
        return self.pp * self.virtual_stages

    @property
    def shards_sequence(self) -> bool:
        """Whether sequence parallelism has an effect."""
        return self.sequence_parallel and self.tp > 1

    def num_microbatches(self, batch: Batch) -> int:
        """Forwards of one data-parallel rank in a step."""
        return batch.global_batch // (self.dp * self.micro_batch)

    def problems(self, model: ModelShape, batch: Batch) -> list[str]:
        """Everything that keeps this layout from training `model` with `batch`, one line each; empty if it is legal."""
        return [
            *_tensor_problems(self, model, batch),
            *_pipeline_problems(self, model),
            *_batch_problems(self, batch),
            *_axis_problems(self),
        ]

    def check(self, model: ModelShape, batch: Batch) -> None:
        """Raise InvalidLayout with every problem, or return."""
        if problems := self.problems(model, batch):
            raise InvalidLayout(problems)

    def __str__(self) -> str:
        """The short form of logs and tables: axes above 1, then what differs from the defaults.

        >>> str(Layout(pp=2, tp=2, micro_batch=4))
        'pp2·tp2+sp mb4 1f1b zero1'
        """
        names = {"dp_replicate": "replicate", "dp_shard": "dp"}
        axes = [f"{names.get(axis, axis)}{getattr(self, axis)}" for axis in AXES if getattr(self, axis) > 1]
        text = "·".join(axes) or "1 rank"
        text += "+sp" * self.shards_sequence + f" mb{self.micro_batch}"
        if self.pp > 1:
            text += f" {self.schedule}" + f" v{self.virtual_stages}" * (self.virtual_stages > 1)
        return text + f" zero{self.zero}" + f" recompute={self.recompute}" * (self.recompute != "none")


@dataclass(frozen=True, kw_only=True)
class OpenLayout(Layout):
    """A layout as TOML writes it, before the world size is known: dp_shard = -1 means the ranks that are left."""

    dp_shard: int = -1
    """Ranks over which FSDP2 shards the model state; -1 for all that the other axes leave."""

    def __post_init__(self) -> None:
        if self.dp_shard != -1:
            super().__post_init__()

    @property
    def smallest_world_size(self) -> int:
        """Ranks that the layout needs at least."""
        return Layout(**self._values(dp_shard=max(1, self.dp_shard))).world_size

    def resolve(self, world_size: int) -> Layout:
        """The layout on `world_size` ranks; InvalidLayout if the degrees don't multiply to it."""
        smallest = self.smallest_world_size
        if self.dp_shard == -1 and world_size > 0 and world_size % smallest == 0:
            return Layout(**self._values(dp_shard=world_size // smallest))
        if world_size == smallest:
            return Layout(**self._values())
        degrees = [f"{axis}={getattr(self, axis)}" for axis in AXES if getattr(self, axis) > 1]
        needs, works = "", [smallest]
        if self.dp_shard == -1:
            needs = "a multiple of "
            works = sorted({max(1, world_size // smallest) * smallest, (world_size // smallest + 1) * smallest})
        raise InvalidLayout(
            f"world size {world_size} does not fit the layout: {' * '.join(degrees) or 'every axis 1'} needs "
            f"{needs}{smallest} ranks; start {' or '.join(map(str, works))}, or change the degrees"
        )

    def _values(self, **changes: int) -> dict[str, Any]:
        return {field.name: getattr(self, field.name) for field in fields(Layout)} | changes


def _tensor_problems(layout: Layout, model: ModelShape, batch: Batch) -> list[str]:
    tp = layout.tp
    sizes = {
        "num_heads": model.num_heads,
        "num_kv_heads": model.num_kv_heads,
        "ffn_size": model.ffn_size,
        "vocab_size": model.vocab_size,
    }
    if layout.shards_sequence:
        sizes["seq_len"] = batch.seq_len
    return [
        f"tp={tp} does not divide {name}={size}; nearest tp that do: {_nearest(tp, divisors(size))}"
        for name, size in sizes.items()
        if size % tp
    ]


def _pipeline_problems(layout: Layout, model: ModelShape) -> list[str]:
    problems = []
    if layout.num_stages > model.num_layers:
        problems.append(
            f"pp={layout.pp} * virtual_stages={layout.virtual_stages} makes {layout.num_stages} stages, more than "
            f"num_layers={model.num_layers}; use at most {model.num_layers} stages"
        )
    interleaved = layout.schedule == "interleaved-1f1b"
    if interleaved and (layout.pp == 1 or layout.virtual_stages == 1):
        problems.append(
            f"schedule=interleaved-1f1b needs pp > 1 and virtual_stages > 1, not pp={layout.pp} and "
            f"virtual_stages={layout.virtual_stages}; use virtual_stages=2 or schedule=1f1b"
        )
    if not interleaved and layout.virtual_stages > 1:
        problems.append(
            f"virtual_stages={layout.virtual_stages} has no meaning for schedule={layout.schedule}; "
            f"use virtual_stages=1 or schedule=interleaved-1f1b"
        )
    if layout.stage_layers and len(layout.stage_layers) != layout.num_stages:
        problems.append(
            f"stage_layers={list(layout.stage_layers)} names {len(layout.stage_layers)} stages, but pp={layout.pp} * "
            f"virtual_stages={layout.virtual_stages} makes {layout.num_stages}; give {layout.num_stages} numbers"
        )
    if layout.stage_layers and sum(layout.stage_layers) != model.num_layers:
        problems.append(
            f"stage_layers={list(layout.stage_layers)} adds up to {sum(layout.stage_layers)} blocks, but "
            f"num_layers={model.num_layers}; make the sum {model.num_layers}"
        )
    return problems


def _batch_problems(layout: Layout, batch: Batch) -> list[str]:
    dp, micro_batch, size = layout.dp, layout.micro_batch, batch.global_batch
    if size % (dp * micro_batch):
        works = [m for m in divisors(size) if size % (dp * m) == 0]
        advice = [f"micro_batch in {_nearest(micro_batch, works)}"] if works else []
        step = dp * micro_batch
        multiples = [k * step for k in (size // step, size // step + 1) if k]
        advice.append(f"global_batch={' or '.join(map(str, multiples))}")
        return [
            f"global_batch={size} is not a multiple of dp * micro_batch = {dp} * {micro_batch} = {step}; "
            f"use {' or '.join(advice)}"
        ]
    m, pp = layout.num_microbatches(batch), layout.pp
    per_microbatch = dp * micro_batch
    if layout.schedule == "1f1b" and m < pp:
        return [
            f"schedule=1f1b needs at least pp={pp} microbatches, but global_batch={size} gives {m}; "
            f"use global_batch>={pp * per_microbatch}, or pp<={m}"
        ]
    if layout.schedule == "interleaved-1f1b" and m % pp:
        multiples = [k * pp * per_microbatch for k in (m // pp, m // pp + 1) if k]
        return [
            f"schedule=interleaved-1f1b needs a multiple of pp={pp} microbatches, but global_batch={size} gives {m}; "
            f"use global_batch={' or '.join(map(str, multiples))}"
        ]
    return []


def _axis_problems(layout: Layout) -> list[str]:
    if layout.cp > 1:
        return [f"cp={layout.cp}: context parallelism is not there yet; use cp=1"]
    return []


def _nearest(value: int, candidates: Iterable[int], count: int = 3) -> list[int]:
    """The candidates closest to `value`, ascending."""
    return sorted(sorted(candidates, key=lambda c: (abs(c - value), c))[:count])
