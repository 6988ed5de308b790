"""Bytes over each link of the node, so that traffic over the wrong one is seen."""

from __future__ import annotations

import ctypes
import os
import socket
from pathlib import Path

from srunddp.monitor.sampler.links import COLUMNS, NetworkCounters
from tests.cluster.network import tool
from tests.support.namespaces import address, two_nodes

NET = """Inter-|   Receive            |  Transmit
 face |bytes    packets errs drop|bytes    packets errs drop
    lo: 1000 9 0 0 0 0 0 0 1000 9 0 0 0 0 0 0
  ib0: 5000000000 1 2 3 4 5 6 7 6000000000 8 9 10 11 12 13 14
eth0:1:22 1 2 3 4 5 6 7 33 8 9 10 11 12 13 14
"""


def found(links: NetworkCounters) -> list[dict[str, str]]:
    return [dict(zip(COLUMNS, line.split(","), strict=True)) for line in links.rows("7.000").splitlines()]


def short(links: NetworkCounters) -> list[tuple[str, ...]]:
    return [tuple(list(row.values())[1:]) for row in found(links)]


def test_every_link_but_loopback_has_a_row(tmp_path: Path) -> None:
    (tmp_path / "dev").write_text(NET)
    assert short(NetworkCounters("ib0", tmp_path / "dev", tmp_path)) == [
        ("ib0", "net", "1", "5000000000", "6000000000"),
        ("eth0:1", "net", "0", "22", "33"),
    ]


def test_ports_of_rdma_devices_count_in_words_of_four_bytes(tmp_path: Path) -> None:
    for device, interface in (("mlx5_0", "ib0"), ("mlx5_1", "ens1")):
        counters = tmp_path / device / "ports/1/counters"
        counters.mkdir(parents=True)
        (counters / "port_rcv_data").write_text("250\n")
        (counters / "port_xmit_data").write_text("500\n")
        (tmp_path / device / "device/net" / interface).mkdir(parents=True)
    (tmp_path / "rxe0/ports/1").mkdir(parents=True)  # has none
    assert short(NetworkCounters("ib0", tmp_path / "none", tmp_path)) == [
        ("mlx5_0/1", "rdma", "1", "1000", "2000"),
        ("mlx5_1/1", "rdma", "0", "1000", "2000"),
    ]


def test_as_many_links_as_there_are_have_a_row() -> None:
    """More than a page of text, which is what the kernel gives at once."""
    with two_nodes() as names:
        for number in range(30):
            ends = (f"one{number}", "type", "veth", "peer", "name", f"other{number}")
            tool("ip", "-n", names["west"], "link", "add", *ends)
        child = os.fork()
        if child == 0:
            status = 1
            try:
                _enter(names["west"])
                status = int(len({row["link"] for row in found(NetworkCounters("data0"))}) < 62)
            finally:
                os._exit(status)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_traffic_is_seen_on_the_link_that_carries_it() -> None:
    """A megabyte over one of two cables between two nodes, in whose network namespace the reader is."""
    with two_nodes() as names:
        child = os.fork()
        if child == 0:
            status = 1
            try:
                status = _sends(names["west"])
            finally:
                os._exit(status)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def _sends(namespace: str) -> int:
    _enter(namespace)
    links = NetworkCounters("data1")
    before = {row["link"]: int(row["sent_bytes"]) for row in found(links)}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as udp:
        for _ in range(1000):
            udp.sendto(bytes(1000), (address("east", "data0"), 9))
    sent = {row["link"]: int(row["sent_bytes"]) - before[row["link"]] for row in found(links)}
    chosen = [row["link"] for row in found(links) if row["chosen"] == "1"]
    return 0 if sent["data0"] > 900_000 and sent["data1"] < 10_000 and chosen == ["data1"] else 3


def _enter(namespace: str) -> None:
    with Path("/run/netns", namespace).open() as file:
        assert ctypes.CDLL(None).setns(file.fileno(), 0) == 0
