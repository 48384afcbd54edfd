"""Layout: how one training step is spread over the ranks.

`Layout.problems` lists everything that is wrong with a layout at once, each problem in one line with the nearest values
that work. The keys stand in layout_keys.py, the rules in layout_rules.py.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import gcd
from typing import Any

from dtlayout.base import toml
from dtlayout.base.errors import InvalidLayout
from dtlayout.base.formatting import plural
from dtlayout.base.refusals import Changes, Refusal, describe
from dtlayout.base.validators import ranged
from dtlayout.spec.batch import Batch
from dtlayout.spec.layout_keys import AXES, NEEDED_DEGREE, LayoutKeys
from dtlayout.spec.layout_names import name_layout, read_name
from dtlayout.spec.layout_rules import find_broken
from dtlayout.spec.model_shape import ModelShape


@dataclass(frozen=True, kw_only=True)
class Layout(LayoutKeys):
    """Degrees, micro-batch, schedule, ZeRO stage and recomputation of one training step."""

    @property
    def effective(self) -> "Layout":
        """This layout with each key at its default that has no effect beside these degrees."""
        idle = (name for name, axis in NEEDED_DEGREE.items() if getattr(self, axis) == 1)
        return replace(self, **{name: getattr(Layout, name) for name in idle})

    def problems(self, model: ModelShape, batch: Batch) -> list[str]:
        """Everything that keeps this layout from training `model` with `batch`, one line each; empty if it is legal."""

        def find_again(changes: Changes) -> list[Refusal]:
            other = {name: value for name, value in changes.items() if name != "global_batch"}
            new_batch = replace(batch, global_batch=changes.get("global_batch", batch.global_batch))
            return find_broken(replace(self, **other), model, new_batch)

        return describe(find_broken(self, model, batch), find_again)

    def is_legal(self, model: ModelShape, batch: Batch) -> bool:
        """Whether `problems` is empty, without looking for advice."""
        return not find_broken(self, model, batch)

    def check(self, model: ModelShape, batch: Batch) -> None:
        """Raise InvalidLayout with every problem, or return."""
        if problems := self.problems(model, batch):
            raise InvalidLayout(problems)

    def __str__(self) -> str:
        """The short form of logs and tables: axes above 1, then the values that differ from the defaults.

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


@dataclass(frozen=True, kw_only=True)
class OpenLayout(Layout):
    """How one training step is spread over the ranks, before their number is known: dp_shard = -1 means the ranks that
    are left."""

    dp_shard: int = ranged("must be at least 1, or -1", -1)
    """Ranks over which FSDP2 shards the model state; -1 for all that the other axes leave."""

    def __post_init__(self) -> None:
        if self.dp_shard == -1:
            Layout(**vars(self) | {"dp_shard": 1})  # refuses wrong values of the other fields
            if self.offload_folder:
                self.expand_folder()
        else:
            super().__post_init__()

    @property
    def smallest_world_size(self) -> int:
        """Ranks that the layout needs at least."""
        return Layout(**vars(self) | {"dp_shard": self._fewest_shards}).world_size

    @property
    def _fewest_shards(self) -> int:
        """The smallest dp_shard: that which is given, or one with which the ranks of a copy are a multiple of ep."""
        return self.ep // gcd(self.ep, self.cp * self.tp) if self.dp_shard == -1 else self.dp_shard

    def resolve(self, world_size: int) -> Layout:
        """The layout on `world_size` ranks; InvalidLayout if the degrees don't multiply to it."""
        smallest = self.smallest_world_size
        if self.dp_shard == -1 and world_size > 0 and world_size % smallest == 0:
            return Layout(**vars(self) | {"dp_shard": self._fewest_shards * world_size // smallest})
        if world_size == smallest:
            return Layout(**vars(self))
        works = [smallest]
        if self.dp_shard == -1:
            works = sorted({max(1, n) * smallest for n in (world_size // smallest, world_size // smallest + 1)})
        raise InvalidLayout(self.describe_mismatch(world_size, works))

    def describe_mismatch(self, world_size: int, works: Sequence[int]) -> str:
        """A line on why this layout is not one of `world_size` ranks; `works` are numbers of ranks that it names."""
        degrees = [f"{axis}={getattr(self, axis)}" for axis in AXES if getattr(self, axis) > 1]
        shares = f" with ep={self.ep}" * (self._fewest_shards > 1 and self.dp_shard == -1)
        return (
            f"world size {world_size} does not fit the layout: {' * '.join(degrees) or 'every axis 1'}{shares} needs "
            f"{'a multiple of ' if self.dp_shard == -1 else ''}{plural(self.smallest_world_size, 'rank')}; "
            f"start {' or '.join(map(str, works))}, or change the degrees"
        )
