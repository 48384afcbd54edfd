"""Seconds of a collective or a message by size, group and link; docs/theory/time-model.md derives them.

An all-gather or a reduce-scatter of b bytes over n ranks moves (n - 1)/n · b through each rank's link in n - 1 hops, an
all-reduce is one of each (rings; arXiv:2104.04473, sec. 3). Groups are placed as `mesh.axes` orders them: tp innermost,
pp outermost.
"""

from math import ceil, log2
from typing import NamedTuple

from dtlayout.costmodel.scenario import Scenario, activation_size, fullest_share, tokens_of
from dtlayout.models.routed_experts import RoutedExperts
from dtlayout.spec.layout import Layout
from dtlayout.spec.recompute import Recompute


class Link(NamedTuple):
    """The connection that a collective or a message takes."""

    bytes_per_s: float
    """Bandwidth through each rank, one direction."""
    start_s: float
    """Time until all ranks of a collective have met."""
    latency_s: float
    """Time of each hop."""
    crosses_nodes: bool
    """Whether any hop takes the network, beyond the GPUs that fast links join."""


def half_all_reduce_s(size_bytes: float, num_ranks: int, link: Link) -> float:
    """An all-gather or a reduce-scatter of `size_bytes` over a ring."""
    if num_ranks == 1:
        return 0.0
    sending_s = (num_ranks - 1) / num_ranks * size_bytes / link.bytes_per_s
    return link.start_s + sending_s + (num_ranks - 1) * link.latency_s


def all_reduce_s(size_bytes: float, num_ranks: int, link: Link) -> float:
    """An all-reduce over a ring, or for few bytes over a tree, up and down (arXiv:1911.04610, sec. 2, of NCCL's)."""
    if num_ranks == 1:
        return 0.0
    hops = 2 * ceil(log2(num_ranks))
    tree_s = link.start_s + 2 * size_bytes / link.bytes_per_s + hops * link.latency_s
    return min(tree_s, 2 * half_all_reduce_s(size_bytes, num_ranks, link))


def node_link(scenario: Scenario) -> Link:
    """Between GPUs that fast links join: those of a node, or of several (`Cluster.gpus_linked`)."""
    constants = scenario.engine.constants
    bytes_per_s = scenario.cluster.gpu.link_bytes_per_s * constants.link_efficiency
    return Link(bytes_per_s, constants.collective_start_s, constants.link_latency_s, crosses_nodes=False)


def tp_link(scenario: Scenario, layout: Layout) -> Link:
    """The fast links, or the network of all GPUs that they join together where tp does not fit among these."""
    inside, constants, cluster = node_link(scenario), scenario.engine.constants, scenario.cluster
    if cluster.gpus_linked % layout.tp == 0:
        return inside
    outside = min(layout.tp, cluster.gpus_linked) * cluster.gpu.network_bytes_per_s * constants.tp_network_efficiency
    return Link(min(inside.bytes_per_s, outside), 0.0, constants.tp_network_latency_s, crosses_nodes=True)


def data_link(scenario: Scenario, layout: Layout, stride: int, num_ranks: int) -> Link:
    """For a group of `num_ranks` ranks, `stride` apart: inside a node, or a ring through several.

    In a node, or what fast links join to one, k ranks of the group lie together, and drive k^sharing of its network
    cards at once. Congestion grows with the nodes of the whole job, because all groups reduce at the same time.
    """
    cluster, constants = scenario.cluster, scenario.engine.constants
    gpu, linked, inside = cluster.gpu, cluster.gpus_linked, node_link(scenario)
    if stride * num_ranks <= linked:
        return inside
    together = max(1, min(num_ranks, linked // stride))
    congestion = 1 + layout.world_size / cluster.gpus_per_node * constants.network_congestion
    share = constants.network_efficiency * together**constants.network_sharing / congestion
    bytes_per_s = min(inside.bytes_per_s, gpu.network_bytes_per_s * share)
    return Link(bytes_per_s, 0.0, gpu.network_latency_s, crosses_nodes=True)


def exchange_s(scenario: Scenario, layout: Layout, size_bytes: float, copies: int) -> float:
    """An all-to-all over the ep ranks, neighbours: each rank's tokens, `size_bytes`, go to `copies` experts each.

    Each rank is sent as many, and a rank's own stay where they are. Those for ranks that fast links join take these,
    the others its own network card, at the same time. A token that is sent once to each node is handed on there.
    """
    if (ep := layout.ep) == 1:
        return 0.0
    gpu, reached = scenario.cluster.gpu, scenario.engine.constants.exchange_efficiency
    inside, near = node_link(scenario), min(ep, scenario.cluster.gpus_linked)
    link_bytes_per_s, network_bytes_per_s = gpu.link_bytes_per_s * reached, gpu.network_bytes_per_s * reached
    if near == ep:
        return inside.start_s + (ep - 1) / ep * copies * size_bytes / link_bytes_per_s + inside.latency_s
    nodes = ep / near
    near_copies, far_copies = copies * (near - 1) / ep, copies * (1 - 1 / nodes)
    if layout.sends_tokens_once:
        near_copies, far_copies = copies * (near - 1) / near, (nodes - 1) * (1 - (1 - 1 / nodes) ** copies)
    sending_s = max(near_copies * size_bytes / link_bytes_per_s, far_copies * size_bytes / network_bytes_per_s)
    return inside.start_s + sending_s + gpu.network_latency_s


class Exchanges(NamedTuple):
    """Number of all-to-alls that dispatch tokens of a block to their experts, or combine the results."""

    forward: int
    """In forward: there and back."""
    backward: int
    """In backward: gradients of results there, and of tokens back."""
    again: int
    """While a block is recomputed: there, where what came is not kept."""


def count_exchanges(scenario: Scenario, recompute: Recompute) -> Exchanges:
    """All-to-alls of a block that `recompute` covers; our trainer keeps what came where it keeps results of matmuls."""
    keeps = scenario.engine.features.nests_experts and "matmuls" in recompute.kept
    return Exchanges(2, 2, 0 if keeps else 1)


def copied_bytes(scenario: Scenario, layout: Layout, experts: RoutedExperts) -> float:
    """Bytes of the tokens of a rank that go to experts, a copy each; of the fullest rank those that come.

    tp ranks send their own part of the tokens (arXiv:2006.16668, sec. 3.2).
    """
    size = tokens_of(scenario, layout) / layout.tp * experts.width * activation_size(scenario)
    return size * experts.per_token * fullest_share(scenario, layout)


def message_link(scenario: Scenario, layout: Layout) -> Link:
    """Between neighbouring stages: the network, unless fast links join the whole job."""
    if layout.world_size <= scenario.cluster.gpus_linked:
        return node_link(scenario)._replace(start_s=0.0)  # two ranks need not meet
    gpu, efficiency = scenario.cluster.gpu, scenario.engine.constants.message_efficiency
    return Link(gpu.network_bytes_per_s * efficiency, 0.0, gpu.network_latency_s, crosses_nodes=True)


def message_s(scenario: Scenario, layout: Layout, size_bytes: float) -> float:
    """One microbatch's hidden states from a stage to the next, or their gradient back; 0 without a pipeline."""
    if not layout.is_pipelined:
        return 0.0
    link = message_link(scenario, layout)
    return size_bytes / link.bytes_per_s + link.latency_s
