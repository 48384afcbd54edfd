"""Which link a collective or a message takes, and how long it does; 8 GPUs a node, of 100 and 10 GB/s."""

from dataclasses import replace

import pytest
from small import US, scenario

from dtlayout.costmodel.comm import Link, all_reduce_s, data_link, half_all_reduce_s, message_link, message_s, tp_link
from dtlayout.costmodel.scenario import Scenario
from dtlayout.spec.layout import Layout

INSIDE = Link(bytes_per_s=50e9, start_s=10e-6, latency_s=5e-6, crosses_nodes=False)


def rack(num_gpus: int) -> Scenario:
    """Nodes of 4 GPUs, 72 of which fast links join."""
    here = scenario(num_gpus=num_gpus)
    gpu = replace(here.cluster.gpu, gpus_linked=72)
    return replace(here, cluster=replace(here.cluster, gpu=gpu, gpus_per_node=4))


def test_a_ring_sends_all_but_one_share_in_one_hop_less_than_ranks():
    assert half_all_reduce_s(1e9, 4, INSIDE) == pytest.approx(10 * US + 0.75e9 / 50e9 + 3 * 5 * US)


def test_one_rank_sends_nothing():
    assert half_all_reduce_s(1e9, 1, INSIDE) == 0


def test_an_all_reduce_takes_a_ring_for_many_bytes_and_a_tree_for_few():
    assert all_reduce_s(1e9, 8, INSIDE) == 2 * half_all_reduce_s(1e9, 8, INSIDE)
    assert all_reduce_s(8, 1024, INSIDE) == pytest.approx(10 * US + 2 * 10 * 5 * US, rel=1e-3)
    assert all_reduce_s(1e9, 1, INSIDE) == 0


@pytest.mark.parametrize("tp", [2, 4, 8])
def test_tp_that_divides_a_node_stays_inside(tp):
    assert tp_link(scenario(num_gpus=64), Layout(tp=tp)) == INSIDE


@pytest.mark.parametrize(("tp", "bytes_per_s"), [(3, 15e9), (16, 40e9), (64, 40e9)])
def test_tp_across_nodes_has_the_network_of_its_gpus_in_one_node(tp, bytes_per_s):
    found = tp_link(scenario(num_gpus=64), Layout(tp=tp))
    assert found == Link(bytes_per_s, start_s=0.0, latency_s=20e-6, crosses_nodes=True)


def test_tp_across_nodes_is_no_faster_than_inside():
    found = tp_link(scenario(link_efficiency=0.2), Layout(tp=16))
    assert found.bytes_per_s == pytest.approx(20e9)


@pytest.mark.parametrize(("stride", "num_ranks"), [(1, 8), (2, 4), (4, 2)])
def test_a_data_parallel_group_that_spans_one_node_stays_inside(stride, num_ranks):
    assert data_link(scenario(), Layout(tp=stride, dp_shard=num_ranks), stride, num_ranks) == INSIDE


@pytest.mark.parametrize(
    ("stride", "num_ranks", "together"),
    [
        (1, 32, 8),  # all GPUs of a node
        (4, 8, 2),
        (8, 4, 1),
        (16, 2, 1),  # not in every node
    ],
)
def test_ranks_of_a_group_in_one_node_share_its_network_and_nodes_crowd_it(stride, num_ranks, together):
    """32 GPUs are 4 nodes: half of 10 GB/s, times the root of the ranks together, over 1 + 4 · 0.1."""
    found = data_link(scenario(num_gpus=32), Layout(tp=stride, dp_shard=num_ranks), stride, num_ranks)
    assert found.crosses_nodes
    assert found.bytes_per_s == pytest.approx(5e9 * together**0.5 / 1.4)
    assert (found.start_s, found.latency_s) == (0, 10e-6)


def test_a_group_across_nodes_is_no_faster_than_inside():
    most = {"network_sharing": 1.0, "network_efficiency": 1.0, "network_congestion": 0.0}
    found = data_link(scenario(num_gpus=16, **most), Layout(dp_shard=16), 1, 16)
    assert found.bytes_per_s == pytest.approx(50e9)


def test_messages_take_the_network_unless_the_job_is_in_one_node():
    assert message_link(scenario(), Layout(pp=8)) == Link(50e9, 0.0, 5e-6, crosses_nodes=False)
    assert message_link(scenario(), Layout(pp=2, dp_shard=8)) == Link(5e9, 0.0, 10e-6, crosses_nodes=True)


def test_a_message_is_its_bytes_and_one_hop():
    assert message_s(scenario(), Layout(pp=16), 1e6) == pytest.approx(200 * US + 10 * US)
    assert message_s(scenario(), Layout(), 1e6) == 0


@pytest.mark.parametrize("tp", [8, 24, 72])
def test_tp_takes_the_fast_links_of_a_domain_that_is_larger_than_a_node(tp):
    assert tp_link(rack(144), Layout(tp=tp, dp_shard=144 // tp)) == INSIDE
    assert tp_link(scenario(num_gpus=144), Layout(tp=tp, dp_shard=144 // tp)).crosses_nodes == (tp > 8)


def test_tp_that_does_not_divide_a_domain_crosses_the_network_and_a_part_of_one_has_its_own_divisors():
    assert tp_link(rack(144), Layout(tp=16, dp_shard=9)).crosses_nodes
    assert tp_link(rack(64), Layout(tp=16, dp_shard=4)) == INSIDE


def test_a_ring_through_two_domains_has_the_network_of_all_gpus_of_one():
    """144 GPUs are 36 nodes: half of 10 GB/s, times the root of 72, over 1 + 36 · 0.1."""
    assert data_link(rack(144), Layout(dp_shard=72, pp=2), 1, 72) == INSIDE
    found = data_link(rack(144), Layout(dp_shard=144), 1, 144)
    assert found.crosses_nodes
    assert found.bytes_per_s == pytest.approx(5e9 * 72**0.5 / 4.6)


def test_messages_stay_inside_a_domain_that_holds_the_job():
    assert not message_link(rack(72), Layout(pp=18, tp=4)).crosses_nodes
    assert message_link(rack(144), Layout(pp=36, tp=4)).crosses_nodes
