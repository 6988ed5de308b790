"""Two nodes with two rails, a subnet each, whose kernels drop what comes by another interface than
answers would go.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from srunddp.bootstrap.network.interface import shares_subnet
from tests.cluster.network import tool
from tests.conftest import missing
from tests.support.starting import LONG, SRUNDDP, bare, until, write

RAILS = ("r0", "r1")
NODES = ("west", "east")


@pytest.fixture
def namespaces() -> Iterator[list[str]]:
    if os.geteuid() != 0:
        missing("root, for network namespaces")
    names = [f"sdr-{os.getpid()}-{node}" for node in NODES]
    with ExitStack() as stack:
        for name in names:
            tool("ip", "netns", "add", name)
            stack.callback(tool, "ip", "netns", "del", name)
            tool("ip", "-n", name, "link", "set", "lo", "up")
        for number, rail in enumerate(RAILS):
            west, east = names
            tool(
                "ip",
                "link",
                "add",
                rail,
                "netns",
                west,
                "type",
                "veth",
                "peer",
                "name",
                rail,
                "netns",
                east,
            )
            for host, name in enumerate(names, 1):
                tool("ip", "-n", name, "addr", "add", f"10.250.{number}.{host}/24", "dev", rail)
                tool("ip", "-n", name, "link", "set", rail, "up")
        for name in names:
            for rail in ("all", *RAILS):
                tool(
                    "ip",
                    "netns",
                    "exec",
                    name,
                    "sysctl",
                    "-qw",
                    f"net.ipv4.conf.{rail}.rp_filter=1",
                )
        links = [
            ("ip", "-n", name, "-br", "link", "show", rail) for name in names for rail in RAILS
        ]
        until(lambda: all(" UP " in tool(*link) for link in links))
        yield names


def test_ranks_on_two_rails_meet_with_strict_filtering(
    namespaces: list[str], tmp_path: Path
) -> None:
    conf = write(tmp_path / "ifaces.conf", '- nodes: "*"\n  interface: [r0, r1]\n')
    write(tmp_path / "train.py", "import os; print(os.environ['GLOO_SOCKET_IFNAME'])\n")
    world = {"WORLD_SIZE": "4", "MASTER_ADDR": "10.250.0.1", "MASTER_PORT": "29555"}
    world["SRUNDDP_IFACES"] = str(conf)
    ranks = [
        subprocess.Popen(
            (
                "ip",
                "netns",
                "exec",
                namespaces[rank // 2],
                *SRUNDDP,
                "--quiet",
                f"--timeout={LONG}",
                "train.py",
            ),
            cwd=tmp_path,
            env=bare(
                world
                | {
                    "RANK": str(rank),
                    "LOCAL_RANK": str(rank % 2),
                    "SLURMD_NODENAME": NODES[rank // 2],
                }
            ),
            text=True,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        for rank in range(4)
    ]
    ended = [(*rank.communicate(timeout=LONG), rank.returncode) for rank in ranks]
    assert ended == [(f"r{rank % 2}\n", "", 0) for rank in range(4)]


@pytest.mark.parametrize(
    ("own", "other", "same"),
    [
        ("127.0.0.1", "127.3.2.1", True),
        ("127.0.0.1", "10.250.0.1", False),
        ("::1", "::1", True),
        ("::1", "::2", False),
        ("203.0.113.7", "203.0.113.7", False),
    ],
)
def test_a_subnet_is_the_interfaces(own: str, other: str, same: bool) -> None:
    """The last is no address of this node."""
    assert shares_subnet(own, other) is same
