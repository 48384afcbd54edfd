"""What a dry run of one rank found: plain values, which cross processes and become JSON. No torch."""

from dataclasses import dataclass

from dtlayout.measure.ledger import Footprint


@dataclass(frozen=True)
class Traffic:
    """Messages of one kind and size that a rank sends in a step."""

    name: str
    """all_gather, reduce_scatter, all_reduce, send, recv, …"""

    axis: str
    """The axis of the mesh; two that are joined as "dp_replicate·dp_shard"; "all" for all ranks."""

    nbytes: int
    """The larger of what goes into one message and what comes out of it."""

    count: int
    """How many in a step."""

    crosses_node: bool
    """Whether its ranks lie in more than one node."""


@dataclass(frozen=True)
class Highest:
    """The largest total while an action was executed."""

    action: str
    """As in a schedule, such as 3F0; UPDATE after the last."""

    nbytes: int


@dataclass(frozen=True)
class RankReport:
    """One rank's step."""

    rank: int
    coordinate: dict[str, int]
    """Its place along each axis."""

    peak_bytes: int
    parts: Footprint
    """The peak by category."""

    module: str
    """That ran at the peak, in forward or backward; empty for none."""

    action: str
    """That was executed at the peak."""

    curve: list[Highest]
    """In the order of the actions, of one step after the other."""

    traffic: list[Traffic]
    """The largest part of it first."""

    flops: dict[str, int]
    """Of a step's matmuls and attention, by module; recomputation counts."""

    num_microbatches: int
    num_microbatches_run: int
    """Fewer where the rest repeat them: what they send and compute is counted, and adds nothing to the peak."""


UPDATE = "update"
"""The part of a step after its last action: norm, clipping and optimizer."""
