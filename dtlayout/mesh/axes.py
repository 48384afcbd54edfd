"""The axes of the mesh and the names of their views; no torch.

Outermost first: pp, dp_replicate, dp_shard, cp, tp. The outer axes talk least, so they are the ones that cross nodes.
"""

from dtlayout.layout import AXES, Layout

PP, DP_REPLICATE, DP_SHARD, CP, TP = AXES


def axis_sizes(layout: Layout) -> dict[str, int]:
    """Degree of each axis, outermost first."""
    return {axis: getattr(layout, axis) for axis in AXES}


def axis_strides(layout: Layout) -> dict[str, int]:
    """Distance in ranks between neighbours along each axis.

    >>> axis_strides(Layout(pp=2, dp_shard=2, tp=4))["dp_shard"]
    4
    """
    strides, stride = {}, 1
    for axis, size in reversed(axis_sizes(layout).items()):
        strides[axis] = stride
        stride *= size
    return {axis: strides[axis] for axis in AXES}
