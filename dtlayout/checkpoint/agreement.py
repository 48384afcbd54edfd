"""Agreement of the ranks that save: which rank writes which shard, and whether it is written.

The first rank hears every rank's results, the others only whether all went well. Reading many ranks' results is work,
which a host that trains at the same time should not do for nothing.
"""

import io
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, WriteItem

from dtlayout.base.errors import CheckpointError

T = TypeVar("T")


def agree(work: Callable[[], T] | None, path: Path, group: dist.ProcessGroup | None) -> list[T]:
    """Run `work` on each rank.

    The first rank gets a list of one result for each rank, in their order, None where `work` is None. The others get an
    empty list. CheckpointError on every rank, with `path` in its text, if `work` fails on one.
    """
    done: tuple[T | None, str] = None, ""
    try:
        done = (work() if work else None), ""
    except Exception as error:  # whatever it is, the others hear of it and don't wait
        # torch's archive says less about a failed write than the system has said.
        told = error.__context__ if isinstance(error.__context__, OSError) else error
        done = None, f"{path} cannot be written: {last_line(told)}"
    gathered: list[Any] = [None] * dist.get_world_size(group)
    is_first = dist.get_rank(group) == 0
    dist.gather_object(done, gathered if is_first else None, group=group, group_dst=0)
    problem = [next((problem for _, problem in gathered if problem), "") if is_first else ""]
    dist.broadcast_object_list(problem, group=group, group_src=0)
    if problem[0]:
        raise CheckpointError(problem[0])
    return [each for each, _ in gathered] if is_first else []


def tell(value: T, group: dist.ProcessGroup | None) -> T:
    """The first rank's value, on all ranks."""
    told = [value]
    dist.broadcast_object_list(told, group=group, group_src=0)
    return told[0]


class RepeatedPlanner(DefaultSavePlanner):
    """Plans which rank writes which shard.

    The first rank does so once, from what every rank holds; each rank keeps its own part.
    """

    plan: SavePlan
    """Shards that this rank writes."""
    metadata: Metadata
    """DCP's description of all tensors; on the first rank alone."""

    def __init__(self) -> None:
        super().__init__()
        self._is_agreed = False
        self.use: Callable[[Tensor], None] = lambda tensor: None
        """Called with each tensor before it is written."""

    def plan_writes(
        self, tensors: Mapping[str, Tensor], writer: dcp.FileSystemWriter, path: Path, group: dist.ProcessGroup | None
    ) -> None:
        """Take these tensors as those that `writer` writes.

        The first call also plans which rank writes which shard; later calls keep that plan. If planning fails on one
        rank, CheckpointError on every rank, with `path` in its text.
        """
        is_first = dist.get_rank(group) == 0
        self.set_up_planner(dict(tensors), is_coordinator=is_first)
        if self._is_agreed:
            return
        plans = agree(self.create_local_plan, path, group)
        parts = agree(lambda: self._share_out(plans, writer) if is_first else None, path, group)
        own: list[SavePlan] = [self.plan]
        dist.scatter_object_list(own, parts[0] if is_first else None, group=group, group_src=0)
        self.finish_plan(own[0])
        self._is_agreed = True

    def resolve_data(self, write_item: WriteItem) -> Tensor | io.BytesIO:
        found = super().resolve_data(write_item)
        if isinstance(found, Tensor):
            self.use(found)
        return found

    def _share_out(self, plans: list[SavePlan], writer: dcp.FileSystemWriter) -> list[SavePlan]:
        parts, _ = self.create_global_plan(plans)
        return writer.prepare_global_plan(parts)


def last_line(error: BaseException) -> str:
    """An error in a line: of several, the last says what happened."""
    return f"{type(error).__name__} {(str(error).strip().splitlines() or [''])[-1]}"
