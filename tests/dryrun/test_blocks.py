"""What two dry runs with fewer blocks say of one with all of them."""

from dataclasses import replace

import pytest
from parity import SHAPE, Case

from dtlayout.dryrun.blocks import Added, Held, add_blocks, shorten_stages
from dtlayout.spec.layout import Layout

DEEPER = replace(SHAPE, num_layers=32)


def test_what_is_left_out_lies_between_blocks_like_it() -> None:
    layout = Layout(pp=2, recompute="every-2")
    shortened = shorten_stages(DEEPER, Case(layout).batch, layout, rank=1)
    assert shortened is not None
    assert (shortened.times, len(shortened.of_shorter), len(shortened.of_longer)) == (5, 10, 8)
    assert shortened.of_shorter[0] == 16 + 3 and shortened.of_shorter[-1] == 28
    assert set(shortened.of_longer) < set(shortened.of_shorter)


@pytest.mark.parametrize(
    "layout",
    [Layout(pp=8), Layout(recompute="every-8"), Layout(pp=2, schedule="interleaved-1f1b", virtual_stages=4)],
    ids=str,
)
def test_all_blocks_of_short_stages_are_built(layout: Layout) -> None:
    assert shorten_stages(DEEPER, Case(layout, global_batch=16).batch, layout, rank=0) is None


def test_another_moment_may_become_the_fullest() -> None:
    """The head's 100 stay below the blocks' 10 each as soon as there are more than ten."""
    head, last = ("lm_head", False, "mm"), ("model.layers.9", False, "mm")
    shorter, longer = Held(0), Held(0)
    for held, blocks in ((shorter, 4), (longer, 5)):
        held.fullest_bytes, held.left_bytes = 100, 2 * blocks
        held.moments[head] = [100, 60]
        held.moments[last] = [10 * blocks, 10 * blocks - 5]
    longer.moments["model.layers.2", False, "mm"] = [1]
    assert add_blocks(shorter, longer, times=2) == Added(fullest=100, left=12)
    assert add_blocks(shorter, longer, times=8) == Added(fullest=120, left=24)
