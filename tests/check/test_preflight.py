"""What rank 0 makes of what was measured between the nodes: the one that is at fault is named, and no other."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import pytest

from srunddp.bootstrap.rendezvous.protocol import Address, Hello
from srunddp.check import allreduce, bandwidth, clocks, connectivity
from srunddp.check import preflight as checking
from srunddp.check.bandwidth import BandwidthMatrix, rounds
from srunddp.check.checks import interface
from srunddp.check.connectivity import ConnectivityMatrix
from srunddp.check.finding import Finding, Observation, Severity

NODES = [f"node{number:02d}" for number in range(1, 7)]
PAIRS = list(itertools.permutations(NODES, 2))


def ways(*broken: tuple[str, str], nodes: Sequence[str] = NODES) -> ConnectivityMatrix:
    ends = {node: Address(f"10.88.0.1{node[-1]}", 4000) for node in nodes}
    pairs = list(itertools.permutations(nodes, 2))
    return ConnectivityMatrix(ends, dict.fromkeys(nodes, 0), pairs, dict.fromkeys(broken, "no answer"))


def named(findings: Sequence[Finding]) -> list[str]:
    return [finding.between or ",".join(finding.nodes) for finding in findings]


# Which node reaches which.


def test_without_a_broken_way_there_is_nothing_to_say() -> None:
    assert list(connectivity.judge(ways())) == []


def test_one_broken_way_names_the_pair_and_the_direction() -> None:
    (finding,) = connectivity.judge(ways(("node03", "node05")))
    assert (finding.between, finding.level) == ("node03 -> node05", Severity.FAIL)
    assert finding.found == "no TCP from 10.88.0.13 to 10.88.0.15: no answer"


@pytest.mark.parametrize(
    ("lost", "words"),
    [
        (lambda a, b: a == "node04", "nothing that it sends from 10.88.0.14 reaches another node"),
        (lambda a, b: b == "node04", "nothing that others send to 10.88.0.14 reaches it"),
        (lambda a, b: "node04" in (a, b), "no TCP between 10.88.0.14 and any other node"),
    ],
)
def test_a_node_that_is_cut_off_is_named_alone(lost, words: str) -> None:
    (finding,) = connectivity.judge(ways(*(pair for pair in PAIRS if lost(*pair))))
    assert finding.nodes == ("node04",)
    assert finding.found.startswith(words)


def test_a_node_that_is_cut_off_does_not_hide_a_broken_pair() -> None:
    lost = [pair for pair in PAIRS if "node04" in pair] + [("node01", "node02")]
    assert named(list(connectivity.judge(ways(*lost)))) == ["node04", "node01 -> node02"]


def test_of_two_nodes_neither_is_blamed() -> None:
    two = NODES[:2]
    broken = list(itertools.permutations(two, 2))
    assert named(list(connectivity.judge(ways(*broken, nodes=two)))) == ["node01 -> node02", "node02 -> node01"]


# How fast.


def measured(**slow: float) -> BandwidthMatrix:
    """Each way at about 1 GB/s, those of a node or a pair (``node04_node05``) at another rate."""
    every = {}
    for number, (a, b) in enumerate(PAIRS):
        rate = slow.get(f"{a}_{b}", slow.get(f"from_{a}", slow.get(f"to_{b}", 1e9 + 1e7 * (number % 7))))
        every[a, b] = rate
    return BandwidthMatrix(every)


def test_even_rates_are_nothing_to_say() -> None:
    assert list(bandwidth.judge(measured())) == []


@pytest.mark.parametrize(("slow", "verb"), [("from_node04", "sends"), ("to_node04", "receives")])
def test_a_slow_node_alone_is_named(slow: str, verb: str) -> None:
    (finding,) = bandwidth.judge(measured(**{slow: 6e6}))
    assert finding.nodes == ("node04",)
    assert finding.found.startswith(f"it {verb} at most 6.0 MB/s")
    assert finding.level is Severity.WARN


def test_one_slow_way_is_named_as_a_way() -> None:
    assert named(list(bandwidth.judge(measured(node04_node05=6e6)))) == ["node04 -> node05"]


@pytest.mark.parametrize("count", range(2, 9))
def test_all_pairs_meet_once_and_none_is_with_two_at_once(count: int) -> None:
    names = [str(number) for number in range(count)]
    plan = rounds(names)
    for pairs in plan:
        ends = [end for pair in pairs for end in pair]
        assert len(ends) == len(set(ends))
    met = [frozenset(pair) for pairs in plan for pair in pairs]
    assert sorted(map(sorted, met)) == sorted(map(sorted, itertools.combinations(names, 2)))


def test_many_nodes_meet_a_few_others_each() -> None:
    names = [str(number) for number in range(100)]
    met = [pair for pairs in rounds(names) for pair in pairs]
    assert all(sum(name in pair for pair in met) == 8 for name in names)


# Clocks.


@pytest.mark.parametrize(
    ("offsets", "wrong"),
    [
        ({"a": 0.0, "b": 0.1, "c": -0.1}, []),
        ({"a": 0.0, "b": 30.0, "c": 0.0}, [("b", "30.0 s ahead of", Severity.WARN)]),
        ({"a": 0.0, "b": -30.0, "c": -30.1}, [("a", "30.0 s ahead of", Severity.WARN)]),  # rank 0's own
        ({"a": 0.0, "b": 0.0, "c": -400.0}, [("c", "400.0 s behind", Severity.FAIL)]),
        ({"a": 0.0}, []),
    ],
)
def test_the_clock_that_is_off_is_named(offsets: dict[str, float], wrong: list[tuple[str, str, Severity]]) -> None:
    found = list(clocks.judge(offsets))
    assert [(each.nodes, each.level) for each in found] == [((node,), level) for node, _, level in wrong]
    assert all(words in each.found for each, (_, words, _) in zip(found, wrong, strict=True))


# The all-reduce.

NAMES = {0: "node01", 1: "node02"}


def summed(*sweep: tuple[int, float], backend: str = "gloo", **changed) -> dict[int, allreduce.AllReduceFacts]:
    return {
        rank: allreduce.AllReduceFacts(**{"wrong": "", "backend": backend, "right": True, "sweep": sweep} | changed)
        for rank in NAMES
    }


def test_a_bandwidth_below_its_threshold_is_warned_of_and_the_threshold_is_said() -> None:
    facts = summed((1 << 20, 0.2e9), (1 << 23, 0.6e9))
    (finding,) = allreduce.judge(facts, NAMES, link=1.25e9)
    assert (finding.level, finding.nodes) == (Severity.WARN, ("node01", "node02"))
    assert finding.found == "all-reduce has a busbw of 0.60 GB/s over gloo"
    assert "0.62 GB/s, 0.5 of the link's 1.25" in finding.expected
    assert "threshold 0.62, 0.5 of the link's rate" in allreduce.summary(facts, 1.25e9)


def test_a_bandwidth_above_its_threshold_or_without_a_known_link_is_not_judged_bad() -> None:
    assert list(allreduce.judge(summed((1 << 23, 0.7e9)), NAMES, link=1.25e9)) == []
    assert list(allreduce.judge(summed((1 << 23, 0.001e9)), NAMES, link=0.0)) == []
    assert list(allreduce.judge(summed((1 << 23, 1.0e9), backend="nccl"), NAMES, link=1.25e9)) != []


FIT = {"wrong": [], "name": "eth0", "address": "10.0.0.1", "source": "", "speed": 10_000, "mtu": 1500, "physical": True}
LINK = FIT | {"own_name": [], "lookup": [], "devices": [], "rdma_rate": 0, "one_node": False}


def carried(links: Sequence[dict[str, Any]], backend: str, per_node: int = 1) -> float:
    """GB/s that the slowest of these nodes' networks is expected to carry."""
    ranks = list(enumerate(facts for facts in links for _ in range(per_node)))
    here = {rank: Hello("", rank, len(ranks), 0, f"node0{rank // per_node}", "", 1) for rank, _ in ranks}
    report = checking.Report(here, {rank: {"interface": {"facts": facts}} for rank, facts in ranks})
    return checking.slowest_link(report, backend) / 1e9


def hcas(count: int, rate: int = 400_000) -> dict[str, Any]:
    return LINK | {"devices": [f"mlx5_{number}" for number in range(count)], "rdma_rate": count * rate}


@pytest.mark.parametrize(
    ("links", "backend", "gigabytes"),
    [
        ([LINK, LINK | {"speed": 100_000}], "nccl", 1.25),
        ([hcas(1), hcas(1, 200_000)], "nccl", 25.0),
        ([hcas(1), hcas(1, 200_000)], "gloo", 1.25),
        ([LINK, LINK | {"physical": False}, LINK | {"speed": 100_000}], "gloo", 0.0),
        ([hcas(1), LINK | {"physical": False}], "nccl", 0.0),
        ([LINK], "gloo", 0.0),  # on one node no link is in use
    ],
)
def test_the_slowest_link_is_expected_to_carry_all_and_nothing_is_where_one_is_not_known(
    links: list[dict[str, Any]], backend: str, gigabytes: float
) -> None:
    assert carried(links, backend, per_node=2) == gigabytes


def test_no_more_devices_are_expected_to_carry_than_the_node_has_ranks() -> None:
    links = [hcas(8), hcas(8)]
    assert [carried(links, "nccl", per_node) for per_node in (1, 4, 8, 16)] == [50.0, 200.0, 400.0, 400.0]


def test_without_an_interface_that_is_fit_the_report_says_so() -> None:
    bad = interface.InterfaceFacts(
        **LINK | {"name": "", "address": "", "speed": 0, "mtu": 0, "wrong": ["down", "up", "see it"]}
    )
    assert interface.summary([Observation(0, 0, "node01", bad)]) == "none that is fit"


def test_a_wrong_sum_and_an_error_stop_a_job() -> None:
    wrong = {
        0: allreduce.AllReduceFacts("", "gloo", right=False),
        1: allreduce.AllReduceFacts("RuntimeError: no route"),
    }
    found = list(allreduce.judge(wrong, NAMES, 0.0))
    assert [(each.level, each.ranks, each.found) for each in found] == [
        (Severity.FAIL, (0,), "the sum of a small all-reduce is wrong"),
        (Severity.FAIL, (1,), "RuntimeError: no route"),
    ]
