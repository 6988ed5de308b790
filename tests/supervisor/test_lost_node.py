"""Two ranks on two nodes whose network fails: for how long it may, and how each side ends where it
stays so.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.support.facts import tells
from tests.support.namespaces import rule, two_nodes
from tests.support.starting import until, write
from tests.support.worlds import World, world

pytestmark = pytest.mark.slow

LOST = 69
OUTAGE = 14.0  # as while a switch starts again
ALL = "ip saddr 10.201.1.0/24 drop"


@pytest.fixture(scope="module")
def nodes() -> Iterator[dict[str, str]]:
    with two_nodes() as names:
        yield names


@contextmanager
def apart(folder: Path, nodes: dict[str, str], port: int, *options: str) -> Iterator[World]:
    """A world of a rank on each node that goes on until there is a file `go`; it has met."""
    write(folder / "ifaces.conf", '- nodes: "*"\n  interface: data0\n')
    below = {}
    for rank, (node, namespace) in enumerate(nodes.items()):
        variables = {"RANK": rank, "LOCAL_RANK": 0, "WORLD_SIZE": 2, "SLURMD_NODENAME": node}
        variables |= {"MASTER_ADDR": "10.201.1.1", "MASTER_PORT": port, "PATH": os.environ["PATH"]}
        assigned = [f"{name}={value}" for name, value in variables.items()]
        below[rank] = ["ip", "netns", "exec", namespace, "env", "-i", *assigned]
    with world(
        folder, "wait_for('go')", "--ifaces", "ifaces.conf", *options, size=2, below=below
    ) as it:
        it.workers()
        yield it


def test_an_outage_of_14_s_ends_no_job_unless_it_is_told_to(
    tmp_path: Path, nodes: dict[str, str]
) -> None:
    (tmp_path / "short").mkdir()
    with (
        apart(tmp_path, nodes, 29562) as patient,
        apart(tmp_path / "short", nodes, 29572, "--lost-after", "4") as short,
    ):
        with rule(nodes["east"], "input", ALL), rule(nodes["west"], "input", ALL):
            began = time.monotonic()
            ended = short.wait()
            assert ended.codes == [LOST, LOST]
            assert tells(ended.text, "rank 1", "east", "lost", "4 s", "exit code 69")
            time.sleep(max(0.0, began + OUTAGE - time.monotonic()))
        (tmp_path / "go").touch()
        ended = patient.wait()
    assert (ended.codes, ended.text) == ([0, 0], "")


@pytest.mark.parametrize(
    ("hook", "words"), [("input", ALL), ("output", "ip daddr 10.201.1.0/24 drop")]
)
def test_a_line_lost_one_way_ends_both_sides(
    tmp_path: Path, nodes: dict[str, str], hook: str, words: str
) -> None:
    with apart(tmp_path, nodes, 29582, "--lost-after", "3") as it, rule(nodes["east"], hook, words):
        ended = it.wait()
    assert ended.codes == [LOST, LOST], ended.text
    assert tells(ended.errors[0], "rank 1", "east", "lost", "3 s", "exit code 69")


def test_a_node_that_was_started_again_counts_at_once(
    tmp_path: Path, nodes: dict[str, str]
) -> None:
    """Its kernel knows nothing of the connection, and resets it at the next message."""
    with apart(tmp_path, nodes, 29592) as it:
        with rule(
            nodes["east"], "input", "ip saddr 10.201.1.0/24 meta l4proto tcp reject with tcp reset"
        ):
            until(lambda: it.ranks[0].poll() is not None)
        assert it.wait().codes == [137, 137], "where nothing answers for --lost-after it is 69"
