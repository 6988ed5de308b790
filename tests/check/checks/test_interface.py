"""An interface that is wrong or to which no name leads stops a job; one that differs from the
others is warned of.
"""

from __future__ import annotations

import socket
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from srunddp.bootstrap.environment.rank_zero_discovery import discovery_named
from srunddp.bootstrap.network.ifaces_conf import IfacesConfig, parse
from srunddp.bootstrap.network.interface import NetworkInterface, SelectedInterface
from srunddp.check.checks import interface
from srunddp.check.checks.interface import CHECK, InterfaceFacts, evaluate, physical, summary
from srunddp.check.finding import CheckContext, Finding, Severity, context_of
from srunddp.util import infiniband
from srunddp.util.infiniband import Device
from tests.support.made_up_site import changed, reported, subject, travelled
from tests.support.starting import NODE, slurm

WELL = InterfaceFacts(
    wrong=[],
    name="ib0",
    address="10.88.0.11",
    speed=100_000,
    mtu=2044,
    physical=True,
    own_name=["10.88.0.11"],
    devices=["mlx5_0", "mlx5_1"],
    rdma_rate=200_000,
    one_node=False,
)
LO = SelectedInterface("lo", "127.0.0.1", {}, "loopback")
TWO_NODES = {
    "SLURM_STEP_NODELIST": f"{NODE},node02",
    "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
    "SLURM_GTIDS": "0",
}


# What is collected.


def test_the_chosen_interface_travels_with_speed_and_mtu() -> None:
    known = travelled(CHECK, replace(subject(), interface=LO))
    assert (known.name, known.address, known.wrong) == ("lo", "127.0.0.1", [])
    assert known.mtu > 1000
    assert not known.physical
    gone = travelled(CHECK, replace(subject(), interface=replace(LO, name="gone0")))
    assert (gone.speed, gone.mtu, gone.physical) == (0, 0, False)


def test_only_active_devices_count_with_the_rate_of_all(monkeypatch: pytest.MonkeyPatch) -> None:
    there = [
        Device(f"mlx5_{number}", "InfiniBand", number != 1, 100_000, ()) for number in range(3)
    ]
    monkeypatch.setattr(infiniband, "devices", lambda: there)
    monkeypatch.setattr(interface, "addresses_of", {socket.gethostname(): {"127.0.1.1"}}.get)
    known = travelled(CHECK, subject())
    assert (known.devices, known.rdma_rate) == (["mlx5_0", "mlx5_2"], 200_000)
    assert known.own_name == ["127.0.1.1"]


def test_a_wrong_ifaces_conf_is_a_wrong_interface(tmp_path: Any) -> None:
    (tmp_path / "ifaces.conf").write_text("- nodes: x\n  interfaces: ib0\n")
    found = context_of(subject().environment, str(tmp_path / "ifaces.conf"), {})
    known = travelled(CHECK, found)
    assert known.wrong[0].endswith("unknown key 'interfaces'")
    assert (known.wrong[2], known.name) == ("did you mean interface?", "")


def at_step(
    rank: int, own: set[str], monkeypatch: pytest.MonkeyPatch, address: str = ""
) -> CheckContext:
    """A rank of two nodes whose names lead there."""
    monkeypatch.setattr("srunddp.bootstrap.rendezvous.discovery.addresses_of", lambda _: own)
    gtids = {"SLURM_GTIDS": str(rank), "SLURM_LOCALID": "0", "SLURM_NODEID": str(rank)}
    if rank:
        gtids["SLURM_STEP_NODELIST"] = f"node00,{NODE}"
    entries = parse(f'- nodes: "*"\n  interface: eth0{address}\n'.encode(), "x")
    found = replace(subject(slurm(rank, 2, **TWO_NODES | gtids)), loaded=IfacesConfig(entries))
    return replace(found, interface=SelectedInterface("eth0", "10.88.0.11", {}, "x"))


def test_a_name_that_leads_a_rank_nowhere_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a launcher that tells addresses no name is needed."""
    step = at_step(1, set(), monkeypatch)
    found, expected, hint = interface.collect(step).wrong
    assert found.startswith("node00 does not resolve on node ")
    assert expected
    assert hint
    ways = (discovery_named("pmi"), discovery_named("slurm"))
    telling = replace(step, environment=replace(step.environment, discoveries=ways))
    assert interface.collect(telling).wrong == []
    for rank in (0, 1):
        assert interface.collect(at_step(rank, {"10.88.0.11"}, monkeypatch)).wrong == []


def test_rank_0_whose_name_leads_to_another_interface_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    own = (
        NetworkInterface("eth0", True, 0, ("10.88.0.11",), ()),
        NetworkInterface("eno1", True, 0, ("10.77.0.11",), ()),
    )
    monkeypatch.setattr(interface, "list_interfaces", lambda: own)
    found, *_ = interface.collect(at_step(0, {"10.77.0.11"}, monkeypatch)).wrong
    words = (
        f"the others look for rank 0 at {NODE}, which is 10.77.0.11 on eno1; its interface is eth0"
        " (10.88.0.11)"
    )
    assert found == f"x:1:3: {words}"


# What is wrong.


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {2: {"own_name": ["127.0.1.1", "10.88.0.11"]}},
        {2: {"own_name": []}},
        {0: {"mtu": 1}}
        | {rank: {"one_node": True, "own_name": ["127.0.0.1"]} for rank in range(1, 12)},
    ],
)
def test_where_all_is_well_nothing_is_said(changes: dict[int, dict[str, Any]]) -> None:
    """On one node nothing is compared, and a name may lead to loopback."""
    assert reported(evaluate(changed(WELL, changes))) == []


def test_a_wrong_interface_or_name_stops_a_job() -> None:
    (one,) = evaluate(changed(WELL, {4: {"wrong": ["no ib0", "one", "correct it"], "name": ""}}))
    assert one == Finding(Severity.FAIL, "no ib0", "one", "correct it", nodes=("node03",))


@pytest.mark.parametrize("own", [["127.0.1.1"], ["127.0.0.1", "::1"]])
def test_a_nodes_name_on_loopback_is_warned_of(own: list[str]) -> None:
    words = f"the node's own name leads to {', '.join(own)}, which is loopback"
    changes = {rank: {"own_name": own} for rank in (2, 3)}
    assert set(reported(evaluate(changed(WELL, changes)))) == {
        (Severity.WARN, words, ("node02",), ())
    }


@pytest.mark.parametrize(
    ("change", "found", "expected"),
    [
        ({"mtu": 1500}, "ib0 has MTU 1500", "2044, as on the other nodes"),
        ({"speed": 1000}, "ib0: 1 Gbit/s", "100 Gbit/s, as on the other nodes"),
        ({"speed": 0}, "ib0: speed unknown", "100 Gbit/s, as on the other nodes"),
        (
            {"devices": ["mlx5_0"]},
            "active InfiniBand or RoCE devices: mlx5_0",
            "mlx5_0, mlx5_1, as on the other nodes",
        ),
        (
            {"devices": []},
            "active InfiniBand or RoCE devices: none",
            "mlx5_0, mlx5_1, as on the other nodes",
        ),
    ],
)
def test_what_a_node_has_unlike_the_others_is_warned_of(
    change: dict[str, Any], found: str, expected: str
) -> None:
    findings = list(evaluate(changed(WELL, {rank: change for rank in (6, 7)})))
    assert reported(findings) == [(Severity.WARN, found, ("node04",), ())]
    assert findings[0].expected == expected
    assert "mtu" not in change or findings[0].hint.startswith("ip link set ib0 mtu 2044: ")
    assert "devices" not in change or "`env: {NCCL_IB_HCA: …}`" in findings[0].hint


def test_ranks_without_an_interface_are_not_compared() -> None:
    without = {"name": "", "mtu": 0, "speed": 0, "wrong": ["no ib0", "one", "correct it"]}
    found = reported(evaluate(changed(WELL, dict.fromkeys((0, 1), without))))
    assert [words for _, words, *_ in found] == ["no ib0"] * 2
    assert len(list(evaluate(changed(WELL, dict.fromkeys(range(12), without))))) == 12


def test_the_summary_has_every_name_rate_and_mtu_once() -> None:
    seen = changed(WELL, {1: {"name": "eth0", "speed": 0, "mtu": 1500}, 2: {"name": ""}})
    assert summary(seen) == "eth0, ib0: speed unknown, 100 Gbit/s, MTU 1500, 2044"


@pytest.mark.parametrize(
    ("folders", "behind"),
    [
        (["eth0/device"], True),
        (["eth0"], False),  # veth, dummy, tun
        (["eth0/bonding", "eth0/lower_a", "eth0/lower_b"], True),
        (["eth0/lower_eno1", "eno1/device"], True),  # a VLAN
        (["eth0/lower_bond0", "bond0/bonding"], True),  # a VLAN on a bond
        (["eth0/lower_veth1", "veth1"], False),
        (["eth0/bridge", "eth0/lower_eno1", "eno1/device"], False),
    ],
)
def test_a_bond_or_a_vlan_has_a_device_behind_it(
    folders: list[str], behind: bool, tmp_path: Path
) -> None:
    for folder in folders:
        (tmp_path / folder).mkdir(parents=True, exist_ok=True)
    assert physical("eth0", tmp_path) is behind
