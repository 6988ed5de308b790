"""A thousand nodes of eight ranks are judged in seconds, and what is said of them fits a screen."""

from __future__ import annotations

import datetime
import itertools
import socket
import subprocess
import sys
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

import pytest

from srunddp.bootstrap.rendezvous.protocol import Address
from srunddp.check import bandwidth, connectivity, render
from srunddp.check.bandwidth import BandwidthMatrix
from srunddp.check.checks import versions
from srunddp.check.connectivity import ConnectivityMatrix
from srunddp.check.finding import Finding, Observation, Severity
from srunddp.ifaces import scan
from srunddp.ifaces.draft import draft
from srunddp.ifaces.scan import ScannedInterface
from tests.conftest import ROOT

NODES, PER_NODE, INTERFACES = 1000, 8, 4
QUICK = 6.0  # seconds of CPU, ten times of what it takes; each node with each would take minutes


class Told:
    """A hub whose ranks all say what ``answer`` makes of a question."""

    def __init__(self, answer: Callable[[int, Mapping[str, Any]], Any], nodes: int = NODES) -> None:
        self.trouble: dict[int, str] = {}
        self._answer = answer
        self._nodes = {rank: f"node{rank // PER_NODE:04d}" for rank in range(nodes * PER_NODE)}

    @property
    def nodes(self) -> dict[int, str]:
        """As the real one, anew each time."""
        return dict(sorted(self._nodes.items()))

    @property
    def leaders(self) -> dict[str, int]:
        return {node: rank for rank, node in sorted(self._nodes.items(), reverse=True)}

    def ask(self, questions: Mapping[int, Mapping[str, Any]], within: float) -> dict[int, Any]:
        return {rank: self._answer(rank, question) for rank, question in questions.items()}

    def ask_all(self, question: Mapping[str, Any], within: float, ranks: Iterable[int] | None = None) -> dict[int, Any]:
        return self.ask(dict.fromkeys(self._nodes if ranks is None else ranks, question), within)


@contextmanager
def quick(seconds: float = QUICK) -> Iterator[None]:
    began = time.process_time()
    yield
    assert time.process_time() - began < seconds


def host(rank: int) -> str:
    return f"10.{rank % INTERFACES}.{rank // PER_NODE // 250}.{rank // PER_NODE % 250 + 1}"


ADDRESSES = {rank: (f"ib{rank % INTERFACES}", host(rank)) for rank in range(NODES * PER_NODE)}


def probed(lost: Callable[[str, str], bool]) -> ConnectivityMatrix:
    """What a survey makes of ranks between which some ways are lost, by their addresses."""

    def answer(rank: int, question: Mapping[str, Any]) -> Any:
        match question["do"]:
            case "listen":
                return 4000
            case "connect":
                at = question["targets"].items()
                return {name: "no answer" if lost(host(rank), there) else "" for name, (there, _) in at}
        return []

    return connectivity.survey(Told(answer), ADDRESSES)  # type: ignore[arg-type]


# Which node reaches which.


def test_each_of_thousands_of_endpoints_tries_some_others_and_all_are_tried() -> None:
    with quick():
        ways = probed(lambda a, b: False)
        assert list(connectivity.judge(ways)) == []
        assert connectivity.summary(ways) == (
            "TCP between 4000 endpoints, 128000 ways (each to the next 32), on random ports"
        )
    assert {name for pair in ways.tried for name in pair} == set(ways.endpoints)
    assert not any(a.partition(":")[0] == b.partition(":")[0] for a, b in ways.tried)


@pytest.mark.parametrize("count", [2, 17, 64])
def test_up_to_64_endpoints_try_all_ways(count: int) -> None:
    names = [f"n{number}" for number in range(count)]
    assert sorted(connectivity.plan(dict(zip(names, names, strict=True)))) == sorted(itertools.permutations(names, 2))


@pytest.mark.parametrize(
    ("lost", "words"),
    [
        (lambda a, b: a == "10.1.1.1", "nothing that it sends from 10.1.1.1 reaches another node: no answer"),
        (lambda a, b: b == "10.1.1.1", "nothing that others send to 10.1.1.1 reaches it: no answer"),
        (lambda a, b: "10.1.1.1" in (a, b), "no TCP between 10.1.1.1 and any other node: no answer"),
    ],
)
def test_an_endpoint_is_named_alone_when_all_ways_that_were_tried_with_it_fail(lost: Any, words: str) -> None:
    with quick():
        (finding,) = connectivity.judge(probed(lost))
    assert (finding.nodes, finding.found) == (("node0250:ib1",), words)


def test_where_no_node_reaches_another_one_row_says_so() -> None:
    with quick():
        (finding,) = connectivity.judge(probed(lambda a, b: True))
    assert finding.found == "no TCP between any two nodes over ib0, ib1, ib2, ib3: no answer"
    assert len(finding.nodes) == NODES


def test_half_of_all_ways_lost_at_random_are_a_screenful() -> None:
    with quick():
        findings = list(connectivity.judge(probed(lambda a, b: zlib.crc32(f"{a} {b}".encode()) % 2 == 0)))
    assert len(findings) == 21
    assert all(each.between for each in findings[:20])
    assert findings[-1].found.startswith("… and ")
    assert findings[-1].found.endswith(" more ways")
    assert findings[-1].nodes


def tried(nodes: int, *broken: tuple[str, str]) -> ConnectivityMatrix:
    names = [f"node{number:02d}" for number in range(1, nodes + 1)]
    ends = {name: Address(f"10.0.0.{number}", 4000) for number, name in enumerate(names, 1)}
    return ConnectivityMatrix(
        ends, dict.fromkeys(names, 0), list(itertools.permutations(names, 2)), dict.fromkeys(broken, "no answer")
    )


def test_each_of_several_nodes_that_are_cut_off_is_named_and_no_other() -> None:
    off = ("node02", "node05")
    broken = [pair for pair in itertools.permutations([f"node{n:02d}" for n in range(1, 7)], 2) if {*off} & {*pair}]
    assert [each.nodes for each in connectivity.judge(tried(6, *broken))] == [("node02",), ("node05",)]


def test_many_nodes_that_are_cut_off_are_one_row() -> None:
    names = [f"node{number:02d}" for number in range(1, 61)]
    fine = ("node07", "node08")
    broken = [pair for pair in itertools.permutations(names, 2) if set(pair) != {*fine}]
    (row,) = render.merged(connectivity.judge(tried(60, *broken)))
    assert row.found == "no TCP between its address and any other node: no answer"
    assert set(row.nodes) == set(names) - {*fine}


# A listener takes in whoever comes.


@contextmanager
def prober(backlog: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[connectivity.Prober, int]]:
    """One whose kernel holds few connections that nobody has accepted."""

    def listening(host: str, ports: list[int]) -> socket.socket:
        return socket.create_server((host, ports[0]), backlog=backlog)

    monkeypatch.setattr(connectivity, "listen", listening)
    one = connectivity.Prober("127.0.0.1")
    try:
        yield one, one.listen()
    finally:
        one.close()


def test_more_connections_than_the_kernel_holds_are_all_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    with prober(8, monkeypatch) as (one, port):
        for _ in range(100):
            assert one.connect({"itself": ("127.0.0.1", port)}) == {"itself": ""}


def test_a_listener_that_is_made_anew_leaves_its_connections_to_the_measurement(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with prober(5, monkeypatch) as (one, _):
        one.connect({})
        port = one.listen()
        with socket.create_connection(("127.0.0.1", port)) as line:
            line.sendall(b"x" * 1000)
            line.shutdown(socket.SHUT_WR)
            assert one.listener is not None
            assert bandwidth.receive(one.listener) > 0


# How fast.


def test_rates_of_a_thousand_nodes() -> None:
    names = [f"node{number:04d}:ib{each}" for number in range(NODES) for each in range(INTERFACES)]
    ways = {way: 1e9 for pairs in bandwidth.rounds(names) for a, b in pairs for way in ((a, b), (b, a))}
    slow = {way: 1e6 if way[0] == "node0500:ib2" else rate for way, rate in ways.items()}
    with quick():
        (finding,) = bandwidth.judge(BandwidthMatrix(slow))
        assert bandwidth.summary(BandwidthMatrix(slow))
    assert finding.nodes == ("node0500:ib2",)
    uneven = {way: zlib.crc32(str(way).encode()) + (1e10 if number % 3 else 1) for number, way in enumerate(ways)}
    with quick():
        assert list(bandwidth.judge(BandwidthMatrix(uneven)))


def test_slow_ways_without_a_slow_node_are_a_screenful() -> None:
    names = [f"node{number:02d}" for number in range(60)]
    ways = {(a, b): 1e6 if (i + j) % 3 == 0 else 1e9 for (i, a), (j, b) in itertools.permutations(enumerate(names), 2)}
    assert len(list(bandwidth.judge(BandwidthMatrix(ways)))) == 21


def test_of_many_slow_ways_the_slowest_alone_are_measured_again() -> None:
    measured: list[int] = []

    def answer(rank: int, question: Mapping[str, Any]) -> Any:
        measured.append(rank)
        return 1e9 if rank % 16 else 1e3

    at = {f"node{rank // 8}": (rank, Address("10.0.0.1", 1)) for rank in range(0, NODES * PER_NODE, PER_NODE)}
    bandwidth.survey(Told(answer), at)  # type: ignore[arg-type]
    in_rounds = 2 * 8 * NODES
    assert len(measured) == in_rounds + 2 * 3 * 64


# The scan.


def link(name: str, address: str, network: str, **known: Any) -> ScannedInterface:
    usual = {"speed": 100_000, "passed_over": "", "names": (), "named": False, "devices": (), "layer": ""}
    return ScannedInterface(name=name, address=address, network=network, **{**usual, **known})


def test_an_ifaces_conf_of_a_thousand_nodes() -> None:
    def answer(rank: int, question: Mapping[str, Any]) -> Any:
        node = f"node{rank // PER_NODE:04d}"
        match question["do"]:
            case "links":
                every = [link(f"ib{n}", host(rank + n), f"10.{n}.0.0/16", names=(f"{node}-ib",)) for n in range(2)]
                return [asdict(each) for each in every]
            case "listen":
                return dict.fromkeys(question["addresses"], 4000)
            case "connect":
                return [True] * len(question["ways"])
        return {name: [host(int(name[4:8]) * PER_NODE)] for name in question["names"]}

    with quick(20.0):  # of which the fake hub takes most
        found = draft(scan.survey(Told(answer)), datetime.date(2026, 1, 2))  # type: ignore[arg-type]
    assert found.missing == ()
    assert "- nodes: node[0000-0999]\n  interface: [ib0, ib1]" in found.text
    assert 'address: "{node}-ib"' in found.text


def test_a_look_up_that_hangs_keeps_no_process() -> None:
    program = (
        "import socket, time\n"
        "socket.gethostbyaddr = lambda address: time.sleep(60)\n"
        "from srunddp.ifaces import scan\n"
        "scan._WITHIN = 0.1\n"
        "print(scan._names('10.0.0.1'))\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=30, cwd=ROOT)
    assert (done.returncode, done.stdout) == (0, "()\n")


# The checks.


def told(count: int, facts: Callable[[int], Any]) -> list[Observation[Any]]:
    return [Observation(rank, rank % PER_NODE, f"node{rank // PER_NODE:04d}", facts(rank)) for rank in range(count)]


def said(findings: Iterable[Finding]) -> list[tuple[Severity, str, int]]:
    return [(each.level, each.found, len(each.nodes)) for each in findings]


def test_versions_of_thousands_of_ranks_of_which_half_lack_torch() -> None:
    def facts(rank: int) -> versions.VersionFacts:
        place = "" if rank % 2 else "/env/lib"
        packages = {"torch": {"version": "2.13.0", "cuda": "", "git": "", "place": place}}
        return versions.VersionFacts("3.11.7", "/env/bin/python", "/env", packages, versions.NOT_ASKED)  # type: ignore[arg-type]

    with quick():
        assert said(versions.judge(told(NODES * PER_NODE, facts))) == [(Severity.FAIL, "no package torch", NODES)]
