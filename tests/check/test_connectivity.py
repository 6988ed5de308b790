"""Real packets between two nodes: what gets lost is told, with the way on which it does."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest

from srunddp.bootstrap.rendezvous.protocol import Address, listen
from srunddp.check import connectivity
from srunddp.check.connectivity import ConnectivityMatrix, Prober, survey
from srunddp.check.coordinator import Act, Coordinator, half_open
from tests.support.namespaces import address, asked, hub_of, rule, two_nodes

WITHIN = 0.5
WEST, EAST = (address(node, "data0") for node in ("west", "east"))


@pytest.fixture(scope="module")
def names() -> Iterator[dict[str, str]]:
    with two_nodes() as names:
        yield names


@pytest.fixture
def hub(names: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> Iterator[Coordinator]:
    monkeypatch.setattr(connectivity, "_WITHIN", WITHIN)
    with hub_of(names, probing) as hub:
        yield hub


def probing(node: str) -> Act:
    """As :class:`srunddp.check.responder.Responder` answers."""
    prober = Prober(address(node, "data0"))
    actions = {
        "listen": lambda _: prober.listen(),
        "connect": lambda question: prober.connect(question["targets"]),
        "half open": lambda _: half_open([prober.listener] if prober.listener else []),
    }
    return lambda question: actions[question["do"]](question)


def surveyed(hub: Coordinator) -> ConnectivityMatrix:
    return survey(hub, {1: ("data0", WEST), 2: ("data0", EAST)})


def test_a_rank_that_is_lost_says_nothing_of_the_network(hub: Coordinator) -> None:
    """It is named as lost; that nobody reaches it is no firewall's doing."""
    ways = surveyed(hub)
    hub.trouble[2] = "its process ended"
    assert connectivity._try(hub, ways.ranks, {**ways.endpoints, "east": Address(EAST, 1)}, list(ways.tried)) == {}
    del hub.trouble[2]
    assert connectivity._try(hub, ways.ranks, {**ways.endpoints, "east": Address(EAST, 1)}, list(ways.tried)) != {}


def test_an_address_that_cannot_be_listened_on_is_named() -> None:
    (finding,) = connectivity.judge(ConnectivityMatrix({}, {}, [], mute=("node03:ib1",)))
    assert (finding.nodes, finding.found) == (("node03",), "no port on the interface's address can be listened on")


def test_nodes_that_reach_each_other_are_found_to(hub: Coordinator) -> None:
    ways = surveyed(hub)
    assert (len(ways.tried), ways.broken) == (2, {})
    assert {name: at.host for name, at in ways.endpoints.items()} == {"west": WEST, "east": EAST}
    assert list(connectivity.judge(ways)) == []


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
    at: str, hook: str, words: str, broken: tuple[str, str], hub: Coordinator, names: dict[str, str]
) -> None:
    """Neither direction connects: that the answer is lost looks to the one who connects as if the packet were."""
    with rule(names[at], hook, words):
        ways = surveyed(hub)
    assert ways.broken == {broken: "no answer"}


def test_packets_that_are_lost_both_ways_are_told_as_two(hub: Coordinator, names: dict[str, str]) -> None:
    with rule(names["east"], "input", f"ip saddr {WEST} drop"), rule(names["west"], "input", f"ip saddr {EAST} drop"):
        ways = surveyed(hub)
    assert set(ways.broken) == {("west", "east"), ("east", "west")}


@pytest.mark.parametrize(
    ("verdict", "why"),
    [
        ("tcp flags & (syn | ack) == syn reject with tcp reset", "connection refused"),
        ("tcp flags & (syn | ack) == syn reject with icmp admin-prohibited", "no route to host"),
    ],
)
def test_a_firewall_that_refuses_is_told_in_its_words(
    verdict: str, why: str, hub: Coordinator, names: dict[str, str]
) -> None:
    with rule(names["east"], "input", f"ip saddr {WEST} {verdict}"):
        assert surveyed(hub).broken == {("west", "east"): why}


def test_only_a_connection_whose_answer_was_lost_is_half_open(hub: Coordinator, names: dict[str, str]) -> None:
    port = asked(hub, "east", do="listen")
    assert asked(hub, "east", do="half open") == []
    assert asked(hub, "west", do="connect", targets={"east": [EAST, port]}) == {"east": ""}
    assert asked(hub, "east", do="half open") == []
    with rule(names["west"], "input", f"ip saddr {EAST} drop"):
        assert asked(hub, "west", do="connect", targets={"east": [EAST, port]}) == {"east": "no answer"}
        assert asked(hub, "east", do="half open") == [WEST]


def test_a_listener_that_is_closed_refuses(hub: Coordinator) -> None:
    port = asked(hub, "east", do="listen")
    assert asked(hub, "east", do="listen") != port
    targets = {"east": [EAST, port]}
    assert asked(hub, "west", do="connect", targets=targets) == {"east": "connection refused"}


# On this machine alone.


def test_it_sends_from_its_own_address() -> None:
    with listen("127.0.0.1", [0]) as there:
        assert Prober("127.0.0.3").connect({"x": there.getsockname()}) == {"x": ""}
        line, (host, _) = there.accept()
        line.close()
    assert host == "127.0.0.3"


def test_an_address_that_is_not_this_nodes_can_neither_listen_nor_send() -> None:
    prober = Prober("192.0.2.7")
    assert prober.listen() == 0
    with listen("127.0.0.1", [0]) as there:
        assert prober.connect({"x": there.getsockname()}) == {"x": "cannot assign requested address"}


def test_hundreds_of_targets_are_tried_and_each_has_its_own_answer() -> None:
    with listen("127.0.0.1", [0]) as there, socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        ports = {str(number): (there if number % 2 else closed).getsockname() for number in range(300)}
        found = Prober("127.0.0.1").connect(ports)
    assert found == {str(number): "" if number % 2 else "connection refused" for number in range(300)}
