"""Links between nodes: finds the one that is cut, from the ranks that have lost a connection.

[Note: which link is cut]
A rank that loses a connection is not to blame for it, and mostly knows the address at the other end. Nodes say which
addresses are theirs. So each such rank names a pair of nodes with a cut link between them. If there are several pairs
and one node is in all of them, the other nodes still reach each other, so the links of that node are gone.
"""

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from ipaddress import IPv6Address
from itertools import pairwise
from pathlib import Path

from dtlayout.base.formatting import join_words
from dtlayout.training.progress import RankProgress

_PEERS = (re.compile(r"\[([0-9A-Fa-f.:]+)\]:\d+"), re.compile(r"([\w.:-]+)<\d+>"))
"""Patterns of an address or a host's name with its port: first in messages of gloo, then of NCCL."""


@dataclass(frozen=True, kw_only=True)
class Node:
    """One node: its host, its addresses, and the progress of its ranks."""

    host: str
    records: Sequence[RankProgress]
    addresses: Sequence[str] = ()
    """Addresses of its network interfaces, without those that every host has."""
    is_silent: bool = False
    """Whether the node says nothing now; its other fields are what it said earlier."""


def find_peer(message: str) -> str:
    """The address at the other end of the connection in an error's message; empty if it names none."""
    found = (pattern.search(message) for pattern in _PEERS)
    return next((match[1] for match in found if match), "")


def find_addresses(net: Path = Path("/proc/net")) -> list[str]:
    """This host's addresses; none if /proc does not tell."""
    found: list[str] = []
    try:
        lines = (net / "fib_trie").read_text(encoding="utf-8").splitlines()
        found += [above.split()[-1] for above, line in pairwise(lines) if "/32 host LOCAL" in line]
        lines = (net / "if_inet6").read_text(encoding="utf-8").splitlines()
        found += [str(IPv6Address(int(line.split()[0], 16))) for line in lines]
    except (OSError, ValueError, IndexError):
        pass
    return [each for each in dict.fromkeys(found) if not each.startswith("127.") and each != "::1"]


def describe_cut_links(nodes: Sequence[Node]) -> str:
    """The cut links as a part of a sentence, such as "the link between a and b is cut"; empty if nobody can tell.

    `nodes` are all nodes of the run. Only ranks in state "cut off" count. If no address tells whom they lost, and
    several nodes have such ranks, those nodes are named: [Note: which link is cut].
    """
    names = _name(nodes)
    torn = [i for i, node in enumerate(nodes) if any(record.state == "cut off" for record in node.records)]
    pairs = _find_pairs(nodes)
    if not pairs:
        return f"a link between {join_words([names[i] for i in torn])} is cut" if len(torn) > 1 else ""
    common = set.intersection(*map(set, pairs))
    if len(pairs) > 1 and common:
        lost = common.pop()
        others = sorted({node for pair in pairs for node in pair} - {lost})
        return f"{names[lost]} has lost its links to {join_words([names[i] for i in others])}"
    listed = [join_words([names[i] for i in sorted(pair)]) for pair in sorted(pairs, key=sorted)]
    return f"the link between {', and that between '.join(listed)} is cut"


def describe_isolation(nodes: Sequence[Node]) -> str:
    """A part of a sentence, if all nodes but one are silent and there are at least three: the one has lost its links.

    Empty otherwise.
    """
    heard = [i for i, node in enumerate(nodes) if not node.is_silent]
    if len(heard) != 1 or len(nodes) < 3:
        return ""
    names = _name(nodes)
    others = [name for i, name in enumerate(names) if i != heard[0]]
    return f"{names[heard[0]]} has lost its links to {join_words(others)}, of which nothing is heard"


def _find_pairs(nodes: Sequence[Node]) -> set[frozenset[int]]:
    """Pairs of nodes, by their places in `nodes`, with a lost connection between them."""
    known = [(address, i) for i, node in enumerate(nodes) for address in {*node.addresses, node.host}]
    counts = Counter(address for address, _ in known)
    owner = {address: i for address, i in known if counts[address] == 1}  # not a bridge's, which each host has
    ends = (
        frozenset((i, owner[record.peer]))
        for i, node in enumerate(nodes)
        for record in node.records
        if record.state == "cut off" and record.peer in owner
    )
    return {pair for pair in ends if len(pair) == 2}


def _name(nodes: Sequence[Node]) -> list[str]:
    """Names of nodes: the host, and an address too where several hosts have one name."""
    hosts = [node.host for node in nodes]
    return [
        f"{node.host} ({node.addresses[0]})" if hosts.count(node.host) > 1 and node.addresses else node.host
        for node in nodes
    ]
