"""Two nodes that both reach rank 0 do not reach each other: that pair is named, and a spare node
takes the place of one of the two. Where the network tells nothing, no node is named and none is
left.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.chaos.network import cut_between, new_connections_dropped, packets_lost, reset_between
from tests.cluster.nodes import node
from tests.conftest import PROGRAMS
from tests.slurm.conftest import SRUNDDP, SlurmJobRunner
from tests.slurm.spare_nodes import SpareRun, launched
from tests.support.facts import tells
from tests.support.starting import until

pytestmark = pytest.mark.slurm

ENDS_WITHIN = 120.0
LOST = 69
STEPS = 60
PATIENT = "100"  # a limit of collectives that is not reached
STALLS = ("--stall-timeout=6",)


@contextmanager
def trained(
    runner: SlurmJobRunner, name: str, *options: str, nodes: int = 4, limit: str = PATIENT
) -> Iterator[SpareRun]:
    """One rank on each node, and the last is spare if the options say so. All have met."""
    folder = runner.cluster.shared / name
    folder.mkdir()
    program = (str(PROGRAMS / "all_pairs.py"), str(folder), str(STEPS), limit)
    words = (f"-N{nodes}", f"-wnode0[1-{nodes}]", "--time=5", SRUNDDP, *options, *program)
    with launched(runner, folder, *words) as run:
        until(lambda: run.training(step=3), ENDS_WITHIN, run.said)
        yield run


def nodes_of(run: SpareRun, start: int) -> set[str]:
    return {note.node for note in run.notes() if note.start == start}


SPARED = ("--restarts=5", "--spare-nodes=1")
# How the two nodes are cut, and what ends the start then.
CUTS = {
    "a stall": (("input", "output"), STALLS, PATIENT),
    "a collective's time limit": (("input", "output"), (), "8"),
    "one way": (("input",), STALLS, PATIENT),
    "the other way": (("output",), (), "8"),
}


@pytest.mark.parametrize("name", CUTS)
def test_a_spare_node_takes_the_place_of_one_of_two_that_do_not_reach_each_other(
    name: str, runner: SlurmJobRunner
) -> None:
    hooks, options, limit = CUTS[name]
    called = f"cut by {name}".replace("'", "").replace(" ", "-")
    with trained(runner, called, *SPARED, *options, limit=limit) as run:
        with cut_between(node("node02"), node("node03"), *hooks):
            code = run.finish(ENDS_WITHIN)
        said = run.said()
        assert code == 0, said
        assert "node02 and node03 cannot reach each other by TCP" in said
        assert "srunddp: rank 0 on node01 failed" not in said
        assert "srunddp: ended with 0 after 1 restart" in said
        assert nodes_of(run, 0) == {"node01", "node02", "node03"}
        assert nodes_of(run, 1) == {"node01", "node02", "node04"}


@pytest.mark.slow
def test_without_a_spare_node_the_pair_is_named_and_the_run_ends_with_69(
    runner: SlurmJobRunner,
) -> None:
    with (
        trained(runner, "cut-no-spare", *STALLS, nodes=3) as run,
        cut_between(node("node02"), node("node03"), "input", "output"),
    ):
        assert run.finish(ENDS_WITHIN) == LOST, run.said()
        assert tells(
            run.said(), "node02 and node03 cannot reach each other by TCP", "(exit code 69)"
        )


@pytest.mark.slow
@pytest.mark.parametrize("loss", [0, 20])
def test_a_cut_that_is_mended_by_then_names_no_node_and_uses_no_spare_one(
    loss: int, runner: SlurmJobRunner
) -> None:
    """Nor a network that loses one packet in five."""
    with trained(runner, f"mended-{loss}", *SPARED) as run:
        with reset_between(node("node02"), node("node03")):
            time.sleep(0.5)
        with packets_lost(loss):
            until(lambda: "restart 1 of 5" in run.said(), ENDS_WITHIN, run.said)
        assert run.finish(ENDS_WITHIN) == 0, run.said()
        said = run.said()
        assert "TCP was tried between the nodes: all 4 nodes reach each other" in said, said
        assert "cannot reach" not in said
        assert "srunddp: ended with 0 after 1 restart" in said
        assert nodes_of(run, 1) == {"node01", "node02", "node03"}


@pytest.mark.slow
def test_a_firewall_that_lets_only_rank_0_be_reached_names_no_node(runner: SlurmJobRunner) -> None:
    others = [node(name) for name in ("node02", "node03", "node04")]
    with (
        trained(runner, "firewall", "--restarts=1", "--spare-nodes=1") as run,
        new_connections_dropped(*others),
    ):
        with reset_between(node("node02"), node("node03")):
            until(lambda: "restart 1 of 1" in run.said(), ENDS_WITHIN, run.said)
        said = run.said()
    assert "cannot reach" not in said
    assert tells(said, "TCP", "firewall")
    assert "goes to" not in said
