"""The node that is slow is named, and no other; and the clock that is off."""

from __future__ import annotations

import itertools
import socket
import zlib

import pytest

from srunddp.bootstrap.network.probe import Prober
from srunddp.check import bandwidth
from srunddp.check.bandwidth import rounds
from srunddp.check.connectivity import Endpoint
from srunddp.check.finding import Severity
from srunddp.check.messages import CheckMessage, Received, SendBytes, Sent
from tests.support.many_nodes import INTERFACES, NODES, PER_NODE, ManyNodes, quick

PAIRS = list(itertools.permutations([f"node{number:02d}" for number in range(1, 7)], 2))


def measured(**slow: float) -> dict[tuple[str, str], float]:
    """Each way at about 1 GB/s, those of a node or a pair (``node04_node05``) at another rate."""
    every = {}
    for number, (a, b) in enumerate(PAIRS):
        rate = slow.get(
            f"{a}_{b}", slow.get(f"from_{a}", slow.get(f"to_{b}", 1e9 + 1e7 * (number % 7)))
        )
        every[a, b] = rate
    return every


@pytest.mark.parametrize(
    ("slow", "where", "found"),
    [
        ("from_node04", "node04", "it sends at most 6.0 MB/s to 5 of 5 nodes"),
        ("to_node04", "node04", "it receives at most 6.0 MB/s from 5 of 5 nodes"),
        ("node04_node05", "node04 -> node05", "6.0 MB/s"),
    ],
)
def test_a_slow_node_alone_is_named(slow: str, where: str, found: str) -> None:
    """Or else the way that is slow."""
    assert list(bandwidth.evaluate(measured())) == []
    (finding,) = bandwidth.evaluate(measured(**{slow: 6e6}))
    assert (finding.level, finding.between or ",".join(finding.nodes)) == (Severity.WARN, where)
    assert finding.found == found


@pytest.mark.parametrize("count", range(2, 9))
def test_all_pairs_meet_once_and_none_is_with_two_at_once(count: int) -> None:
    names = [str(number) for number in range(count)]
    plan = rounds(names)
    for pairs in plan:
        ends = [end for pair in pairs for end in pair]
        assert len(ends) == len(set(ends))
    met = [frozenset(pair) for pairs in plan for pair in pairs]
    assert sorted(map(sorted, met)) == sorted(map(sorted, itertools.combinations(names, 2)))


def test_rates_of_a_thousand_nodes() -> None:
    names = [f"node{number:04d}:ib{each}" for number in range(NODES) for each in range(INTERFACES)]
    ways = {way: 1e9 for pairs in rounds(names) for a, b in pairs for way in ((a, b), (b, a))}
    slow = {way: 1e6 if way[0] == "node0500:ib2" else rate for way, rate in ways.items()}
    with quick():
        (finding,) = bandwidth.evaluate(slow)
        assert bandwidth.summary(slow)
    assert finding.nodes == ("node0500:ib2",)
    assert all(sum(name in way for way in ways) == 16 for name in names[:9])  # each meets 8 others
    uneven = {
        way: zlib.crc32(str(way).encode()) + (1e10 if number % 3 else 1)
        for number, way in enumerate(ways)
    }
    with quick():
        assert list(bandwidth.evaluate(uneven))


def test_slow_ways_without_a_slow_node_are_a_screenful() -> None:
    names = [f"node{number:02d}" for number in range(60)]
    ways = {
        (a, b): 1e6 if (i + j) % 3 == 0 else 1e9
        for (i, a), (j, b) in itertools.permutations(enumerate(names), 2)
    }
    assert len(list(bandwidth.evaluate(ways))) == 21


def test_of_many_slow_ways_the_slowest_are_measured_again() -> None:
    asked: list[int] = []

    def answer(rank: int, question: CheckMessage) -> CheckMessage:
        asked.append(rank)
        if isinstance(question, SendBytes):
            return Sent()
        return Received(1e9 if rank % 16 else 1e3)

    ends = {
        f"node{rank}": Endpoint(rank=rank, interface="ib0", host="10.0.0.1", port=1)
        for rank in range(0, NODES * PER_NODE, PER_NODE)
    }
    bandwidth.survey(ManyNodes(answer), ends)  # type: ignore[arg-type]
    assert len(asked) == 2 * 8 * NODES + 2 * 3 * 64  # in rounds, and again


def test_what_a_sender_sends_is_measured() -> None:
    """By a listener that is made anew: what was tried with the one before is still in that one's
    queue.
    """
    prober = Prober()
    socket.create_connection(("127.0.0.1", prober.listen("127.0.0.1"))).close()
    with socket.create_connection(("127.0.0.1", prober.listen("127.0.0.1"))) as line:
        line.sendall(b"x" * 1000)
        line.shutdown(socket.SHUT_WR)
        assert bandwidth.receive(prober.listeners["127.0.0.1"]) > 0


@pytest.mark.parametrize(
    ("offsets", "wrong"),
    [
        ({"a": 0.0, "b": 0.1, "c": -0.1}, []),
        ({"a": 0.0, "b": 30.0, "c": 0.0}, [("b", "30.0 s ahead of", Severity.WARN)]),
        # Rank 0's own.
        ({"a": 0.0, "b": -30.0, "c": -30.1}, [("a", "30.0 s ahead of", Severity.WARN)]),
        ({"a": 0.0, "b": 0.0, "c": -400.0}, [("c", "400.0 s behind", Severity.FAIL)]),
        ({"a": 0.0}, []),
    ],
)
def test_the_clock_that_is_off_is_named(
    offsets: dict[str, float], wrong: list[tuple[str, str, Severity]]
) -> None:
    found = list(bandwidth.evaluate_clocks(offsets))
    assert [(each.nodes, each.level) for each in found] == [
        ((node,), level) for node, _, level in wrong
    ]
    assert all(words in each.found for each, (_, words, _) in zip(found, wrong, strict=True))
