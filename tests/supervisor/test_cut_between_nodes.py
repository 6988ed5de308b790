"""Ranks on four real nodes that all reach rank 0: the supervisors find which nodes do not reach
each other, with the real kernel's answers, and import nothing for it.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.supervisor.test_frozen import HOOK
from tests.support.namespaces import rules, switch_address, switched_nodes
from tests.support.starting import write
from tests.support.worlds import Ended, world

pytestmark = pytest.mark.slow

SIZE = 4
LOST = 69
ALL = "10.202.0.0/24"
SCRIPT = """
wait_for("cut")
if RANK == 1:
    Path("over").touch()
    miss_peer()
rest()
"""

# All ranks make steps, and then wait where torch's own frames would be.
STALL = """
import srunddp
for _ in range(3):
    srunddp.heartbeat()
    time.sleep(0.1)
wait_for("cut")
Path("over").touch()
waits = "def all_reduce():\\n    time.sleep(1000.0)"
exec(compile(waits, "/lib/torch/distributed/distributed_c10d.py", "exec"))
all_reduce()
"""


@pytest.fixture(scope="module")
def nodes() -> Iterator[list[str]]:
    with switched_nodes(SIZE) as names:
        yield names


def ended(
    folder: Path,
    nodes: list[str],
    cuts: dict[int, dict[str, str]],
    port: int,
    script: str = SCRIPT,
    *options: str,
    mended_after: float | None = None,
) -> Ended:
    """What a run of a rank on each node says, when one fails as if it missed a peer.

    Args:
        cuts: The rules of a node, by hook.
        port: Where rank 0 listens.
        script, options: The run's.
        mended_after: After how many seconds the rules are gone again; None for never.
    """
    write(folder / "ifaces.conf", '- nodes: "*"\n  interface: data0\n')
    (folder / "hook").mkdir()
    (folder / "hook" / "sitecustomize.py").write_text(HOOK.replace("SLURM_PROCID", "RANK"))
    below = {}
    for rank, namespace in enumerate(nodes):
        variables: dict[str, object] = {"RANK": rank, "LOCAL_RANK": 0, "WORLD_SIZE": len(nodes)}
        variables |= {"SLURMD_NODENAME": f"node0{rank + 1}", "PATH": os.environ["PATH"]}
        variables |= {"MASTER_ADDR": switch_address(1), "MASTER_PORT": port}
        variables |= {"PYTHONPATH": folder / "hook"}
        assigned = [f"{name}={value}" for name, value in variables.items()]
        below[rank] = ["ip", "netns", "exec", namespace, "env", "-i", *assigned]
    with (
        world(
            folder, script, *options, "--ifaces", "ifaces.conf", size=len(nodes), below=below
        ) as it,
        ExitStack() as stack,
    ):
        it.workers()
        for number, words in cuts.items():
            stack.enter_context(rules(nodes[number - 1], words))
        (folder / "cut").touch()
        if mended_after is not None:
            time.sleep(mended_after)
            stack.close()
        return it.wait()


def drop(*numbers: int, hooks: tuple[str, ...] = ("input", "output")) -> dict[str, str]:
    """Rules that drop what comes from these nodes, and what is sent to them."""
    addresses = ", ".join(map(switch_address, numbers))
    by_hook = {"input": f"ip saddr {{ {addresses} }} drop"}
    by_hook["output"] = f"ip daddr {{ {addresses} }} drop"
    return {hook: by_hook[hook] for hook in hooks}


FIREWALL = {"input": f"ip saddr {ALL} tcp flags & (syn | ack) == syn drop"}
LOSSY = {"input": "numgen random mod 5 < 1 drop"}
# The rules of each node, and what rank 0 says and with which exit code the run ends.
CUTS = {
    "none": ({}, 1, "all 4 nodes reach each other"),
    "a pair": ({2: drop(3)}, LOST, "node02 and node03 cannot reach each other by TCP"),
    "a pair, one way": (
        {2: drop(3, hooks=("input",))},
        LOST,
        "node02 and node03 cannot reach each other by TCP",
    ),
    "one node from two": ({3: drop(2, 4)}, LOST, "node03 cannot reach 2 nodes by TCP: node[02,04]"),
    "new connections, one way": (
        {3: {"input": f"ip saddr {switch_address(4)} tcp flags & (syn | ack) == syn drop"}},
        LOST,
        "node04 cannot reach node03 by TCP",
    ),
    "firewalls on all but rank 0's node": ({2: FIREWALL, 3: FIREWALL, 4: FIREWALL}, 1, "firewall"),
    "a firewall on one node": ({3: FIREWALL}, 1, "no answer from node03"),
    "one packet in five": (dict.fromkeys(range(1, 5), LOSSY), 1, "all 4 nodes reach each other"),
}


@pytest.mark.parametrize("name", CUTS)
def test_who_is_named_when_a_rank_fails_for_another(
    name: str, tmp_path: Path, nodes: list[str]
) -> None:
    cuts, code, said = CUTS[name]
    found = ended(tmp_path, nodes, cuts, 29600 + 10 * list(CUTS).index(name))
    assert found.codes == [code] * SIZE, found.text
    assert said in found.errors[0]
    assert ("cannot reach" in found.errors[0]) == (code == LOST)
    assert found.text.count("ended with it") == 1
    assert not (tmp_path / "imported").exists(), (tmp_path / "imported").read_text()


@pytest.mark.parametrize("name", ["none", "a pair"])
def test_if_all_wait_the_pair_is_named_or_nobody(
    name: str, tmp_path: Path, nodes: list[str]
) -> None:
    cuts, _, said = CUTS[name]
    port = 29700 + 10 * list(CUTS).index(name)
    found = ended(tmp_path, nodes, cuts, port, STALL, "--stall-timeout=4")
    assert found.codes == [LOST if cuts else 124] * SIZE, found.text
    for each in (said, "no step for 4 s: all ranks wait in all_reduce"):
        assert each in found.errors[0]
    assert "failed" not in found.text
    assert not (tmp_path / "imported").exists(), (tmp_path / "imported").read_text()
