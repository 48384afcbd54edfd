"""The report of a dry run of one rank: plain values, which cross processes and become JSON. No torch."""

from collections import Counter
from dataclasses import dataclass, field

from dtlayout.measure.ledger import Footprint, Highest
from dtlayout.models.kernel_calls import KernelCall
from dtlayout.schedules.actions import Action


@dataclass(frozen=True)
class Message:
    """A collective, or a message between stages."""

    name: str
    """all_gather, reduce_scatter, all_reduce, send, recv, …"""
    axis: str
    """The axis of the mesh; two that are joined as "dp_replicate·dp_shard"; "all" for all ranks. "ep" are messages of
    tokens to experts and back, "expert_shards" and "expert_copies" other ranks that only experts join."""
    nbytes: int
    """Bytes that go into one message or come out of it, whichever is more."""
    crosses_node: bool
    """Whether its ranks lie in more than one node."""


@dataclass(frozen=True)
class Place:
    """A place in a step: the action that is executed, and the module that runs."""

    action: Action | None
    """The action that is executed; None before the first and after the last."""
    module: str
    """The module that runs, in forward or backward; empty for none."""
    is_again: bool
    """Whether a forward is recomputed."""


@dataclass(frozen=True)
class Done:
    """A kernel or a message that was executed `count` times at one place."""

    place: Place
    what: KernelCall | Message
    count: int


@dataclass(frozen=True)
class RankReport:
    """One rank's step."""

    rank: int
    coordinate: dict[str, int]
    """The rank's place along each axis."""

    peak_bytes: int
    parts: Footprint
    """The peak by category."""
    module: str
    """The module that ran at the peak, in forward or backward; empty for none."""
    action: str
    """The action that was executed at the peak."""
    curve: list[Highest]
    """The largest total during each action, in their order, one step after the other."""
    done: list[Done]
    """Kernels and messages of the microbatches that were run."""

    num_microbatches: int
    num_microbatches_run: int
    """Microbatches that were run. The rest repeat them: `traffic` and `flops` count them, the peak stays as it is."""
    host_parts: Footprint = field(default_factory=Footprint)
    """Most bytes in the host's memory, by category; all 0 without offload."""
    disk_parts: Footprint = field(default_factory=Footprint)
    """Bytes of the state in files on the host's disk, by category; all 0 where it lies elsewhere."""

    def repeats(self, action: Action | None) -> int:
        """Times that an action's work happens in a whole step: the second microbatch stands for those left out."""
        left_out = self.num_microbatches - self.num_microbatches_run
        return 1 + left_out if action is not None and action.microbatch == 1 else 1

    @property
    def traffic(self) -> Counter[Message]:
        """Messages of a whole step, each kind and size as often as it is sent."""
        counts = Counter[Message]()
        for done in self.done:
            if isinstance(done.what, Message):
                counts[done.what] += done.count * self.repeats(done.place.action)
        return counts

    @property
    def flops(self) -> Counter[str]:
        """FLOPs of a whole step's matmuls and attention, by module; recomputation counts."""
        flops = Counter[str]()
        for done in self.done:
            if not isinstance(done.what, Message) and done.what.flops:
                flops[done.place.module] += done.what.flops * done.count * self.repeats(done.place.action)
        return flops
