"""What a rank sends by axis and link: counted by hand, and waited for as the step says; dry runs send the same."""

from dataclasses import replace

import pytest
from small import MODEL, scenario

from dtlayout.costmodel.engine_features import Features
from dtlayout.costmodel.estimate import Estimator
from dtlayout.costmodel.messages import IN_BLOCKS, AxisMessages, list_messages
from dtlayout.costmodel.scenario import Scenario
from dtlayout.models.counting import count_parameters
from dtlayout.spec.kernels import Kernels
from dtlayout.spec.layout import Layout
from dtlayout.spec.model_shape import Experts
from dtlayout.spec.precision import BYTES

OURS = Features(sharding="fsdp2", axes=("cp", "ep"), overlap_dp=True, overlap_pp=True)
MIXTURE = replace(MODEL, experts=Experts(number=16, per_token=2, ffn_size=500))


def find(here: Scenario, layout: Layout) -> dict[int, dict[str, AxisMessages]]:
    """Pipeline rank → axis → its messages."""
    estimator = Estimator(here)
    times = estimator.rank_times(layout, Kernels(), estimator.estimate(layout, Kernels()).memory)
    found = list_messages(estimator, layout, Kernels(), times)
    return {rank: {each.axis: each for each in rows} for rank, rows in found.items()}


def test_one_rank_sends_nothing():
    assert find(scenario(num_gpus=1), Layout()) == {0: {}}


def test_a_pipeline_sends_hidden_states_on_and_gradients_back():
    here = scenario(num_gpus=16)
    layout = Layout(pp=4, dp_shard=4, micro_batch=1)
    m, size = layout.num_microbatches(here.batch), here.batch.seq_len * 1000 * 2
    found = find(here, layout)
    assert [found[rank]["pp"].network_bytes for rank in range(4)] == [m * size, 2 * m * size, 2 * m * size, m * size]
    assert all(found[rank]["pp"].fast_link_bytes == 0 for rank in range(4)), "16 GPUs are two nodes"
    inside = find(scenario(num_gpus=8), Layout(pp=2, dp_shard=4))[0]["pp"]
    assert inside.network_bytes == 0 < inside.fast_link_bytes


def test_a_v_shaped_pipeline_turns_round_on_a_rank_that_sends_itself_nothing():
    layout = Layout(pp=2, dp_shard=4, schedule="zb-v", virtual_stages=2)
    here = scenario(num_gpus=8)
    once = layout.num_microbatches(here.batch) * here.batch.seq_len * 1000 * 2
    assert [find(here, layout)[rank]["pp"].fast_link_bytes for rank in (0, 1)] == [2 * once, 2 * once]


def test_replicas_send_over_the_network_what_shards_have_reduced_inside_nodes():
    here = scenario(num_gpus=16, features=OURS)
    both = find(here, Layout(dp_replicate=2, dp_shard=8))[0]["dp"]
    inside, across = find(here, Layout(dp_shard=8))[0]["dp"], find(here, Layout(dp_shard=16))[0]["dp"]
    assert inside.network_bytes == 0 and both.fast_link_bytes == pytest.approx(inside.fast_link_bytes)
    assert across.fast_link_bytes == pytest.approx(0, abs=1) and across.network_bytes > inside.fast_link_bytes
    # Two ranks all-reduce a shard of the gradients: each sends half of it twice.
    assert both.network_bytes == pytest.approx(count_parameters(MODEL) / 8 * BYTES[here.precision.reduce])


def test_tp_that_leaves_a_node_is_on_the_network():
    near, far = (find(scenario(num_gpus=16), Layout(tp=tp, dp_shard=16 // tp))[0]["tp"] for tp in (8, 16))
    assert near.network_bytes == 0 < near.fast_link_bytes
    assert far.fast_link_bytes == pytest.approx(0, abs=1) and far.network_bytes > near.fast_link_bytes


def test_an_exchange_takes_both_kinds_of_links():
    here = replace(scenario(num_gpus=16, features=OURS), model=MIXTURE)
    found = find(here, Layout(dp_shard=16, ep=16))[0]["ep"]
    # Of sixteen ranks a rank sends to seven by fast links and to eight by the network.
    assert found.network_bytes / found.fast_link_bytes == pytest.approx(8 / 7)


@pytest.mark.parametrize(
    "layout",
    [
        Layout(tp=8, dp_shard=4), Layout(pp=4, tp=2, dp_shard=4, recompute="full"), Layout(dp_shard=32, zero=3),
        Layout(cp=4, cp_method="gather", tp=2, dp_shard=4), Layout(cp=2, dp_shard=16, recompute="selective"),
        Layout(dp_shard=16, tp=2, ep=8, ep_overlap=True, micro_batch=1), Layout(tp=4, dp_shard=8, tp_overlap=True),
    ],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("features", [OURS, Features()], ids=["overlaps", "blocks"])
def test_waiting_adds_up_to_the_step_and_is_no_longer_than_sending(layout, features):
    here = scenario(num_gpus=32, features=features)
    here = replace(here, model=MIXTURE) if layout.ep > 1 else here
    estimator = Estimator(here)
    times = estimator.rank_times(layout, Kernels(), estimator.estimate(layout, Kernels()).memory)
    for rank, rows in find(here, layout).items():
        waited = {axis: each.waited_s for axis, each in rows.items()}
        assert sum(waited.get(axis, 0.0) for axis in IN_BLOCKS) == pytest.approx(times[rank].tp)
        assert waited.get("dp", 0.0) == pytest.approx(times[rank].dp)
        assert waited.get("pp", 0.0) >= times[rank].pp
        for each in rows.values():
            assert each.sending_s > 0 and 0 <= each.hidden_share <= 1
            if not layout.tp_overlap and each.axis != "pp":  # many pieces may cost more than one message
                assert each.waited_s <= each.sending_s * (1 + 1e-9), each.axis


def test_faster_links_send_the_same_bytes_in_less_time():
    layout = Layout(tp=4, dp_shard=2)
    here = scenario(num_gpus=8)
    gpu = replace(here.cluster.gpu, link_bytes_per_s=2 * here.cluster.gpu.link_bytes_per_s)
    slow = find(here, layout)[0]["tp"]
    fast = find(replace(here, cluster=replace(here.cluster, gpu=gpu)), layout)[0]["tp"]
    assert slow.fast_link_bytes == fast.fast_link_bytes and fast.sending_s < slow.sending_s
