"""``--min-nodes`` on the real cluster: a node is lost, no spare one is left, and the training goes
on with fewer ranks, to the bits of one that changed its ranks at the same step.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import AbstractContextManager, ExitStack

import pytest

from srunddp.util.hostlist import expand
from tests.cluster.network import tool
from tests.cluster.nodes import NODES, node
from tests.cluster.sockets import LIST_COMMAND, parse
from tests.slurm.conftest import SRUNDDP, SlurmJobRunner
from tests.slurm.spare_nodes import (
    FENCE,
    OPTIONS,
    PROGRAM,
    TRAINING,
    SpareRun,
    cut,
    launched,
    network_in_two,
    supervisors,
)
from tests.support.starting import until

pytestmark = pytest.mark.slurm

ACCUMULATION = "--gradient_accumulation_steps"
RESTARTED = 60.0
ENDS_WITHIN = 240.0


def smaller(
    runner: SlurmJobRunner, name: str, nodes: int, fewest: int, *settings: str
) -> AbstractContextManager[SpareRun]:
    """A training on so many nodes, one rank on each, that may go on with fewer."""
    folder = runner.cluster.shared / name
    options = (f"-N{nodes}", "--time=10", SRUNDDP, "--restarts=3", f"--min-nodes={fewest}")
    program = (PROGRAM, *TRAINING[:2], f"--output-dir={folder}", *TRAINING[2:], *settings)
    return launched(runner, folder, *options, *program)


def lose(run: SpareRun, name: str) -> None:
    run.lost.append(name)
    run.runner.cluster.lose(name)


def world(run: SpareRun, start: int) -> dict[int, str]:
    """The node of each rank that has made a step in a start."""
    return {note.rank: note.node for note in run.notes() if note.start == start}


def first_step(run: SpareRun, start: int) -> int:
    return min(note.step for note in run.notes() if note.start == start)


def changed_at(
    runner: SlurmJobRunner,
    name: str,
    ranks: Mapping[int, tuple[str, ...]],
    steps: list[int],
    kind: str = TRAINING[0],
) -> set[str]:
    """The weights of a training that ends after each of these steps, and goes on with the next
    number of ranks, one on each node, and settings. It waits at no step if its kind is another.
    """
    folder = runner.cluster.shared / name
    command = (PROGRAM, kind, "0", f"--output-dir={folder}", *TRAINING[2:], "--resume=auto")
    for (count, settings), last in zip(ranks.items(), [*steps, None], strict=True):
        end = [f"--max-steps={last}"] if last else []
        done = runner.srun(f"-N{count}", f"-n{count}", SRUNDDP, *command, *settings, *end)
        assert done.code == 0, done.errors
    return {report["weights"] for report in done.reports}


@pytest.mark.parametrize("name", ["node02", "node01"])
def test_a_training_goes_on_with_the_nodes_that_are_left(name: str, runner: SlurmJobRunner) -> None:
    """Rank 0's node as well; the other nodes keep their order, and a step its samples."""
    settings = (f"{ACCUMULATION}=2",)
    with smaller(runner, f"left-{name}", 3, 2, *settings) as run:
        until(run.training, why=run.said)
        began = time.monotonic()
        lose(run, name)
        assert run.ends_with(0, ENDS_WITHIN), run.said()
        assert run.gap(began) < FENCE + RESTARTED
        assert run.overlaps() == []
        left = [node for node in ("node01", "node02", "node03") if node != name]
        assert world(run, 1) == dict(enumerate(left))
        assert "2 ranks on 2 nodes" in run.said()
        assert "gradient_accumulation_steps was 2, and is 3 from here on" in run.said()
        assert "srunddp: ended with 0 after 1 restart" in run.said()
        step = first_step(run, 1) - 1
        weights = run.weights()
    ranks = {3: settings, 2: (f"{ACCUMULATION}=3",)}
    assert weights == changed_at(runner, f"reference-{name}", ranks, [step])


def test_six_nodes_down_to_three_one_after_the_other(runner: SlurmJobRunner) -> None:
    """Rank 0's node is the second to be lost, and the third is the one that has taken over. The
    learning rate follows the samples of a step.
    """
    losses = ("node04", "node01", "node02")
    steps = []
    settings = ("--scale_lr=sqrt", "--epochs=5")
    with smaller(runner, "six", 6, 3, *settings) as run:
        for start, name in enumerate(losses):
            until(lambda: run.training(start, 12 + 7 * start), why=run.said)  # noqa: B023
            lose(run, name)
        assert run.ends_with(0, ENDS_WITHIN), run.said()
        steps = [first_step(run, start) - 1 for start in (1, 2, 3)]
        assert run.overlaps() == []
        assert world(run, 3) == {0: "node03", 1: "node05", 2: "node06"}
        assert "srunddp: ended with 0 after 3 restarts" in run.said()
        weights = run.weights()
    # Three ranks can make the step of six, five and four cannot.
    ranks = dict.fromkeys((6, 5, 4, 3), settings) | {3: (*settings, f"{ACCUMULATION}=2")}
    assert weights == changed_at(runner, "reference-six", ranks, steps)


def waits_for_the_next_start(name: str) -> bool:
    """Whether a task of this node has a connection to rank 0 on node01, before it has a number."""
    shown = tool("ip", "netns", "exec", node(name).namespace, *LIST_COMMAND)
    peers = {each.peer_address for each in parse(shown) if each.state == "established"}
    return node("node01").data in peers


MINUTE = 60.0
RETURNS = 120.0  # it looks for rank 0 for a minute, after it has tried to meet the others


def test_a_node_that_was_cut_off_for_a_minute_takes_the_place_of_the_next(
    runner: SlurmJobRunner,
) -> None:
    """Meanwhile the run has gone on without it; it joins at the next restart, and not before."""
    settings = (f"{ACCUMULATION}=3", "--epochs=200")
    others = [each for each in NODES if each.name != "node02"]
    with smaller(runner, "back", 4, 2, *settings) as run:
        until(run.training, why=run.said)
        began = time.monotonic()
        with network_in_two([node("node02")], others):
            until(lambda: run.training(start=1, step=0), RESTARTED, run.said)
            time.sleep(max(0.0, began + MINUTE - time.monotonic()))
        until(lambda: waits_for_the_next_start("node02"), RETURNS, run.said)
        assert world(run, 1) == {0: "node01", 1: "node03", 2: "node04"}
        assert not run.training(start=2, step=0)
        lose(run, "node03")
        assert run.ends_with(0, ENDS_WITHIN), run.said()
        assert world(run, 2) == {0: "node01", 1: "node02", 2: "node04"}
        assert run.overlaps() == []
        assert "srunddp: rank 1 goes to node02" in run.said()
        assert "srunddp: ended with 0 after 2 restarts" in run.said()
        step = first_step(run, 1) - 1
        weights = run.weights()
    ranks = {4: settings, 3: (*settings, f"{ACCUMULATION}=4")}
    assert weights == changed_at(runner, "reference-back", ranks, [step], kind="exception")


def test_a_node_that_slurm_has_set_down_does_not_come_back(runner: SlurmJobRunner) -> None:
    """Its task is told so by Slurm, or ended by it, when the network is there again; and the loss
    of another node takes no longer for it.
    """
    settings = ("--scale_lr=sqrt", "--epochs=40")
    with smaller(runner, "down", 4, 2, *settings) as run:
        until(run.training, why=run.said)
        run.lost.append("node02")

        def is_taken_away() -> bool:
            jobs = runner.cluster.run("squeue", "--noheader", "--format=%N").stdout
            return bool(jobs.strip()) and "node02" not in expand(jobs.strip())

        with cut("node02"):
            until(lambda: run.training(start=1, step=0), RESTARTED, run.said)
            until(is_taken_away, 3 * RESTARTED, run.said)
        until(lambda: not supervisors("node02"), RETURNS, run.said)
        began = time.monotonic()
        lose(run, "node03")
        # Slurm has killed the task of node02, and that is srun's own exit code.
        assert run.finish(ENDS_WITHIN) is not None, run.said()
        assert "srunddp: ended with 0 after 2 restarts" in run.said()
        assert world(run, 2) == {0: "node01", 1: "node04"}
        assert run.gap(began) < FENCE + RESTARTED
        assert run.overlaps() == []
        assert "node02 is a spare node" not in run.said()


FAILS_THERE = """import os, time, srunddp
srunddp.heartbeat()
time.sleep(1.0)
if os.environ["SLURMD_NODENAME"] == "node02":
    os._exit(9)
time.sleep(2.0)
names = ("RANK WORLD_SIZE LOCAL_RANK GROUP_RANK GROUP_WORLD_SIZE SLURM_PROCID SLURM_NTASKS"
    " SLURM_NPROCS SLURM_LOCALID SLURM_NODEID SLURM_NNODES SLURM_NODELIST SLURM_STEP_NODELIST"
    " SLURM_TASKS_PER_NODE SLURM_GTIDS SLURMD_NODENAME")
print("done", *(os.environ[name] for name in names.split()))
"""


def test_a_node_that_fails_twice_in_a_row_is_left_out(runner: SlurmJobRunner) -> None:
    """And what the scripts are told is the new world's."""
    script = runner.cluster.shared / "fails_there.py"
    script.write_text(FAILS_THERE)
    words = (*OPTIONS, "-wnode[01-04]", "--ntasks-per-node=2", SRUNDDP, "--restarts=3")
    done = runner.srun(*words, "--min-nodes=2", str(script))
    assert done.code == 0, done.errors
    expected = [
        f"done {rank} 6 {rank % 2} {rank // 2} 3 {rank} 6 6 {rank % 2} {rank // 2} 3"
        " node[01,03-04] node[01,03-04]"
        f" 2(x3) {rank // 2 * 2},{rank // 2 * 2 + 1} {node}"
        for rank, node in enumerate(["node01"] * 2 + ["node03"] * 2 + ["node04"] * 2)
    ]
    assert sorted(done.output.splitlines()) == expected
    said = "no spare node is left for ranks 2-3: the run goes on with 6 ranks on 3 nodes"
    assert said in done.errors
    assert "node02 is a spare node from now on" in done.errors


FAILS_TWICE_THERE = """import os, sys, time, srunddp
srunddp.heartbeat()
time.sleep(1.0)
where, start = os.environ["SLURMD_NODENAME"], srunddp.restart_count()
if (where, start) in (("node02", 0), ("node02", 1), ("node03", 2), ("node03", 3)):
    os._exit(9)
time.sleep(2.0)
print("done", os.environ["RANK"], os.environ["WORLD_SIZE"], where)
"""


def test_a_node_that_failed_twice_is_used_when_no_other_is_left(runner: SlurmJobRunner) -> None:
    """The first that failed takes the place of the second; before, a healthy spare one was used."""
    script = runner.cluster.shared / "fails_twice_there.py"
    script.write_text(FAILS_TWICE_THERE)
    words = (*OPTIONS, "-wnode[01-04]", "--ntasks-per-node=2", SRUNDDP, "--restarts=5")
    done = runner.srun(*words, "--spare-nodes=1", "--min-nodes=3", str(script))
    assert done.code == 0, done.errors
    expected = ["node01"] * 2 + ["node04"] * 2 + ["node02"] * 2
    assert sorted(done.output.splitlines()) == [
        f"done {rank} 6 {name}" for rank, name in enumerate(expected)
    ]
    assert "ranks 2-3 go to node04" in done.errors
    assert "ranks 4-5 go to node02" in done.errors


def test_a_run_with_too_few_nodes_left_ends(runner: SlurmJobRunner) -> None:
    with smaller(runner, "too-few", 3, 3, "--epochs=60") as run:
        until(run.training, why=run.said)
        lose(run, "node03")
        assert run.ends_with(69, ENDS_WITHIN), run.said()
    assert "srunddp: not restarted: a node is lost" in run.said()


@pytest.mark.parametrize("size", [2, 3])
def test_of_a_network_in_two_the_larger_part_goes_on(size: int, runner: SlurmJobRunner) -> None:
    """Each part has nodes enough. Rank 0 is in the smaller one; of two equal ones neither does."""
    here = NODES[:size]
    there = NODES[size:]
    with smaller(runner, f"parts-{size}", 6, 2, "--scale_lr=sqrt") as run, ExitStack() as stack:
        until(run.training, why=run.said)
        stack.enter_context(network_in_two(here, there))
        assert run.finish(ENDS_WITHIN) == 69, run.said()
        assert run.overlaps() == []
        larger = {rank: node.name for rank, node in enumerate(there)} if size == 2 else {}
        assert world(run, 1) == larger
        assert ("srunddp: ended with 0 after 1 restart" in run.said()) == (size == 2)


def test_a_step_that_fewer_ranks_cannot_make_is_refused_at_the_start(
    runner: SlurmJobRunner,
) -> None:
    with smaller(runner, "refused", 3, 2) as run:
        assert run.finish(ENDS_WITHIN) == 78, run.said()
    assert "a step of 24 samples on 3 ranks, which 2 ranks cannot make" in run.said()
    assert run.said().count("gradient_accumulation_steps to 2 or a multiple of it") == 1
