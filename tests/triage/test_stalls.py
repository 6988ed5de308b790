"""The rank that the others wait for, by the stacks that each rank prints on SIGURG."""

from __future__ import annotations

from pathlib import Path
from typing import cast

import pytest

from srunddp.supervisor.recorder import FailureRecorder
from srunddp.supervisor.stacks import StackDump
from srunddp.supervisor.worker_process import wait_for_child
from srunddp.triage.collect import collect
from srunddp.triage.diagnose import diagnose
from srunddp.triage.diagnosis import Diagnosis
from srunddp.triage.logs import find
from srunddp.triage.render import lines
from tests.support.facts import tells
from tests.support.recorded_writes import ALL_REDUCE, BACKWARD, LOAD_BATCH
from tests.support.starting import LONG, write

PLACED = "srunddp: 4 ranks on 2 nodes, launcher Slurm, channel pmi\nstep 1\n"
CANCELLED = "slurmstepd: error: *** STEP 1.0 ON node01 CANCELLED AT 2026-03-01T10:00:00 ***\n"
HANGING = {0: ALL_REDUCE, 1: ALL_REDUCE, 2: LOAD_BATCH, 3: BACKWARD}


class Asked:
    """A worker that gives this stack."""

    def __init__(self, text: str) -> None:
        self.text = text

    def request(self, _: int) -> str:
        return self.text


def printed(folder: Path, stacks: dict[int, str]) -> str:
    """What the ranks' supervisors write to the terminal, and the same to the ranks' logs."""
    said = ""
    for rank, text in stacks.items():
        node = f"node0{rank // 2 + 1}"
        log = write(folder / "logs" / f"{node}.rank{rank}.log", "")
        recorder = FailureRecorder(rank, node, cast(StackDump, Asked(text)), log)
        recorder.print_stack(1)
        assert recorder._stack_writer is not None
        wait_for_child(recorder._stack_writer, LONG)
        said += log.read_text()
    return said


def judged(path: Path) -> tuple[Diagnosis, str]:
    evidence = collect(find([str(path)]))
    found = diagnose(evidence)
    return found, "\n".join(lines(found, evidence))


@pytest.mark.parametrize("end", ["", CANCELLED], ids=["running", "cancelled"])
def test_the_rank_that_the_others_wait_for_is_named(end: str, tmp_path: Path) -> None:
    text = PLACED + printed(tmp_path, HANGING) + end
    found, said = judged(write(tmp_path / "slurm-1.out", text))
    assert (found.cause, found.certainty, found.rank, found.node) == (
        "rank-stalled",
        "likely",
        2,
        "node02",
    )
    assert tells(said.splitlines()[0], "rank 2", "load_batch (train.py:7)", "ranks 0-1,3")
    # The logs of the ranks are enough, and none of them has output of its own.
    found, _ = judged(tmp_path / "logs")
    assert (found.rank, found.seen, found.silent) == (2, [], [0, 1, 2, 3])


def test_a_rank_without_a_stack_is_the_one(tmp_path: Path) -> None:
    text = PLACED + printed(tmp_path, {0: ALL_REDUCE, 1: ALL_REDUCE, 2: BACKWARD})
    found, said = judged(write(tmp_path / "slurm-1.out", text))
    assert (found.cause, found.rank, found.node) == ("rank-stalled", 3, None)
    assert tells(said.splitlines()[0], "rank 3", "ranks 0-2")


def test_if_all_wait_the_one_at_another_place_is_named(tmp_path: Path) -> None:
    stacks = {0: ALL_REDUCE, 1: BACKWARD, 2: ALL_REDUCE, 3: ALL_REDUCE}
    found, said = judged(write(tmp_path / "slurm-1.out", PLACED + printed(tmp_path, stacks)))
    assert (found.cause, found.certainty, found.rank) == ("rank-stalled", "likely", 1)
    assert tells(said.splitlines()[0], "_engine_run_backward", "ranks 0,2-3", "all_reduce")


def test_if_as_many_ranks_wait_at_each_place_the_places_are_named(tmp_path: Path) -> None:
    stacks = {0: ALL_REDUCE, 1: BACKWARD, 2: ALL_REDUCE, 3: BACKWARD}
    found, said = judged(write(tmp_path / "slurm-1.out", PLACED + printed(tmp_path, stacks)))
    assert (found.cause, found.certainty, found.rank) == ("rank-stalled", "likely", None)
    first = said.splitlines()[0]
    assert tells(first, "ranks 0,2 in all_reduce", "ranks 1,3 in _engine_run_backward")


@pytest.mark.parametrize(
    ("stacks", "after"),
    [
        (dict.fromkeys(range(4), ALL_REDUCE), ""),
        (dict.fromkeys(range(4), LOAD_BATCH), ""),
        (HANGING, "step 2\nstep 3\n"),
        (HANGING, "".join(f"loss 0.{number} lr 0.1\n" for number in range(20))),
        ({1: ALL_REDUCE, 2: ALL_REDUCE}, ""),
        ({1: LOAD_BATCH}, ""),
    ],
    ids=["all wait", "all work", "it went on", "it wrote on", "two asked", "one asked"],
)
def test_where_no_rank_stands_out_none_is_named(
    stacks: dict[int, str],
    after: str,
    tmp_path: Path,
) -> None:
    text = PLACED + printed(tmp_path, stacks) + after
    found, _ = judged(write(tmp_path / "slurm-1.out", text))
    assert (found.cause, found.rank) == ("unknown", None)


def test_the_end_of_a_rank_after_the_look_counts_more(tmp_path: Path) -> None:
    text = PLACED + printed(tmp_path, HANGING)
    text += "srun: error: node02: task 3: Exited with exit code 1\n"
    found, _ = judged(write(tmp_path / "slurm-1.out", text))
    assert (found.cause, found.rank) == ("unknown", 3)


@pytest.mark.parametrize("name", ["a.out", "z.out"])  # before and after the ranks' logs
def test_steps_in_any_copy_of_a_look_show_that_the_run_went_on(name: str, tmp_path: Path) -> None:
    text = PLACED + printed(tmp_path, HANGING) + CANCELLED
    write(tmp_path / "logs" / name, text)
    assert judged(tmp_path / "logs")[0].rank == 2
    with (tmp_path / "logs" / "node01.rank0.log").open("a") as log:
        log.write("step 2\n")
    assert judged(tmp_path / "logs")[0].rank is None


@pytest.mark.parametrize(
    "label",
    [
        "{rank}: ",  # srun --label
        "[1,{rank}]<stderr>:",  # mpirun --tag-output of Open MPI 4
        "[1,{rank}]<stderr>: ",
        "[prterun-node01-77@1,{rank}]<stderr>: ",  # of Open MPI 5
        "[{rank}] ",  # mpiexec -prepend-rank
        "node01:{rank}: ",  # srunddp --prefix
    ],
)
def test_stacks_are_read_behind_labels(label: str, tmp_path: Path) -> None:
    text = PLACED
    for rank, stack in HANGING.items():
        said = printed(tmp_path, {rank: stack}).splitlines(keepends=True)
        text += "".join(label.format(rank=rank) + line for line in said)
    found, _ = judged(write(tmp_path / "slurm-1.out", text))
    assert (found.cause, found.rank, found.node) == ("rank-stalled", 2, "node02")


def test_a_failure_after_the_look_counts_more(tmp_path: Path) -> None:
    text = PLACED + printed(tmp_path, HANGING)
    text += "srunddp: rank 0 on node01 failed: MemoryError (exit code 1)\n"
    found, _ = judged(write(tmp_path / "slurm-1.out", text))
    assert (found.cause, found.rank) == ("host-out-of-memory", 0)
