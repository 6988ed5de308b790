"""Real packets between two nodes: what gets lost is told, with the way on which it does."""

from __future__ import annotations

import itertools
import socket
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial

import pytest

from srunddp.bootstrap.network import probe
from srunddp.bootstrap.network.probe import Prober, half_open
from srunddp.check import connectivity, render
from srunddp.check.connectivity import ConnectivityMatrix, Endpoint, survey
from srunddp.check.finding import Severity
from srunddp.check.messages import (
    CheckMessage,
    Connect,
    Connected,
    HalfOpen,
    Listen,
    Listening,
)
from srunddp.check.session import CheckSession
from tests.support.facts import tells
from tests.support.many_nodes import ADDRESSES, NODES, ManyNodes, host, quick
from tests.support.namespaces import address, coordinator_of, rule

pytestmark = pytest.mark.slow

WEST, EAST = (address(node, "data0") for node in ("west", "east"))


@pytest.fixture
def session(names: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> Iterator[CheckSession]:
    monkeypatch.setattr(probe, "WITHIN", 0.5)
    with coordinator_of(names, lambda _: partial(connectivity.answer, Prober())) as session:
        yield session


def surveyed(session: CheckSession) -> ConnectivityMatrix:
    return survey(session, {1: ("data0", WEST), 2: ("data0", EAST)})


def test_a_lost_rank_says_nothing_of_the_network(
    session: CheckSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is named as lost; that nobody reaches it is no firewall's doing."""
    closed = lambda session, ends: {name: replace(end, port=1) for name, end in ends.items()}  # noqa: E731
    monkeypatch.setattr(connectivity, "listening", closed)
    assert set(surveyed(session).broken) == {("west", "east"), ("east", "west")}
    session.errors[2] = "its process ended"
    assert set(surveyed(session).broken) == {("east", "west")}


def test_one_broken_way_is_named() -> None:
    assert list(connectivity.evaluate(ways())) == []
    (finding,) = connectivity.evaluate(ways(("node03", "node05")))
    assert (finding.between, finding.level) == ("node03 -> node05", Severity.FAIL)
    assert finding.found == "no TCP from 10.88.0.13 to 10.88.0.15: no answer"


SYN = "tcp flags & (syn | ack) == syn reject with"
THERE = ("west", "east")
BACK = ("east", "west")


@pytest.mark.parametrize(
    ("rules", "broken"),
    [
        ([], {}),
        ([("east", "input", f"ip saddr {WEST} drop")], {THERE: "no answer"}),
        ([("east", "output", f"ip daddr {WEST} drop")], {BACK: "no answer"}),
        ([("west", "input", f"ip saddr {EAST} drop")], {BACK: "no answer"}),
        ([("west", "output", f"ip daddr {EAST} drop")], {THERE: "no answer"}),
        (
            [
                ("east", "input", f"ip saddr {WEST} drop"),
                ("west", "input", f"ip saddr {EAST} drop"),
            ],
            {THERE: "no answer", BACK: "no answer"},
        ),
        ([("east", "input", f"ip saddr {WEST} {SYN} tcp reset")], {THERE: "connection refused"}),
        (
            [("east", "input", f"ip saddr {WEST} {SYN} icmp admin-prohibited")],
            {THERE: "no route to host"},
        ),
    ],
)
def test_of_packets_that_are_lost_one_way_that_way_is_told(
    rules: list[tuple[str, str, str]],
    broken: dict[tuple[str, str], str],
    session: CheckSession,
    names: dict[str, str],
) -> None:
    """Neither direction connects: that the answer is lost looks to the one who connects as if the
    packet were.
    """
    with ExitStack() as stack:
        for at, hook, words in rules:
            stack.enter_context(rule(names[at], hook, words))
        ways = surveyed(session)
    assert (len(ways.tried), ways.broken) == (2, broken)
    assert {name: at.host for name, at in ways.endpoints.items()} == {"west": WEST, "east": EAST}
    assert len(list(connectivity.evaluate(ways))) == len(broken)


@pytest.mark.alone
def test_half_open_connections_are_asked_for_in_time(
    names: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where a node's own firewall drops its answers, the kernel forgets such a connection after a
    second or two.
    """

    def half_open_later(listeners: Iterable[socket.socket]) -> list[str]:
        time.sleep(0.3)
        return half_open(listeners)

    monkeypatch.setattr(probe, "half_open", half_open_later)
    dropped = rule(names["east"], "output", f"ip daddr {WEST} drop")
    with (
        dropped,
        coordinator_of(names, lambda _: partial(connectivity.answer, Prober())) as session,
    ):
        assert set(surveyed(session).broken) == {BACK}


# What is judged.

SIX = [f"node{number:02d}" for number in range(1, 7)]


def ways(*broken: tuple[str, str], nodes: Sequence[str] = SIX) -> ConnectivityMatrix:
    ends = {
        node: Endpoint(rank=0, interface="ib0", host=f"10.88.0.1{node[-1]}", port=4000)
        for node in nodes
    }
    tried = list(itertools.permutations(nodes, 2))
    return ConnectivityMatrix(
        endpoints=ends, tried=tried, broken=dict.fromkeys(broken, "no answer")
    )


@pytest.mark.parametrize(
    ("off", "more", "nodes", "expected"),
    [
        ({"node04"}, [("node01", "node02")], SIX, ["node04", "node01 -> node02"]),
        ({"node02", "node05"}, [], SIX, ["node02", "node05"]),
        # Of two neither is blamed.
        ({"node01"}, [], SIX[:2], ["node01 -> node02", "node02 -> node01"]),
    ],
)
def test_nodes_that_are_cut_off_hide_no_other(
    off: set[str], more: list[tuple[str, str]], nodes: list[str], expected: list[str]
) -> None:
    lost = [pair for pair in itertools.permutations(nodes, 2) if off & {*pair}] + more
    assert [
        row.between or ",".join(row.nodes)
        for row in connectivity.evaluate(ways(*lost, nodes=nodes))
    ] == expected


def test_many_nodes_that_are_cut_off_are_one_row() -> None:
    nodes = [f"node{number:02d}" for number in range(1, 61)]
    fine = {"node07", "node08"}
    broken = [pair for pair in itertools.permutations(nodes, 2) if {*pair} != fine]
    (row,) = render.merged(connectivity.evaluate(ways(*broken, nodes=nodes)))
    assert tells(row.found, "no TCP", "any other node", "no answer")
    assert set(row.nodes) == {*nodes} - fine


# A thousand nodes of eight ranks are judged in seconds, and what is said of them fits a screen.


def surveyed_many(lost: Callable[[str, str], bool]) -> ConnectivityMatrix:
    """What a survey makes of ranks between which some ways are lost, by their addresses."""

    def answer(rank: int, question: CheckMessage) -> CheckMessage:
        match question:
            case Listen():
                return Listening(dict.fromkeys(question.addresses, 4000))
            case Connect():
                own = host(rank)
                hosts = [each.host for each in question.probes]
                return Connected(tuple("no answer" if lost(own, each) else "" for each in hosts))
        return HalfOpen(())

    return survey(ManyNodes(answer), ADDRESSES)  # type: ignore[arg-type]


def test_each_of_thousands_of_endpoints_tries_some_others() -> None:
    with quick():
        found = surveyed_many(lambda a, b: False)
        assert list(connectivity.evaluate(found)) == []
        said = connectivity.summary(found)
        assert tells(said, "4000 endpoints", "128000 ways", "next 32")
    assert {name for pair in found.tried for name in pair} == set(found.endpoints)
    assert not any(a.partition(":")[0] == b.partition(":")[0] for a, b in found.tried)


@pytest.mark.parametrize("count", [2, 17, 64])
def test_up_to_64_endpoints_try_all_ways(count: int) -> None:
    """So that no listener is tried by more than its queue holds before Linux 5.4, which is 128."""
    names = [f"n{number}" for number in range(count)]
    assert sorted(connectivity.plan(dict(zip(names, names, strict=True)))) == sorted(
        itertools.permutations(names, 2)
    )


ONE = "10.1.1.1"


@pytest.mark.parametrize(
    ("lost", "words"),
    [
        (
            lambda a, b: a == ONE,
            f"nothing that it sends from {ONE} reaches another node: no answer",
        ),
        (lambda a, b: b == ONE, f"nothing that others send to {ONE} reaches it: no answer"),
        (lambda a, b: ONE in (a, b), f"no TCP between {ONE} and any other node: no answer"),
    ],
)
def test_of_thousands_the_one_that_is_cut_off_is_named(
    lost: Callable[[str, str], bool], words: str
) -> None:
    with quick():
        (finding,) = connectivity.evaluate(surveyed_many(lost))
    assert (finding.nodes, finding.found) == (("node0250:ib1",), words)


def test_where_no_node_reaches_another_one_row_says_so() -> None:
    with quick():
        (finding,) = connectivity.evaluate(surveyed_many(lambda a, b: True))
    assert tells(finding.found, "no TCP", "ib0, ib1, ib2, ib3", "no answer")
    assert len(finding.nodes) == NODES


def test_half_of_all_ways_lost_at_random_are_a_screenful() -> None:
    with quick():
        findings = list(
            connectivity.evaluate(
                surveyed_many(lambda a, b: zlib.crc32(f"{a} {b}".encode()) % 2 == 0)
            )
        )
    assert (len(findings), all(each.between for each in findings[:20])) == (21, True)
    assert findings[-1].found.startswith("… and ")
    assert findings[-1].found.endswith(" more ways")
    assert findings[-1].nodes
