"""Which node is named when nodes do not reach each other: every case of a table, and all of many
nodes.
"""

from __future__ import annotations

import itertools
import time
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from srunddp.supervisor.messages import ProbeResult
from srunddp.supervisor.network_cut import ALL_PAIRS_UP_TO, NetworkProbe, find_cuts, peers_of

Pairs = set[tuple[int, int]]


def both(*pairs: tuple[int, int]) -> Pairs:
    """Cuts in both directions."""
    return {*pairs} | {(there, here) for here, there in pairs}


def all_to(*nodes: int, size: int) -> Pairs:
    """Each other node misses these."""
    return {(here, there) for here in range(1, size + 1) for there in nodes if here != there}


@dataclass(frozen=True)
class Case:
    """Nodes from 1 on, the first of which is rank 0's.

    Attributes:
        size: How many there are, spare ones included.
        missed: Which node has not reached which.
        left: The nodes that are named to be left.
        text: A part of what is said.
        spares: How many of them are spare ones, the last.
        silent: The nodes that did not say in time what they have found.
        failed_before: The node of the failure before.
    """

    size: int
    missed: Pairs
    left: tuple[int, ...]
    text: str = ""
    spares: int = 0
    silent: tuple[int, ...] = ()
    failed_before: int = 0


CASES = {
    "none fails": Case(4, set(), (), "all 4 nodes reach each other"),
    "a pair": Case(4, both((2, 3)), (3,), "n2 and n3 cannot reach each other by TCP"),
    "a pair of three nodes": Case(3, both((2, 3)), (3,), "n2 and n3 cannot reach each other"),
    "one way": Case(4, {(2, 3)}, (3,), "n2 cannot reach n3 by TCP"),
    "the other way": Case(4, {(3, 2)}, (3,), "n3 cannot reach n2 by TCP"),
    "rank 0's node is one of the pair": Case(4, both((1, 3)), (3,), "n1 and n3 cannot"),
    "one way to rank 0's node": Case(4, {(2, 1)}, (2,), "n2 cannot reach n1 by TCP"),
    "the one that failed before": Case(4, both((2, 3)), (2,), failed_before=2),
    "not rank 0's that failed before": Case(4, both((1, 3)), (3,), failed_before=1),
    "one node is missed by all but rank 0's": Case(
        5, both((3, 2), (3, 4), (3, 5)), (3,), "n3 cannot reach 3 nodes by TCP: n[2,4-5]"
    ),
    "one node is missed by two": Case(6, both((2, 4), (4, 5)), (4,), "n4 cannot reach 2 nodes"),
    "rank 0's node is missed by two": Case(5, both((1, 3), (1, 4)), (1,), "n1 cannot reach 2"),
    "two disjoint pairs": Case(6, both((2, 3), (4, 5)), (5, 3), "n4 and n5 cannot"),
    "both sides of a pair are missed by another": Case(5, both((2, 3), (2, 4), (3, 4)), (4, 3)),
    "all fail but those to rank 0's node": Case(4, all_to(2, 3, 4, size=4), (), "firewall"),
    "all fail": Case(4, all_to(1, 2, 3, 4, size=4), (), "firewall"),
    "all fail, of three": Case(3, all_to(2, 3, size=3), (), "firewall"),
    "one node lets nobody in": Case(4, all_to(3, size=4), (), "firewall"),
    "one node reaches nobody": Case(4, {(3, 1), (3, 2), (3, 4)}, (), "firewall"),
    "one end of the pair is starved": Case(4, {(2, 3)}, (3,), "n2 and n3 cannot", silent=(3,)),
    "both ends of the pair are starved": Case(4, set(), (), "2 of 4 nodes", silent=(2, 3)),
    "only rank 0's node has answered": Case(4, set(), (), "1 of 4 nodes", silent=(2, 3, 4)),
    "a spare node tells which of the two": Case(4, both((2, 3), (2, 4)), (2,), spares=1),
    "a spare node's own trouble explains nothing": Case(
        5, both((2, 5), (3, 5), (4, 5)), (), spares=1
    ),
    "two ranks' nodes and a spare one": Case(3, both((1, 2)), (2,), spares=1),
}


def probe_of(case: Case) -> NetworkProbe:
    """With all answers; ranks are one less than their node's number."""
    nodes = {rank: f"n{rank + 1}" for rank in range(case.size)}
    addresses = {rank: f"10.0.{rank // 250}.{rank % 250}" for rank in nodes}
    probe = NetworkProbe(nodes, addresses, 9)
    for rank, request in probe.requests.items():
        if rank + 1 in case.silent:
            continue
        others = [target[0] for target in request.targets]
        missed = {there - 1 for here, there in case.missed if here == rank + 1}
        result = ProbeResult(
            reached=tuple(other for other in others if other not in missed),
            missed=tuple(other for other in others if other in missed),
            number=request.number,
        )
        probe.add(rank, result)
    return probe


@pytest.mark.parametrize("name", CASES)
def test_the_fewest_nodes_that_explain_it_are_named(name: str) -> None:
    case = CASES[name]
    probe = probe_of(case)
    assert probe.is_complete == (not case.silent)
    with_ranks = {f"n{number}" for number in range(1, case.size - case.spares + 1)}
    before = f"n{case.failed_before}" if case.failed_before else ""
    found = probe.findings(with_ranks, "n1", before)
    assert [cut.node for cut in found.cuts] == [f"n{number}" for number in case.left]
    assert case.text in (found.text or found.note)
    assert {*found.nodes} >= {cut.node for cut in found.cuts}


def test_what_a_rank_makes_up_is_ignored() -> None:
    """Such as the result of a probe that was not asked for, or of a rank that does not exist."""
    probe = probe_of(CASES["none fails"])
    probe.add(17, ProbeResult((), (0, 1, 2, 3), 1))
    probe.add(1, ProbeResult((0, -1), (99,), 1))
    assert probe.findings({"n1", "n2", "n3", "n4"}, "n1").cuts == ()


nodes = st.integers(0, 5)
PAIRS = st.sets(st.tuples(nodes, nodes).filter(lambda pair: pair[0] != pair[1]))


@given(PAIRS, st.sets(nodes), nodes)
def test_whatever_is_missed_who_is_left_explains_all_that_is_proven(
    missed: set[tuple[int, int]], starved: set[int], before: int
) -> None:
    names = [f"n{number}" for number in range(6)]
    every = [*itertools.permutations(range(6), 2)]
    said = [(here, there) for here, there in every if here not in starved]
    found = find_cuts(
        {(names[a], names[b]) for a, b in said if (a, b) not in missed},
        {(names[a], names[b]) for a, b in said if (a, b) in missed},
        with_ranks=names,
        rank_zero="n0",
        failed_before=names[before],
    )
    left = {cut.node for cut in found}
    assert len(left) == len(found)
    for cut in found:
        pairs = [{cut.node, other} for other in cut.others]
        assert all(any({names[a], names[b]} == pair for a, b in missed) for pair in pairs)
    reached = [pair for pair in said if pair not in missed]
    for here, there in missed & {*said}:
        is_proven = any(a == here for a, _ in reached) and any(b == there for _, b in reached)
        assert not is_proven or {names[here], names[there]} & left


def test_up_to_some_hundred_nodes_all_pairs_are_tried_and_of_more_a_few_for_each() -> None:
    assert peers_of(3, ALL_PAIRS_UP_TO) == [
        number for number in range(ALL_PAIRS_UP_TO) if number != 3
    ]
    for count in (ALL_PAIRS_UP_TO + 1, 1000, 4096, 9999):
        for index in (0, 1, count // 2, count - 1):
            peers = peers_of(index, count)
            assert {(index + 1) % count, (index - 1) % count} <= {*peers}
            assert index not in peers
            assert len(peers) <= 2 * count.bit_length()
            assert all(index in peers_of(peer, count) for peer in peers), "both ways"


def test_half_of_many_nodes_cut_from_the_other_half_is_understood_at_once() -> None:
    half = ALL_PAIRS_UP_TO // 2
    west = range(2, half + 1)
    east = range(half + 1, 2 * half + 1)
    case = Case(2 * half, both(*itertools.product(west, east)), ())
    probe = probe_of(case)
    began = time.process_time()
    found = probe.findings({f"n{number}" for number in range(1, 2 * half + 1)}, "n1")
    assert time.process_time() - began < 2.0
    assert {cut.node for cut in found.cuts} == {f"n{number}" for number in west}
    assert "more nodes" in found.text
