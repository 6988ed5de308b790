"""Signals that reach the ranks of a run one after the other."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest

from tests.support.starting import until
from tests.support.worlds import world

# What Gloo says where a peer has gone.
PEERS = """
import socket
path = f"{os.getcwd()}/peer"
if RANK == 1:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen()
        connection, _ = listener.accept()
        say("met")
        rest()
if RANK == 0:
    connection = socket.socket(socket.AF_UNIX)
    wait_for("ready.1")
    while connection.connect_ex(path): time.sleep(0.02)
    if not connection.recv(1):
        miss_peer()
rest()
"""


@pytest.mark.parametrize("skew", [0.05, 0.5])
def test_a_skew_of_sigterm_between_nodes_blames_nobody(skew: float, tmp_path: Path) -> None:
    """Whether it is less than the time that a failure waits for its cause, or more."""
    with world(tmp_path, PEERS, size=3, limits={"secondary_waits": 0.2}) as it:
        until((tmp_path / "met.1").exists)
        for rank in (1, 0, 2):
            time.sleep(skew if rank != 1 else 0.0)
            it.launcher_sends(signal.SIGTERM, rank)
        ended = it.wait()
    assert ended.codes == [143] * 3, ended.text
    assert ended.verdicts == []
    said = (
        "\nsrunddp: the launcher ended the run with SIGTERM, as for scancel or the time limit (exit"
        " code 143)\n"
    )
    assert ended.text == said


@pytest.mark.parametrize("first", [0, 1])
def test_a_skew_of_sigkill_between_nodes_ends_no_rank_early(first: int, tmp_path: Path) -> None:
    """As after two Ctrl-C at srun, or after KillWait: what handles the signal is left alone on the
    other nodes.
    """
    handlers = "".join(
        f"signal.signal(signal.{name}, lambda *_: say({said!r}))\n"
        for name, said in (("SIGINT", "asked"), ("SIGTERM", "ended"))
    )
    with world(tmp_path, f"{handlers}say('waits')\nrest()", size=2) as it:
        workers = it.workers()
        until(lambda: all((tmp_path / f"waits.{rank}").exists() for rank in range(2)))
        it.launcher_sends(signal.SIGINT)
        until(lambda: all((tmp_path / f"asked.{rank}").exists() for rank in range(2)))
        it.ranks[first].kill()
        it.ranks[first].wait()
        it.wait_until_handled(1 - first)
        assert not (tmp_path / f"ended.{1 - first}").exists()
        assert it.ranks[1 - first].poll() is None
        it.send(signal.SIGKILL, workers[1 - first])
        ended = it.wait()
    assert ended.codes[1 - first] in (128 + signal.SIGINT, 128 + signal.SIGKILL), ended.text
    assert ended.verdicts == []
