"""The update: what hiding data-parallel communication costs."""

import pytest
from small import scenario

from dtlayout.costmodel.update import Update, update_times
from dtlayout.spec.layout import Layout

UPDATE = Update(reduce_s=2.0, copy_s=0.0, gather_s=1.0, recompute_s=0.0, optimizer_s=0.0)


def dp_s(num_gpus: int, layout: Layout, slowdown: float, computing_s: float) -> float:
    setting = scenario(num_gpus=num_gpus, overlap=1.0, overlap_slowdown=slowdown)
    return update_times(setting, layout, UPDATE, 4, 1, computing_s, computing_s)[0]


def test_computation_that_hides_what_the_network_sends_takes_longer():
    layout = Layout(dp_shard=16)
    assert dp_s(16, layout, 0.0, 10.0) == 0.0
    assert dp_s(16, layout, 0.1, 10.0) == pytest.approx(0.1 * (2.0 + 1.0))
    assert dp_s(16, layout, 0.1, 1.5) == pytest.approx(0.5 + 0.1 * (1.5 + 1.0)), "only what is hidden costs"
    assert dp_s(16, layout, 0.1, 0.0) == pytest.approx(3.0)


@pytest.mark.parametrize("layout", [Layout(dp_shard=8), Layout(dp_replicate=2, dp_shard=8)])
def test_what_fast_links_send_is_hidden_for_nothing(layout):
    assert dp_s(layout.world_size, layout, 0.1, 10.0) == 0.0
