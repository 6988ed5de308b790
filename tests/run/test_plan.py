"""What a rank is, by its command line, its variables and what the start before has left."""

from __future__ import annotations

import os

import pytest

from srunddp.bootstrap.rendezvous.rank_setup import Rejoin, SpareNodeTerms
from srunddp.errors import UsageError
from srunddp.run.cli import run
from srunddp.run.command import RunCommand
from srunddp.run.plan import find_environment
from tests.support.launchers import step

THREE_NODES = {
    "SLURM_STEP_NODELIST": "n[1-3]",
    "SLURM_STEP_NUM_NODES": "3",
    "SLURM_STEP_NUM_TASKS": "3",
    "SLURM_STEP_TASKS_PER_NODE": "1,1,1",
    "SLURM_GTIDS": "",
}
AGAIN = Rejoin(generation=1, published="where", channel="slurm", run="1207.0.0")


@pytest.fixture(autouse=True)
def last_task(monkeypatch: pytest.MonkeyPatch) -> None:
    """This process is the third task of a step on three nodes."""
    for name in os.environ:
        if name.startswith("SLURM"):
            monkeypatch.delenv(name)
    for name, value in step(2, **THREE_NODES).items():
        monkeypatch.setenv(name, value)


def command(*words: str) -> RunCommand:
    return RunCommand.from_click(run.make_context("run", [*words, "train.py"]).params)


def test_without_spare_nodes_every_task_is_a_rank() -> None:
    found = find_environment(command("--restarts=1"), AGAIN)
    assert (found.rank, found.world_size, found.spares) == (2, 3, 0)


def test_a_task_of_a_spare_node_waits_until_a_restart_gives_it_a_rank() -> None:
    """The launcher's variables still say what it was in the first start."""
    spare = command("--restarts=1", "--spare-nodes=1")
    found = find_environment(spare, None)
    assert (found.rank, found.world_size, found.is_spare) == (2, 2, True)
    terms = SpareNodeTerms(
        rank=1, lost_after=15.0, within=20.0, expected=(), not_before=0.0, quorum=1
    )
    again = find_environment(
        spare, Rejoin(generation=1, published="", channel="slurm", run="r", spare_nodes=terms)
    )
    assert (again.rank, again.world_size, again.is_spare) == (1, 2, False)


def test_spare_nodes_need_restarts() -> None:
    with pytest.raises(UsageError, match="--spare-nodes without --restarts"):
        find_environment(command("--spare-nodes=1"), None)
