"""Culprit: the rank that is at fault when a run ends, judged from what all ranks say of themselves.

[Note: who is at fault]
A rank that waits for others stands as still as the rank that they wait for. So states are blamed in this order: a
process that is gone, a rank that failed by itself, a rank that refused to go on, a node of which nothing is heard, a
process that is stopped, and a rank that lost a connection, or rather the link at its end (`links`). If there is none of
these, a rank that stands still by itself is blamed before one that only waits for others. Among several it is the rank
that stood still first, since all others went on until they needed it. A node that hears of no other node blames a rank
of its own only for what it sees of that rank.
On a GPU this tells about hosts, which launch ahead of their devices. If all ranks wait for a step's numbers, they stand
still alike, and only NCCL's flight records tell more.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from dtlayout.training.links import Node, describe_cut_links, describe_isolation
from dtlayout.training.progress import RankProgress

BLAME_ORDER = ("gone", "failed", "refused", "silent", "stopped", "cut off", "running")
"""States of ranks, the first to blame first: [Note: who is at fault]."""
CERTAIN = ("gone", "failed")
"""States that leave no doubt that the rank itself is at fault."""


class Culprit(NamedTuple):
    """The rank that is at fault, its state, and the line that says so."""

    rank: int
    state: str
    """One state of `BLAME_ORDER`."""
    line: str
    """One sentence for people."""


def find_culprit(nodes: Sequence[Node]) -> Culprit:
    """The rank at fault among all ranks of these nodes, by [Note: who is at fault]; rank -1 if they have none."""
    all_ranks = [
        (node, replace(record, state="silent") if node.is_silent else record)
        for node in nodes for record in node.records
    ]  # fmt: skip
    if not all_ranks:
        return Culprit(-1, "running", "no rank is left")
    node, found = min(
        all_ranks,
        key=lambda pair: (BLAME_ORDER.index(pair[1].state), pair[1].waits, -pair[1].age_s, pair[1].rank),
    )
    what = {
        "gone": f"is gone: its process ended without a word, killed perhaps; it was in {found.where}",
        "failed": f"failed in {found.where}: {found.reason}",
        "refused": f"ended in {found.where}: {found.reason}",
        "silent": f"is out of reach{_name_others(node, found)}; last heard of in {found.where}",
        "stopped": f"is stopped by a signal, for {found.age_s:.0f} s, in {found.where}",
        "cut off": f"lost a connection in {found.where}: {found.reason}",
        "running": f"stood still first, for {found.age_s:.0f} s, in {found.where}",
    }
    line = f"rank {found.rank} on {node.host} {what[found.state]}"
    link = describe_cut_links(nodes) if found.state == "cut off" else ""
    link = describe_isolation(nodes) if found.state == "silent" else link
    return Culprit(found.rank, found.state, f"{link}: {line}" if link else line)


def find_culprit_alone(own: Node, waited_s: float) -> Culprit:
    """The culprit as found by a node that heard of no other for `waited_s` seconds: its own rank, or else its link."""
    culprit = find_culprit([own])
    unheard = f"nothing was heard of other nodes within {waited_s:.0f} s"
    if culprit.state not in ("cut off", "running") or not own.records:
        return culprit._replace(line=f"{culprit.line}; {unheard}")
    found = next(record for record in own.records if record.rank == culprit.rank)
    return culprit._replace(
        line=f"the link of {own.host}, or that of the host of rank 0, is cut: {unheard}; rank {found.rank} was in "
        f"{found.where}"
    )


def _name_others(node: Node, found: RankProgress) -> str:
    others = sorted(record.rank for record in node.records if record.rank != found.rank)
    return f", with {', '.join(map(str, others))} of the same node" if others else ""
