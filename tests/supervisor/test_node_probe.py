"""Whether a node reaches another: real sockets, and real firewalls between two namespaces."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import resource
import socket
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from srunddp.supervisor.limits import Limits
from srunddp.supervisor.messages import ProbeResult, ProbeTarget, ProbeWanted
from srunddp.supervisor.node_probe import NodeProbe
from tests.support.connections import listening, silent
from tests.support.namespaces import address, rules, two_nodes

LIMITS = Limits(probe_within=2.5, probe_attempts=(0.0, 0.5, 1.5))
PORT = 24000  # nothing listens there
SIX = "fd00:201::{}"


def wanted(*targets: ProbeTarget) -> ProbeWanted:
    return ProbeWanted("127.0.0.1", targets, 7)


def probed(
    source: str, targets: Sequence[ProbeTarget], limits: Limits = LIMITS
) -> tuple[ProbeResult, float]:
    """The result, and after how many seconds it was there."""
    began = time.monotonic()
    probe = NodeProbe(ProbeWanted(source, tuple(targets), 7), 0.0, limits)
    while not (result := probe.look(time.monotonic() - began)):
        time.sleep(0.01)
    return result, time.monotonic() - began


def test_whoever_accepts_or_refuses_is_reached_at_once_and_who_is_silent_is_missed() -> None:
    with listening("127.0.0.1") as [accepts], silent("127.0.0.2") as full:
        closed = socket.create_server(("127.0.0.3", 0))
        refuses = closed.getsockname()
        closed.close()
        targets = [(1, *accepts.getsockname()), (2, *refuses)]
        result, took = probed("127.0.0.1", targets)
        assert result == ProbeResult((1, 2), (), 7)
        assert took < 1.0
        result, took = probed("127.0.0.1", [*targets, (3, *full.getsockname())])
        assert result == ProbeResult((1, 2), (3,), 7)
        assert took >= LIMITS.probe_within


def test_a_supervisor_without_processor_time_misses_nobody() -> None:
    """The kernel has made the connection meanwhile."""
    with listening("127.0.0.1") as [accepts]:
        probe = NodeProbe(wanted((1, *accepts.getsockname())), 0.0, LIMITS)
        time.sleep(0.1)
        assert probe.look(1000.0) == ProbeResult((1,), (), 7)


def test_a_node_that_was_mended_within_the_time_is_reached() -> None:
    """The first attempt to connect is lost, and a later one is not."""
    with silent("127.0.0.2") as full:
        probe = NodeProbe(wanted((1, *full.getsockname())), 0.0, LIMITS)
        assert probe.look(0.1) is None
        taken, _ = full.accept()
        taken.close()
        assert probe.look(0.6) is None, "an attempt has begun just now"
        time.sleep(0.1)
        assert probe.look(0.7) == ProbeResult((1,), (), 7)


@pytest.mark.parametrize("source", ["198.51.100.1", "::1"])
def test_a_node_that_cannot_even_try_says_nothing_of_others(source: str) -> None:
    """Its interface has lost its address."""
    result, _ = probed(source, [(1, "127.0.0.1", PORT)], Limits(probe_within=0.2))
    assert result == ProbeResult((), (), 7)


def test_too_many_open_files_are_no_evidence_either() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest = os.dup(0)
    os.close(lowest)
    targets = [(number, f"127.0.1.{number}", PORT) for number in range(1, 40)]
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest + 20, hard))
    try:
        result, _ = probed("127.0.0.1", targets, Limits(probe_within=0.2))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert result.reached
    assert result.missed == ()


def test_nothing_stays_open() -> None:
    with silent("127.0.0.2") as full:
        before = len(os.listdir("/proc/self/fd"))
        both = wanted((1, *full.getsockname()), (2, "127.0.0.3", PORT))
        over = NodeProbe(both, 0.0, LIMITS)
        assert over.look(0.6) is None
        assert over.look(10.0)
        probe = NodeProbe(wanted((1, *full.getsockname())), 0.0, LIMITS)
        probe.close()
        assert len(os.listdir("/proc/self/fd")) == before


# Firewalls.


@pytest.fixture(scope="module")
def nodes() -> Iterator[dict[str, str]]:
    with two_nodes() as names:
        yield names


def within(namespace: str, source: str, target: str) -> bool:
    """Whether the second address is reached from the first, in this namespace."""
    ours, theirs = multiprocessing.Pipe(duplex=False)
    child = multiprocessing.get_context("fork").Process(
        target=_within, args=(namespace, source, target, theirs)
    )
    child.start()
    result: ProbeResult = ours.recv()
    child.join()
    assert {*result.reached, *result.missed} == {1}
    return bool(result.reached)


def _within(namespace: str, source: str, target: str, answer: object) -> None:
    with Path("/run/netns", namespace).open() as file:
        assert ctypes.CDLL(None, use_errno=True).setns(file.fileno(), 0) == 0
    result, _ = probed(source, [(1, target, PORT)])
    answer.send(result)  # type: ignore[attr-defined]


# Of each of the two nodes, west and east, its rules, by hook; and whether west reaches east.
FIREWALLS = {
    "none": ({}, {}, True),
    "east drops what comes": ({}, {"input": "tcp dport 24000 drop"}, False),
    "east's answers are dropped": ({}, {"output": "tcp sport 24000 drop"}, False),
    "west's own packets are dropped": ({"output": "tcp dport 24000 drop"}, {}, False),
    "east says that the host is prohibited": (
        {},
        {"input": "tcp dport 24000 reject with icmpx type admin-prohibited"},
        True,
    ),
    "east says that the host is unreachable": (
        {},
        {"input": "tcp dport 24000 reject with icmpx type host-unreachable"},
        True,
    ),
    "east resets": ({}, {"input": "tcp dport 24000 reject with tcp reset"}, True),
    "west's own kernel says so": (
        {"output": "tcp dport 24000 reject with icmpx type host-unreachable"},
        {},
        False,
    ),
    "one packet in five is lost": (
        {"input": "numgen random mod 5 < 1 drop"},
        {"input": "numgen random mod 5 < 1 drop"},
        True,
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", FIREWALLS)
@pytest.mark.parametrize("version", [4, 6])
def test_an_answer_is_one_of_the_other_node_itself(
    name: str, version: int, nodes: dict[str, str]
) -> None:
    west, east, is_reached = FIREWALLS[name]
    own = address("west", "data0") if version == 4 else SIX.format(1)
    other = address("east", "data0") if version == 4 else SIX.format(2)
    with rules(nodes["west"], west), rules(nodes["east"], east):
        assert within(nodes["west"], own, other) == is_reached


@pytest.mark.slow
def test_an_address_that_no_node_has_is_missed(nodes: dict[str, str]) -> None:
    """Our own kernel says that it cannot be reached, as it does if a node is off."""
    assert not within(nodes["west"], address("west", "data0"), "10.201.1.77")
    assert not within(nodes["west"], address("west", "data0"), "198.51.100.1")
