"""The node's figures, of its job's control group or of its processes; and bytes over each of its
links.
"""

from __future__ import annotations

import ctypes
import os
import socket
from collections.abc import Callable
from pathlib import Path

from srunddp.monitor.sampler.node import (
    NetworkCounters,
    Node,
    requested_memory,
)
from srunddp.monitor.sampler.process_tree import Tasks
from srunddp.util.sample_files import LINKS, NODE
from tests.cluster.network import tool
from tests.support.namespaces import address, two_nodes
from tests.support.starting import write

GIB = 1 << 30
NET = """Inter-|   Receive            |  Transmit
 face |bytes    packets errs drop|bytes    packets errs drop
    lo: 1000 9 0 0 0 0 0 0 1000 9 0 0 0 0 0 0
  ib0: 5000000000 1 2 3 4 5 6 7 6000000000 8 9 10 11 12 13 14
eth0:1:22 1 2 3 4 5 6 7 33 8 9 10 11 12 13 14
"""


def row_of(folder: Path, groups: str) -> dict[str, str]:
    tasks = Tasks(0, os.getpid(), None, "")
    tasks.look(thorough=True)
    node = Node(tasks, "ib0", {}, groups, folder)
    node.look()
    return dict(zip(NODE.names, node.rows("9.000").strip().split(","), strict=True))


def test_figures_of_a_job_s_control_group_are_the_node_s(tmp_path: Path) -> None:
    write(tmp_path / "job_71/cpu.stat", "usage_usec 12500000\n")
    write(tmp_path / "job_71/memory.current", f"{8 * GIB}\n")
    write(tmp_path / "job_71/memory.max", f"{16 * GIB}\n")
    row = row_of(tmp_path, "0::/job_71/step_0\n")
    assert (row["cpu_s"], row["memory_bytes"], row["source"]) == ("12.500", str(8 * GIB), "cgroup")
    assert (row["time"], row["interface"], row["memory_limit_bytes"]) == (
        "9.000",
        "ib0",
        str(16 * GIB),
    )


def test_without_a_group_of_the_job_its_processes_are_added_up(tmp_path: Path) -> None:
    row = row_of(tmp_path, "0::/\n")
    assert row["source"] == "processes"
    assert float(row["cpu_s"]) > 0
    assert int(row["memory_bytes"]) > 1 << 20
    assert 0 < float(row["cpus"]) <= len(os.sched_getaffinity(0))


def test_where_no_group_limits_memory_the_request_does() -> None:
    assert requested_memory({"SLURM_MEM_PER_NODE": "2048"}) == 2 * GIB
    assert requested_memory({"SLURM_MEM_PER_CPU": "512", "SLURM_CPUS_ON_NODE": "8"}) == 4 * GIB
    assert requested_memory({"SLURM_MEM_PER_NODE": "0"}) is None  # all of the node's
    assert requested_memory({"SLURM_MEM_PER_CPU": "512"}) is None


def found(links: NetworkCounters) -> list[dict[str, str]]:
    return [
        dict(zip(LINKS.names, line.split(","), strict=True))
        for line in links.rows("7.000").splitlines()
    ]


def test_every_link_but_loopback_has_a_row(tmp_path: Path) -> None:
    (tmp_path / "dev").write_text(NET)
    assert NetworkCounters("ib0", tmp_path / "dev", tmp_path).rows("7.000").splitlines() == [
        "7.000,ib0,net,1,5000000000,6000000000",
        "7.000,eth0:1,net,0,22,33",
    ]
    # Ports of RDMA devices count in words of four bytes.
    for device, interface in (("mlx5_0", "ib0"), ("mlx5_1", "ens1")):
        write(tmp_path / device / "ports/1/counters/port_rcv_data", "250\n")
        write(tmp_path / device / "ports/1/counters/port_xmit_data", "500\n")
        (tmp_path / device / "device/net" / interface).mkdir(parents=True)
    (tmp_path / "rxe0/ports/1").mkdir(parents=True)  # has none
    assert NetworkCounters("ib0", tmp_path / "none", tmp_path).rows("7.000").splitlines() == [
        "7.000,mlx5_0/1,rdma,1,1000,2000",
        "7.000,mlx5_1/1,rdma,0,1000,2000",
    ]


def test_links_of_the_node_s_namespace_are_counted_apart() -> None:
    """Also where there is more than a page of them, which is what the kernel gives at once."""
    with two_nodes() as names:
        for number in range(30):
            ends = (f"one{number}", "type", "veth", "peer", "name", f"other{number}")
            tool("ip", "-n", names["west"], "link", "add", *ends)
        assert _in_namespace(names["west"], _counts_apart)


def _in_namespace(name: str, check: Callable[[], bool]) -> bool:
    if child := os.fork():
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    status = 1
    try:
        with Path("/run/netns", name).open() as file:
            assert ctypes.CDLL(None).setns(file.fileno(), 0) == 0
        status = int(not check())
    finally:
        os._exit(status)


def _counts_apart() -> bool:
    """A megabyte over one of two cables to the other node, and not the chosen one."""
    links = NetworkCounters("data1")
    before = {row["link"]: int(row["sent_bytes"]) for row in found(links)}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as udp:
        for _ in range(1000):
            udp.sendto(bytes(1000), (address("east", "data0"), 9))
    sent = {row["link"]: int(row["sent_bytes"]) - before[row["link"]] for row in found(links)}
    chosen = [row["link"] for row in found(links) if row["chosen"] == "1"]
    return (
        len(before) >= 62
        and sent["data0"] > 900_000
        and sent["data1"] < 10_000
        and chosen == ["data1"]
    )
