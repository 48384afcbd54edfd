"""The axes of the mesh, the coordinates of a rank, and the axes that cross a node; no torch.

Outermost first: pp, dp_replicate, dp_shard, cp, tp. The outer axes talk least, so they are the ones that cross nodes.
"""

from math import prod

from dtlayout.spec.context_parallel import own_parts
from dtlayout.spec.layout import Layout
from dtlayout.spec.layout_keys import AXES

PP, DP_REPLICATE, DP_SHARD, CP, TP = AXES
EXPERT_COPIES, EXPERT_SHARDS, EP = "expert_copies", "expert_shards", "ep"


def axis_sizes(layout: Layout) -> dict[str, int]:
    """Degree of each axis, outermost first."""
    return {axis: getattr(layout, axis) for axis in AXES}


def axis_strides(layout: Layout) -> dict[str, int]:
    """Distance in ranks between neighbours along each axis.

    >>> axis_strides(Layout(pp=2, dp_shard=2, tp=4))["dp_shard"]
    4
    """
    sizes = [*axis_sizes(layout).values()]
    return {axis: prod(sizes[i + 1 :]) for i, axis in enumerate(AXES)}


def expert_sizes(layout: Layout) -> dict[str, int]:
    """Degree of each axis of the ranks as experts see them, outermost first; `build_expert_mesh` says what they are.

    >>> expert_sizes(Layout(pp=2, dp_shard=4, tp=2, ep=4))
    {'pp': 2, 'expert_copies': 1, 'expert_shards': 2, 'ep': 4}
    """
    copies, shards = layout.dp_replicate, layout.dp_shard * layout.cp * layout.tp // layout.ep
    if layout.dp_shard == 1 and copies > 1:
        copies, shards = copies * shards, 1
    return {PP: layout.pp, EXPERT_COPIES: copies, EXPERT_SHARDS: shards, EP: layout.ep}


def coordinate(rank: int, layout: Layout) -> dict[str, int]:
    """Coordinate of a rank on each axis.

    >>> coordinate(5, Layout(pp=2, dp_shard=2, tp=2))
    {'pp': 1, 'dp_replicate': 0, 'dp_shard': 0, 'cp': 0, 'tp': 1}
    """
    strides = axis_strides(layout)
    return {axis: rank // strides[axis] % size for axis, size in axis_sizes(layout).items()}


def ranks_along(axis: str, rank: int, layout: Layout) -> list[int]:
    """Ranks that share every coordinate of `rank` except that on `axis`, in order."""
    stride = axis_strides(layout)[axis]
    first = rank - coordinate(rank, layout)[axis] * stride
    return [first + i * stride for i in range(axis_sizes(layout)[axis])]


def dp_rank(rank: int, layout: Layout) -> int:
    """Index of a rank over dp_replicate and dp_shard together; it decides which rows of a batch the rank reads."""
    place = coordinate(rank, layout)
    return place["dp_replicate"] * layout.dp_shard + place["dp_shard"]


def own_positions(rank: int, layout: Layout, seq_len: int) -> tuple[range, ...]:
    """Positions of the tokens of each sequence that a rank has, in their order; all of them at cp = 1.

    A module of one's own cuts its rows by them, and gives them to its rotary embedding. `layout.cp_method` decides.

    >>> own_positions(1, Layout(cp=2), 8), own_positions(1, Layout(cp=2, cp_method="all-to-all"), 8)
    ((range(2, 4), range(4, 6)), (range(4, 8),))
    """
    if layout.cp == 1:
        return (range(seq_len),)
    return own_parts(layout.context_method.order, seq_len, layout.cp, coordinate(rank, layout)["cp"])


def crosses_node(axis: str, layout: Layout, gpus_per_node: int) -> bool:
    """Whether any group along `axis` has ranks in more than one node."""
    first_ranks = (r for r in range(layout.world_size) if coordinate(r, layout)[axis] == 0)
    return any(len({r // gpus_per_node for r in ranks_along(axis, rank, layout)}) > 1 for rank in first_ranks)
