"""What a rank is, by its command line, its variables and what the start before has left."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest

from srunddp.bootstrap.rendezvous.rank_setup import Rejoin, SpareNodeTerms
from srunddp.errors import UsageError
from srunddp.run.cli import run
from srunddp.run.command import RunCommand
from srunddp.run.plan import find_environment, make_plan
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


def test_a_rank_has_another_number_once_a_node_is_left_out() -> None:
    fewer = command("--restarts=1", "--min-nodes=2")
    found = find_environment(fewer, None)
    assert (found.rank, found.world_size, found.is_spare) == (2, 3, False)
    terms = SpareNodeTerms(
        rank=1,
        ranks_per_node="1(x2)",
        layout=1,
        lost_after=15.0,
        within=20.0,
        expected=(),
        not_before=0.0,
        quorum=1,
    )
    rejoin = Rejoin(generation=1, published="", channel="slurm", run="r", spare_nodes=terms)
    again = find_environment(fewer, rejoin)
    assert (again.rank, again.world_size, again.is_spare, again.layout) == (1, 2, False, 1)


@pytest.mark.parametrize("option", ["--spare-nodes=1", "--min-nodes=2"])
def test_going_on_without_a_node_needs_restarts(option: str) -> None:
    with pytest.raises(UsageError, match=f"{option[:-2]} without --restarts"):
        find_environment(command(option), None)


def test_a_shown_rank_may_be_left_out_later() -> None:
    """A rank of --show-ranks that only the first start has is no error in a later one."""
    words = command("--restarts=1", "--min-nodes=2", "--log-dir=logs", "--show-ranks=2")
    terms = SpareNodeTerms(
        rank=1,
        ranks_per_node="1(x2)",
        lost_after=15.0,
        within=20.0,
        expected=(),
        not_before=0.0,
        quorum=1,
    )
    rejoin = replace(AGAIN, spare_nodes=terms)
    plan = make_plan(words, find_environment(words, rejoin), rejoin)
    assert not plan.output.terminal
