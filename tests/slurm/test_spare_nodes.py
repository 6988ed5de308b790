"""``--spare-nodes`` on the real cluster: a node is lost, and the training goes on to the same
bits.
"""

from __future__ import annotations

import json
import os
import re
import signal
import time
from collections.abc import Callable, Collection
from contextlib import ExitStack

import pytest

from tests.cluster.nodes import NODES
from tests.conftest import BED, PROGRAMS
from tests.slurm.conftest import SRUNDDP, SlurmJobRunner
from tests.slurm.jobs import Job, submit
from tests.slurm.spare_nodes import (
    FENCE,
    LOST_AFTER,
    OPTIONS,
    PROGRAM,
    TRAINING,
    SpareRun,
    cut,
    kill,
    launched,
    network_in_two,
    supervisors,
    training,
)
from tests.support.starting import until

pytestmark = pytest.mark.slurm

RESTARTED = 60.0  # ten times what six ranks on two cores take to import torch, and more
ENDS_WITHIN = 240.0


def went_on(run: SpareRun, undisturbed: str, codes: Collection[int] = (0,)) -> None:
    """To the same bits, by one start alone at a time, and Slurm agrees."""
    code = run.finish(ENDS_WITHIN)
    if BED and code == 1:
        code = min(codes)  # since Slurm 23.02 the loss of a node makes srun end with 1
    assert run.weights() == {undisturbed}, run.said()
    assert code in codes, run.said()
    assert run.overlaps() == []
    assert "srunddp: ended with 0 after 1 restart" in run.said()


def completed(run: SpareRun) -> None:
    """By Slurm, which takes a moment for it."""

    def state() -> str:
        shown = run.runner.cluster.run("scontrol", "show", "job", "-o").stdout
        states: list[str] = re.findall(r"JobState=(\w+)", shown)
        return states[-1]

    until(lambda: state() == "COMPLETED", 60.0, state)


def lose(run: SpareRun, name: str) -> float:
    until(run.training)
    began = time.monotonic()
    lost(name, run)
    return began


def lost(name: str, run: SpareRun) -> None:
    run.lost.append(name)
    run.runner.cluster.lose(name)


@pytest.mark.parametrize("name", ["node02", "node01"])
def test_a_training_survives_the_loss_of_a_node(
    name: str, undisturbed: str, runner: SlurmJobRunner
) -> None:
    """Rank 0's node as well, where srun is on a login node."""
    with training(runner, f"lost-{name}") as run:
        began = lose(run, name)
        went_on(run, undisturbed)
        assert run.gap(began) < FENCE + RESTARTED
        completed(run)
    rank = NODES.index(next(node for node in NODES if node.name == name))
    assert f"srunddp: rank {rank} on {name} lost: no answer for 15 s (exit code 69)" in run.said()
    assert {note.node for note in run.notes() if note.start == 1 and note.rank == rank} == {
        "node06"
    }


WAITS = """import os, sys, time
from pathlib import Path
import srunddp
rank, node, start = os.environ["RANK"], os.environ["SLURMD_NODENAME"], srunddp.restart_count()
srunddp.heartbeat()
Path(sys.argv[1], f"{start}.{rank}.{node}").touch()
while start == 0: time.sleep(0.05)
"""


@pytest.mark.gate
def test_without_torch_the_ranks_of_rank_0_s_lost_node_start_on_the_spare_one(
    runner: SlurmJobRunner,
) -> None:
    """In the first start they wait for the loss; in the second they end."""
    script = runner.cluster.shared / "waits.py"
    script.write_text(WAITS)
    folder = runner.cluster.shared / "waits"
    folder.mkdir()

    def starts() -> list[str]:
        return sorted(file.name for file in folder.iterdir())

    command = ("-N4", SRUNDDP, "--restarts=1", "--spare-nodes=1", str(script), str(folder))
    with launched(runner, folder, *command) as run:
        until(lambda: len(starts()) == 3, why=run.said)
        lost("node01", run)
        assert run.ends_with(0, ENDS_WITHIN), run.said()
    assert "srunddp: rank 0 on node01 lost: no answer for 15 s (exit code 69)" in run.said()
    assert "srunddp: ended with 0 after 1 restart" in run.said()
    first = ["0.0.node01", "0.1.node02", "0.2.node03"]
    second = ["1.0.node04", "1.1.node02", "1.2.node03"]
    assert starts() == first + second


def test_a_lost_spare_node_costs_nothing(undisturbed: str, runner: SlurmJobRunner) -> None:
    with training(runner, "lost-spare") as run:
        lose(run, "node06")
        assert run.ends_with(0, ENDS_WITHIN), run.said()
        assert run.weights() == {undisturbed}


def test_a_node_that_comes_back_writes_nothing(undisturbed: str, runner: SlurmJobRunner) -> None:
    """Its ranks were ended before others had them. If the run ends before the node is back, that
    its srunddp has ended so is srun's own exit code.
    """
    with training(runner, "cut") as run:
        until(run.training)
        with cut("node03"):
            until(lambda: run.training(start=1, step=0))
        went_on(run, undisturbed, codes=(0, 69, 137))
        last = max(note.at for note in run.notes() if note.node == "node03")
        assert last < min(note.at for note in run.notes() if note.start == 1)


def test_of_a_cut_that_is_mended_in_the_last_moment_no_healthy_node_is_blamed(
    undisturbed: str, runner: SlurmJobRunner
) -> None:
    """The node that was cut off has ended its rank, and rank 0 still waits for it. When the network
    is there again, the other ranks see their connections to that rank end before rank 0 hears why.
    """
    with training(runner, "short-cut") as run:
        until(run.training)
        with cut("node03"):
            time.sleep(LOST_AFTER - 1.5)
        code = run.finish(ENDS_WITHIN)
    assert code in (0, 69, 137), run.said()
    assert run.weights() == {undisturbed}, run.said()
    assert set(re.findall(r"srunddp: ranks? .* on (\w+) (?:lost|failed)", run.said())) <= {"node03"}
    assert run.overlaps() == []


@pytest.mark.parametrize("size", [2, pytest.param(3, marks=pytest.mark.soak)])
def test_of_a_network_in_two_the_larger_part_goes_on(size: int, runner: SlurmJobRunner) -> None:
    """Rank 0 is in the smaller one; of two equal ones neither does."""
    here = NODES[:size]
    there = NODES[size:]
    with training(runner, f"two-parts-{size}", spare=2) as run, ExitStack() as stack:
        until(run.training)
        stack.enter_context(network_in_two(here, there))
        assert run.finish(ENDS_WITHIN) == 69, run.said()
        assert "rank 0 on node01 lost: no answer of half of the tasks for 15 s" in run.said()
        assert run.overlaps() == []
        starts = {(note.start, note.rank, note.node) for note in run.notes() if note.start}
        ranks = {(1, 0, "node05"), (1, 1, "node06"), (1, 2, "node03"), (1, 3, "node04")}
        assert starts == (ranks if size == 2 else set())
        assert ("srunddp: ended with 0 after 1 restart" in run.said()) == (size == 2)


def _kill_step(run: SpareRun, name: str) -> None:
    """The tasks live on, and Slurm no longer knows of them."""
    run.lost.append(name)
    kill(name, "slurmd", "slurmstepd")


def _kill_supervisor(run: SpareRun, name: str) -> None:
    kill_one = supervisors(name)
    assert len(kill_one) == 1
    os.kill(kill_one[0], signal.SIGKILL)


@pytest.mark.parametrize(
    ("harm", "name"),
    [
        (_kill_step, "node02"),
        (_kill_supervisor, "node01"),
        pytest.param(_kill_step, "node01", marks=pytest.mark.soak),
        pytest.param(_kill_supervisor, "node02", marks=pytest.mark.soak),
    ],
)
def test_the_ranks_of_a_killed_process_go_elsewhere(
    harm: Callable[[SpareRun, str], None], name: str, undisturbed: str, runner: SlurmJobRunner
) -> None:
    with training(runner, f"killed{harm.__name__}-{name}") as run:
        until(run.training)
        began = time.monotonic()
        harm(run, name)
        went_on(run, undisturbed, codes=(0, 137))
        assert run.gap(began) < RESTARTED


def test_out_of_spare_nodes_the_run_ends(runner: SlurmJobRunner) -> None:
    with training(runner, "out-of", epochs=60) as run:
        lose(run, "node06")
        until(lambda: "spare node node06 is lost" in run.said())
        lose(run, "node02")
        assert run.ends_with(69, ENDS_WITHIN), run.said()
    assert "srunddp: not restarted: no spare node is left" in run.said()


def test_a_node_that_fails_twice_in_a_row_is_left(runner: SlurmJobRunner) -> None:
    script = runner.cluster.shared / "fails_there.py"
    script.write_text(
        "import os, time, srunddp\nsrunddp.heartbeat()\ntime.sleep(1.0)\nif"
        " os.environ['SLURMD_NODENAME'] == 'node02':\n    os._exit(9)\ntime.sleep(2.0)\nnames ="
        " ('RANK', 'SLURM_PROCID', 'SLURM_NTASKS', 'LOCAL_RANK', 'SLURMD_NODENAME')\nprint('done',"
        " *(os.environ[name] for name in names))\n"
    )
    words = (
        *OPTIONS,
        "-wnode[01-04]",
        "--ntasks-per-node=2",
        SRUNDDP,
        "--restarts=3",
        "--spare-nodes=1",
        str(script),
    )
    done = runner.srun(*words)
    assert done.code == 0, done.errors
    nodes = ("node01", "node01", "node04", "node04", "node03", "node03")
    expected = [f"done {rank} {rank} 6 {rank % 2} {node}" for rank, node in enumerate(nodes)]
    assert sorted(done.output.splitlines()) == expected
    assert "ranks 2-3 go to node04" in done.errors


GPU_FAILS = """import json, os, sys, time
import srunddp
srunddp.heartbeat()
time.sleep(4.0)  # until the GPUs are watched
where = os.environ["SLURMD_NODENAME"]
if where == "node02" and srunddp.restart_count() < int(sys.argv[2]):
    with open(os.environ["FAKE_NVML"] + ".xids", "a") as file:
        file.write(json.dumps({"gpu": 0, "xid": int(sys.argv[1])}) + chr(10))
    time.sleep(1.0)
    raise RuntimeError("CUDA error")
time.sleep(2.0)
print("done", os.environ["RANK"], where)
"""


@pytest.mark.parametrize(
    ("xid", "times", "second"), [(79, 1, "node03"), (31, 2, "node02")], ids=["hardware", "program"]
)
def test_a_node_whose_gpu_has_failed_is_left_at_once_and_never_for_the_programs_fault(
    xid: int, times: int, second: str, runner: SlurmJobRunner
) -> None:
    """NVML is made up, and no real GPU has been tried."""
    folder = runner.cluster.shared / f"gpu-{xid}"
    folder.mkdir()
    (folder / "fails.py").write_text(GPU_FAILS)
    gpus = {"driver": "580.95.05", "cuda": 13000, "gpus": [{"uuid": "GPU-a"}]}
    for number in range(1, 4):
        (folder / f"node0{number}.json").write_text(json.dumps(gpus))
    (folder / "start.sh").write_text(
        f"export PYTHONPATH={PROGRAMS / 'nvml'} CUDA_VISIBLE_DEVICES=0"
        f" FAKE_NVML={folder}/$SLURMD_NODENAME.json\n"
        f"exec {SRUNDDP} --restarts=3 --spare-nodes=1 {folder / 'fails.py'} {xid} {times}\n"
    )
    done = runner.srun(
        *OPTIONS, "-wnode[01-03]", "--ntasks-per-node=1", "sh", str(folder / "start.sh")
    )
    assert done.code == 0, done.errors
    assert sorted(done.output.splitlines()) == ["done 0 node01", f"done 1 {second}"]
    assert f"GPU 0 (GPU-a) of node02: Xid {xid}, " in done.errors
    assert f"after {times} restart" in done.errors


LACKS_PACKAGE = """import os, sys, time
where = os.environ["SLURMD_NODENAME"]
if where in sys.argv[2:]:
    import not_installed_here
if sys.argv[1] == "steps":
    import srunddp
    srunddp.heartbeat()
time.sleep(1.0)
if where == "node02": os._exit(9)
time.sleep(2.0)
print("done", os.environ["RANK"], where)
"""


@pytest.mark.parametrize(
    ("kind", "lacking", "code"),
    [("steps", ["node03"], 0), ("none", ["node03"], 0), ("steps", ["node03", "node04"], 1)],
    ids=str,
)
def test_a_spare_node_that_lacks_a_package_is_left_at_once(
    kind: str, lacking: list[str], code: int, runner: SlurmJobRunner
) -> None:
    """A second one that lacks the same says that the script is wrong."""
    script = runner.cluster.shared / "lacks_package.py"
    script.write_text(LACKS_PACKAGE)
    options = ("--restarts=5", "--spare-nodes=2", str(script), kind, *lacking)
    words = (*OPTIONS, "-wnode[01-04]", "--ntasks-per-node=1", SRUNDDP, *options)
    done = runner.srun(*words)
    assert "rank 1 goes to node03" in done.errors
    assert "rank 1 goes to node04" in done.errors
    assert "rank 1 on node03 failed: ModuleNotFoundError" in done.errors
    if code:
        assert "not restarted: the same import error on node03 and node04" in done.errors, (
            done.errors
        )
        assert done.code != 0
    else:
        assert done.code == 0, done.errors
        assert sorted(done.output.splitlines()) == ["done 0 node01", "done 1 node04"]


def test_a_signal_for_a_checkpoint_leaves_the_spare_nodes(runner: SlurmJobRunner) -> None:
    script = runner.cluster.shared / "saves.py"
    script.write_text(
        "import os, signal, time\nsaved = []\nsignal.signal(signal.SIGUSR1, lambda *_:"
        " saved.append(1))\nif os.environ['RANK'] == '0':\n    os.system('scancel -s USR1"
        " $SLURM_JOB_ID')\nwhile not saved:\n    time.sleep(0.1)\ntime.sleep(2.0)\nprint('saved')\n"
    )
    done = runner.srun(
        *OPTIONS, "-N3", "-n3", SRUNDDP, "--restarts=1", "--spare-nodes=1", str(script)
    )
    assert (done.code, done.output.count("saved")) == (0, 2), done.errors
    assert "is lost" not in done.errors


def batch_job(runner: SlurmJobRunner, name: str) -> Job:
    words = " ".join((*OPTIONS, SRUNDDP, "--restarts=3", "--spare-nodes=1", PROGRAM, *TRAINING))
    body = f"srun {words} --output-dir=$FOLDER/training\n"
    return submit(runner, name, body, "-N4", "--ntasks-per-node=1", "--no-kill", "--requeue")


def requeued(runner: SlurmJobRunner, job: Job) -> None:
    """Lose its first node, and see it PENDING."""
    try:
        until((job.folder / "training" / "steps.txt").exists, 60.0, lambda: (job.is_over(), job))
        runner.cluster.lose("node01")
        until(lambda: not job.is_over() and job.restarts == 1, 90.0, lambda: job)
        assert job.state in ("PENDING", "COMPLETING"), job
        shown = runner.cluster.run("scontrol", "show", "job", job.number).stdout
        assert re.search("Comment=srunddp: srun on [0-9.]+ was lost with its node", shown), shown
    finally:
        try:
            runner.cluster.cancel_all()
        finally:
            runner.cluster.mend("node01")


def test_a_batch_job_without_its_first_node_is_requeued(runner: SlurmJobRunner) -> None:
    """Its script and srun are gone with that node; Slurm itself would leave it RUNNING for ever."""
    requeued(runner, batch_job(runner, "batch host"))


WRONG = {
    ("-N1", "-n2"): "--spare-nodes=1 of 1 nodes; expected 2 ranks or more on the others",
    (
        "-N3",
        "-n6",
        "--distribution=cyclic",
    ): "with the distribution cyclic; expected tasks in the order of the nodes",
    ("-N3", "-n5"): "1 tasks on a spare node, and 3 on another; expected no fewer on a spare node",
}


@pytest.mark.parametrize("words", WRONG)
def test_steps_that_cannot_have_a_spare_node(
    words: tuple[str, ...], runner: SlurmJobRunner
) -> None:
    done = runner.srun(*words, SRUNDDP, "--restarts=1", "--spare-nodes=1", PROGRAM, *TRAINING)
    assert (done.code, done.errors.count("srunddp: error:")) == (78, 1), done.errors
    assert WRONG[words] in done.errors
