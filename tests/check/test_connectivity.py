"""Real packets between two nodes: what gets lost is told, with the way on which it does."""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest

from srunddp.bootstrap.network import probe
from srunddp.bootstrap.network.probe import Prober
from srunddp.check import connectivity, render
from srunddp.check.connectivity import ConnectivityMatrix, Endpoint, survey
from srunddp.check.coordinator import Coordinator
from srunddp.check.finding import Finding, Severity
from tests.support.many_nodes import ADDRESSES, NODES, ManyNodes, host, quick
from tests.support.namespaces import address, asked, coordinator_of, rule

WEST, EAST = (address(node, "data0") for node in ("west", "east"))


@pytest.fixture
def coordinator(names: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> Iterator[Coordinator]:
    monkeypatch.setattr(probe, "WITHIN", 0.5)
    with coordinator_of(names, lambda _: Prober().handle) as coordinator:
        yield coordinator


def surveyed(coordinator: Coordinator) -> ConnectivityMatrix:
    return survey(coordinator, {1: ("data0", WEST), 2: ("data0", EAST)})


def test_a_rank_that_is_lost_says_nothing_of_the_network(
    coordinator: Coordinator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is named as lost; that nobody reaches it is no firewall's doing."""
    closed = lambda coordinator, ends: {name: replace(end, port=1) for name, end in ends.items()}  # noqa: E731
    monkeypatch.setattr(connectivity, "listening", closed)
    assert set(surveyed(coordinator).broken) == {("west", "east"), ("east", "west")}
    coordinator.errors[2] = "its process ended"
    assert set(surveyed(coordinator).broken) == {("east", "west")}


def test_an_address_that_cannot_be_listened_on_is_named() -> None:
    (finding,) = connectivity.evaluate(ConnectivityMatrix(endpoints={}, tried=[], not_listening=("node03:ib1",)))
    assert (finding.nodes, finding.found) == (("node03",), "no port on the interface's address can be listened on")


def test_nodes_that_reach_each_other_are_found_to(coordinator: Coordinator) -> None:
    ways = surveyed(coordinator)
    assert (len(ways.tried), ways.broken) == (2, {})
    assert {name: at.host for name, at in ways.endpoints.items()} == {"west": WEST, "east": EAST}
    assert list(connectivity.evaluate(ways)) == []


@pytest.mark.parametrize(
    ("at", "hook", "words", "broken"),
    [
        ("east", "input", f"ip saddr {WEST} drop", ("west", "east")),
        ("east", "output", f"ip daddr {WEST} drop", ("east", "west")),
        ("west", "input", f"ip saddr {EAST} drop", ("east", "west")),
        ("west", "output", f"ip daddr {EAST} drop", ("west", "east")),
    ],
)
def test_of_packets_that_are_lost_one_way_that_way_is_told(
    at: str, hook: str, words: str, broken: tuple[str, str], coordinator: Coordinator, names: dict[str, str]
) -> None:
    """Neither direction connects: that the answer is lost looks to the one who connects as if the packet were."""
    with rule(names[at], hook, words):
        ways = surveyed(coordinator)
    assert ways.broken == {broken: "no answer"}


def test_packets_that_are_lost_both_ways_are_told_as_two(coordinator: Coordinator, names: dict[str, str]) -> None:
    with rule(names["east"], "input", f"ip saddr {WEST} drop"), rule(names["west"], "input", f"ip saddr {EAST} drop"):
        ways = surveyed(coordinator)
    assert set(ways.broken) == {("west", "east"), ("east", "west")}


@pytest.mark.parametrize(
    ("verdict", "why"),
    [
        ("tcp flags & (syn | ack) == syn reject with tcp reset", "connection refused"),
        ("tcp flags & (syn | ack) == syn reject with icmp admin-prohibited", "no route to host"),
    ],
)
def test_a_firewall_that_refuses_is_told_in_its_words(
    verdict: str, why: str, coordinator: Coordinator, names: dict[str, str]
) -> None:
    with rule(names["east"], "input", f"ip saddr {WEST} {verdict}"):
        assert surveyed(coordinator).broken == {("west", "east"): why}


def test_only_a_connection_whose_answer_was_lost_is_half_open(coordinator: Coordinator, names: dict[str, str]) -> None:
    port = asked(coordinator, "east", do="listen", addresses=[EAST])[EAST]
    probes = [{"source": WEST, "host": EAST, "port": port}]
    assert asked(coordinator, "west", do="connect", probes=probes) == [""]
    assert asked(coordinator, "east", do="half open") == []
    with rule(names["west"], "input", f"ip saddr {EAST} drop"):
        assert asked(coordinator, "west", do="connect", probes=probes) == ["no answer"]
        assert asked(coordinator, "east", do="half open") == [WEST]
    assert asked(coordinator, "east", do="listen", addresses=[EAST]) != {EAST: port}
    assert asked(coordinator, "west", do="connect", probes=probes) == ["connection refused"]


# What is judged.

SIX = [f"node{number:02d}" for number in range(1, 7)]
PAIRS = list(itertools.permutations(SIX, 2))


def ways(*broken: tuple[str, str], nodes: Sequence[str] = SIX) -> ConnectivityMatrix:
    ends = {node: Endpoint(rank=0, interface="ib0", host=f"10.88.0.1{node[-1]}", port=4000) for node in nodes}
    tried = list(itertools.permutations(nodes, 2))
    return ConnectivityMatrix(endpoints=ends, tried=tried, broken=dict.fromkeys(broken, "no answer"))


def named(findings: Iterator[Finding]) -> list[str]:
    return [finding.between or ",".join(finding.nodes) for finding in findings]


def test_one_broken_way_names_the_pair_and_the_direction() -> None:
    assert list(connectivity.evaluate(ways())) == []
    (finding,) = connectivity.evaluate(ways(("node03", "node05")))
    assert (finding.between, finding.level) == ("node03 -> node05", Severity.FAIL)
    assert finding.found == "no TCP from 10.88.0.13 to 10.88.0.15: no answer"


CUT_OFF = pytest.mark.parametrize(
    ("lost", "words"),
    [
        (lambda me, a, b: a == me, "nothing that it sends from {} reaches another node: no answer"),
        (lambda me, a, b: b == me, "nothing that others send to {} reaches it: no answer"),
        (lambda me, a, b: me in (a, b), "no TCP between {} and any other node: no answer"),
    ],
)


@CUT_OFF
def test_a_node_that_is_cut_off_is_named_alone(lost: Callable[..., bool], words: str) -> None:
    (finding,) = connectivity.evaluate(ways(*(pair for pair in PAIRS if lost("node04", *pair))))
    assert (finding.nodes, finding.found) == (("node04",), words.format("10.88.0.14"))


@pytest.mark.parametrize(
    ("off", "more", "expected"),
    [
        ({"node04"}, [("node01", "node02")], ["node04", "node01 -> node02"]),
        ({"node02", "node05"}, [], ["node02", "node05"]),
    ],
)
def test_nodes_that_are_cut_off_hide_no_other(off: set[str], more: list[tuple[str, str]], expected: list[str]) -> None:
    lost = [pair for pair in PAIRS if off & {*pair}] + more
    assert named(connectivity.evaluate(ways(*lost))) == expected


def test_of_two_nodes_neither_is_blamed() -> None:
    two = SIX[:2]
    broken = list(itertools.permutations(two, 2))
    assert named(connectivity.evaluate(ways(*broken, nodes=two))) == ["node01 -> node02", "node02 -> node01"]


def test_many_nodes_that_are_cut_off_are_one_row() -> None:
    nodes = [f"node{number:02d}" for number in range(1, 61)]
    fine = {"node07", "node08"}
    broken = [pair for pair in itertools.permutations(nodes, 2) if {*pair} != fine]
    (row,) = render.merged(connectivity.evaluate(ways(*broken, nodes=nodes)))
    assert row.found == "no TCP between its address and any other node: no answer"
    assert set(row.nodes) == {*nodes} - fine


# A thousand nodes of eight ranks are judged in seconds, and what is said of them fits a screen.


def surveyed_many(lost: Callable[[str, str], bool]) -> ConnectivityMatrix:
    """What a survey makes of ranks between which some ways are lost, by their addresses."""

    def answer(rank: int, question: Mapping[str, Any]) -> Any:
        match question["do"]:
            case "listen":
                return dict.fromkeys(question["addresses"], 4000)
            case "connect":
                return ["no answer" if lost(host(rank), each["host"]) else "" for each in question["probes"]]
        return []

    return survey(ManyNodes(answer), ADDRESSES)  # type: ignore[arg-type]


def test_each_of_thousands_of_endpoints_tries_some_others() -> None:
    with quick():
        found = surveyed_many(lambda a, b: False)
        assert list(connectivity.evaluate(found)) == []
        assert connectivity.summary(found) == (
            "TCP between 4000 endpoints, 128000 ways (each to the next 32), on random ports"
        )
    assert {name for pair in found.tried for name in pair} == set(found.endpoints)
    assert not any(a.partition(":")[0] == b.partition(":")[0] for a, b in found.tried)


@pytest.mark.parametrize("count", [2, 17, 64])
def test_up_to_64_endpoints_try_all_ways(count: int) -> None:
    """So that no listener is tried by more than its queue holds before Linux 5.4, which is 128."""
    names = [f"n{number}" for number in range(count)]
    assert sorted(connectivity.plan(dict(zip(names, names, strict=True)))) == sorted(itertools.permutations(names, 2))


@CUT_OFF
def test_of_thousands_the_one_that_is_cut_off_is_named(lost: Callable[..., bool], words: str) -> None:
    with quick():
        (finding,) = connectivity.evaluate(surveyed_many(lambda a, b: lost("10.1.1.1", a, b)))
    assert (finding.nodes, finding.found) == (("node0250:ib1",), words.format("10.1.1.1"))


def test_where_no_node_reaches_another_one_row_says_so() -> None:
    with quick():
        (finding,) = connectivity.evaluate(surveyed_many(lambda a, b: True))
    assert finding.found == "no TCP between any two nodes over ib0, ib1, ib2, ib3: no answer"
    assert len(finding.nodes) == NODES


def test_half_of_all_ways_lost_at_random_are_a_screenful() -> None:
    with quick():
        findings = list(connectivity.evaluate(surveyed_many(lambda a, b: zlib.crc32(f"{a} {b}".encode()) % 2 == 0)))
    assert (len(findings), all(each.between for each in findings[:20])) == (21, True)
    assert findings[-1].found.startswith("… and ")
    assert findings[-1].found.endswith(" more ways")
    assert findings[-1].nodes
