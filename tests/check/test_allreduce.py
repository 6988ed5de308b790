"""An all-reduce before a job: a wrong sum stops it, a slow one is warned of, by what the links can
carry.
"""

from __future__ import annotations

from typing import Any

import pytest

from srunddp.bootstrap.rendezvous.messages import Hello
from srunddp.check import allreduce
from srunddp.check.allreduce import AllReduceFacts
from srunddp.check.finding import Severity
from srunddp.check.messages import CollectedFacts
from srunddp.check.preflight import slowest_link
from srunddp.check.render import Report
from tests.support.facts import tells

NAMES = {0: "node01", 1: "node02"}


def summed(*sweep: tuple[int, float], backend: str = "gloo") -> dict[int, AllReduceFacts]:
    return {rank: AllReduceFacts(backend=backend, sweep=sweep) for rank in NAMES}


def test_a_bandwidth_below_its_threshold_is_warned_of() -> None:
    facts = summed((1 << 20, 0.2e9), (1 << 23, 0.6e9))
    (finding,) = allreduce.evaluate(facts, NAMES, link=1.25e9)
    assert (finding.level, finding.nodes) == (Severity.WARN, ("node01", "node02"))
    assert tells(finding.found, "0.60 GB/s", "gloo")
    assert tells(finding.expected, "0.62 GB/s", "0.5", "1.25")
    assert tells(allreduce.summary(facts, 1.25e9), "threshold 0.62", "0.5")


def test_nothing_is_expected_where_no_link_is_known() -> None:
    assert list(allreduce.evaluate(summed((1 << 23, 0.7e9)), NAMES, link=1.25e9)) == []
    assert list(allreduce.evaluate(summed((1 << 23, 0.001e9)), NAMES, link=0.0)) == []
    assert (
        list(allreduce.evaluate(summed((1 << 23, 1.0e9), backend="nccl"), NAMES, link=1.25e9)) != []
    )


def test_a_wrong_sum_and_an_error_stop_a_job() -> None:
    wrong = {
        0: AllReduceFacts(wrong=allreduce.WRONG_SUM),
        1: AllReduceFacts(wrong="RuntimeError: no route"),
    }
    found = list(allreduce.evaluate(wrong, NAMES, 0.0))
    assert [(each.level, each.ranks) for each in found] == [
        (Severity.FAIL, (0,)),
        (Severity.FAIL, (1,)),
    ]
    assert tells(found[0].found, "sum", "wrong")
    assert found[1].found == "RuntimeError: no route"


FIT = {
    "wrong": [],
    "name": "eth0",
    "address": "10.0.0.1",
    "speed": 10_000,
    "mtu": 1500,
    "physical": True,
}
LINK = FIT | {"own_name": [], "devices": [], "rdma_rate": 0, "one_node": False}


def hcas(count: int, rate: int = 400_000) -> dict[str, Any]:
    return LINK | {
        "devices": [f"mlx5_{number}" for number in range(count)],
        "rdma_rate": count * rate,
    }


@pytest.mark.parametrize(
    ("links", "backend", "per_node", "gigabytes"),
    [
        ([LINK, LINK | {"speed": 100_000}], "nccl", 2, 1.25),
        ([hcas(1), hcas(1, 200_000)], "nccl", 2, 25.0),
        ([hcas(1), hcas(1, 200_000)], "gloo", 2, 1.25),
        ([LINK, LINK | {"physical": False}, LINK | {"speed": 100_000}], "gloo", 2, 0.0),
        ([hcas(1), LINK | {"physical": False}], "nccl", 2, 0.0),
        ([LINK], "gloo", 2, 0.0),  # on one node no link is in use
        # No more devices carry than there are ranks.
        *(
            ([hcas(8)] * 2, "nccl", count, rate)
            for count, rate in ((1, 50.0), (4, 200.0), (8, 400.0), (16, 400.0))
        ),
    ],
)
def test_the_slowest_link_counts(
    links: list[dict[str, Any]], backend: str, per_node: int, gigabytes: float
) -> None:
    ranks = list(enumerate(facts for facts in links for _ in range(per_node)))
    here = {
        rank: Hello("", rank, len(ranks), 0, f"node0{rank // per_node}", "", 1) for rank, _ in ranks
    }
    report = Report(
        here,
        {rank: CollectedFacts("", facts={"interface": facts}, failed={}) for rank, facts in ranks},
    )
    assert slowest_link(report, backend, here) == gigabytes * 1e9
