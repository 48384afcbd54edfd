"""Which link is cut: of ranks that have lost connections, of a node that hears of no other one."""

from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dtlayout.training.culprit import find_culprit, find_culprit_alone
from dtlayout.training.links import Node, describe_cut_links, describe_isolation, find_addresses, find_peer
from dtlayout.training.progress import RankProgress, SharedStatus

HOSTS = "abcdef"


def cut_off(rank: int, peer: str = "") -> RankProgress:
    """A rank that has lost a connection."""
    return RankProgress(
        rank=rank, step=5, doing="the update", age_s=1.0 + rank, state="cut off", reason="lost", peer=peer
    )


def nodes_of(pairs: set[tuple[int, int]], num_nodes: int = 4, *, both: bool = True) -> list[Node]:
    """Nodes of which these cannot reach each other; of each pair both ends say so, or the first one alone."""
    records: list[list[RankProgress]] = [[] for _ in range(num_nodes)]
    for one, other in pairs:
        records[one].append(cut_off(10 * one + other, f"10.0.0.{other}"))
        if both:
            records[other].append(cut_off(10 * other + one, f"10.0.0.{one}"))
    for i, own in enumerate(records):
        own.append(RankProgress(rank=10 * i + 9, step=5, doing="waiting", age_s=90.0, state="running", waits=True))
    return [Node(host=HOSTS[i], records=own, addresses=[f"10.0.0.{i}"]) for i, own in enumerate(records)]


@pytest.mark.parametrize("both", [True, False])
def test_a_link_that_is_cut_is_to_blame_and_neither_of_the_nodes_at_its_ends(both):
    verdict = find_culprit(nodes_of({(1, 2)}, both=both))
    assert (
        verdict.line == "the link between b and c is cut: rank 12 on b lost a connection in step 5, the update: lost"
        or (both and verdict.line.startswith("the link between b and c is cut: rank 21 on c lost a connection"))
    )


@given(lost=st.integers(0, 4), num_cut=st.integers(2, 4), num_nodes=st.just(5), both=st.booleans())
def test_a_node_that_has_lost_links_to_others_which_reach_each_other_is_named(lost, num_cut, num_nodes, both):
    others = [i for i in range(num_nodes) if i != lost][:num_cut]
    nodes = nodes_of({(other, lost) for other in others}, num_nodes, both=both)
    names = [HOSTS[i] for i in others]
    assert describe_cut_links(nodes) == f"{HOSTS[lost]} has lost its links to {', '.join(names[:-1])} and {names[-1]}"
    assert find_culprit(nodes).line.startswith(f"{HOSTS[lost]} has lost its links to ")


@given(pairs=st.sets(st.sampled_from(list(combinations(range(6), 2))), min_size=1))
def test_every_cut_is_told_and_no_node_is_named_that_has_all_its_links(pairs):
    said = describe_cut_links(nodes_of(pairs, 6))
    torn = {i for pair in pairs for i in pair}
    words = said.replace(",", " ").split()
    assert {host for host in HOSTS if host in words} - {"a"} == {HOSTS[i] for i in torn} - {"a"}
    common = set.intersection(*map(set, pairs))
    assert ("has lost its links" in said) == (len(pairs) > 1 and bool(common))


def test_links_that_have_no_node_in_common_are_listed():
    assert describe_cut_links(nodes_of({(0, 1), (2, 3)})) == "the link between a and b, and that between c and d is cut"


def test_connections_of_which_nobody_knows_the_other_end_tear_a_link_between_those_that_lost_them():
    nodes = [Node(host=host, records=[cut_off(i)]) for i, host in enumerate("ab")]
    assert describe_cut_links(nodes) == "a link between a and b is cut"
    assert describe_cut_links(nodes[:1]) == ""
    assert find_culprit(nodes[:1]).line == "rank 0 on a lost a connection in step 5, the update: lost"


def test_a_connection_inside_a_node_and_an_address_that_all_nodes_have_tell_of_no_link():
    inside = Node(host="a", records=[cut_off(0, "10.0.0.1")], addresses=["10.0.0.1", "172.17.0.1"])
    other = Node(host="b", records=[cut_off(1, "172.17.0.1")], addresses=["10.0.0.2", "172.17.0.1"])
    assert describe_cut_links([inside]) == ""
    assert describe_cut_links([inside, other]) == "a link between a and b is cut"


def test_hosts_of_one_name_are_told_by_their_addresses():
    one = Node(host="vm", records=[cut_off(0, "10.0.0.2")], addresses=["10.0.0.1"])
    other = Node(host="vm", records=[], addresses=["10.0.0.2"])
    assert describe_cut_links([one, other]) == "the link between vm (10.0.0.1) and vm (10.0.0.2) is cut"


def test_what_is_gone_or_failed_is_to_blame_before_any_link():
    nodes = nodes_of({(1, 2)})
    gone = RankProgress(rank=77, step=5, doing="the update", age_s=1.0, state="gone")
    assert find_culprit([*nodes, Node(host="e", records=[gone])]).line.startswith("rank 77 on e is gone: ")


def test_a_node_that_hears_of_none_of_several_others_has_lost_its_own_links():
    nodes = nodes_of(set(), 3)
    silent = [Node(host=each.host, records=each.records, is_silent=True) for each in nodes[1:]]
    said = "a has lost its links to b and c, of which nothing is heard"
    assert describe_isolation([nodes[0], *silent]) == said
    assert find_culprit([nodes[0], *silent]).line.startswith(f"{said}: rank 19 on b is out of reach")
    assert describe_isolation([*nodes[:2], silent[1]]) == ""  # c alone is not heard of
    assert (
        find_culprit([*nodes[:2], silent[1]]).line == "rank 29 on c is out of reach; last heard of in step 5, waiting"
    )
    assert describe_isolation([nodes[0], silent[0]]) == ""  # either of the two


def test_a_node_that_reaches_nobody_blames_its_link_and_none_of_its_ranks_that_only_wait():
    (own,) = nodes_of(set(), 1)
    assert find_culprit_alone(own, 15.0).line == (
        "the link of a, or that of the host of rank 0, is cut: nothing was heard of other nodes within 15 s; "
        "rank 9 was in step 5, waiting"
    )
    stopped = Node(
        host="a", records=[*own.records, RankProgress(rank=3, step=5, doing="x", age_s=2.0, state="stopped")]
    )
    assert find_culprit_alone(stopped, 15.0).line == (
        "rank 3 on a is stopped by a signal, for 2 s, in step 5, x; nothing was heard of other nodes within 15 s"
    )
    assert find_culprit_alone(Node(host="a", records=[]), 15.0).line.startswith("no rank is left; ")


@pytest.mark.parametrize(
    ("message", "peer"),
    [
        ("[/gloo/transport/tcp/pair.cc:553] Connection closed by peer [10.0.0.7]:50070. This is typical", "10.0.0.7"),
        ("[/gloo/transport/tcp/pair.cc:547] Read error [fd00::2]:4021: Connection reset by peer", "fd00::2"),
        ("NCCL error\nLast error:\nsocketProgress: Connection closed by remote peer node7.ib<41234>", "node7.ib"),
        ("[/gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 1800000ms for recv operation", ""),
    ],
)
def test_the_other_end_of_a_connection_is_read_from_the_error(message, peer):
    assert find_peer(message) == peer


def test_a_hosts_addresses_are_those_of_its_interfaces(tmp_path):
    (tmp_path / "fib_trie").write_text(
        "Main:\n  +-- 0.0.0.0/0 3 0 5\n     |-- 127.0.0.1\n        /32 host LOCAL\n     |-- 10.0.0.0\n"
        "        /24 link UNICAST\n     |-- 10.0.0.7\n        /32 host LOCAL\nLocal:\n     |-- 10.0.0.7\n"
        "        /32 host LOCAL\n"
    )
    assert find_addresses(tmp_path) == ["10.0.0.7"]  # a kernel without IPv6
    (tmp_path / "if_inet6").write_text(
        "00000000000000000000000000000001 01 80 10 80 lo\nfd000000000000000000000000000002 02 40 00 80 eth0\n"
    )
    assert find_addresses(tmp_path) == ["10.0.0.7", "fd00::2"]
    assert find_addresses(tmp_path / "none") == []


def test_a_record_keeps_with_whom_its_rank_lost_a_connection(tmp_path):
    board = SharedStatus(tmp_path / "board", 1, local_rank=0, rank=0)
    board.fail("cut off", "lost", "fd00::2")
    assert board.read()[0].peer == "fd00::2"
