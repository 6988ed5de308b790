"""Where another start begins in a file of several: by srunddp's, Slurm's and torchrun's words."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from srunddp.triage.logs import find
from srunddp.triage.starts import begins_of_starts
from tests.support.starting import write

REQUEUED = (
    "slurmstepd-n1: error: *** JOB 7 ON n1 CANCELLED AT 2026-03-01T10:00:00 DUE TO JOB REQUEUE ***"
)
STAMPED = "[2026-03-01T10:00:00.123] "
PLACED = "srunddp: 2 ranks on 2 nodes, launcher Slurm, channel pmi"
TABLE = "Root Cause (first observed failure):"
AGAIN = "E1124 torch/distributed/elastic/agent.py:9] 2/3 attempts left; will restart worker group"
BEFORE, AFTER = (
    time.mktime(time.strptime(f"2026-03-01T{hour}:00:00", "%Y-%m-%dT%H:%M:%S")) for hour in (9, 11)
)


def failed(rank: int) -> str:
    said = f"failed (exitcode: 1) local_rank: {rank} (pid: {rank})"
    return f"E1124 torch/distributed/elastic/api.py:1002] {said}"


def elastic(count: int) -> list[str]:
    return ["W1124 torch/distributed/elastic/api.py:9] Sending process"] * count


@pytest.mark.parametrize(
    ("lines", "started", "begins"),
    [
        # srunddp's own word, whatever was before.
        (["a", "srunddp: another start begins here", "b"], 0.0, [2]),
        (["a", "srunddp: restart 1 of 3: all ranks start anew", "b"] * 2, 0.0, [2, 5]),
        ([f"b {PLACED}", PLACED], 0.0, []),
        # Slurm's: the next start begins with srunddp's line, or once Slurm knows of one.
        (["a", REQUEUED, "b", "srun: c", PLACED, "d"], 0.0, [5]),
        (["a", REQUEUED, "srun: b", "slurmstepd-n1: c", "d", "e"], AFTER, [5]),
        # Since Slurm 25.05 slurmstepd does not name itself.
        (["a", STAMPED + REQUEUED[15:], "srun: b", STAMPED + "error: c", "d", "e"], AFTER, [5]),
        (["a", REQUEUED, "b", "c"], BEFORE, []),
        (["a", REQUEUED, REQUEUED, PLACED, REQUEUED, "b"], AFTER, [4, 6]),
        # torchrun's: it says so, or after a failure the ranks begin again.
        (["a", failed(0), *elastic(2), "a", "c"], 0.0, [3]),
        (["a", failed(0), AGAIN, *elastic(2), "b", "c"], 0.0, [3]),
        (["a 1", "b", failed(0), *elastic(2), "b", "a 7", "c"], 0.0, [4]),
        # What the job script, or a rank that ends, writes after it is no start.
        (["a", failed(0), *elastic(2), "Job ended at 12:00", "c"], 0.0, []),
        (["a", *["step 1"] * 30, failed(0), *elastic(2), "step 2"], 0.0, []),
        (["a", failed(0), *elastic(2)], 0.0, []),
        (["a", failed(0), failed(1), "a", *elastic(5), failed(2), "a"], 0.0, [3, 11]),
        # Its tables are of the last start: one a node, and so maybe more than failures are told.
        (["a", failed(0), "a", *elastic(5), failed(2), TABLE, "c"], 0.0, [3]),
        (["a", failed(0), "a", *elastic(5), failed(2), TABLE, TABLE, TABLE, "c"], 0.0, []),
    ],
)
def test_a_start_begins_where_its_words_tell(
    lines: list[str], started: float, begins: list[int], tmp_path: Path
) -> None:
    path = write(tmp_path / "slurm-7.out", "".join(f"{line}\n" for line in lines))
    (log,) = find([str(path)])
    assert begins_of_starts(log, started) == begins


@pytest.mark.parametrize(
    "label", ["{}: ", "[1,{}]<stderr>:", "[1,{}]<stdout>: ", "[{}] ", "n1:{}: "]
)
@pytest.mark.parametrize(
    ("lines", "begins"),
    [
        (["a", "srunddp: restart 1 of 3: all ranks start anew", "b", "c"], [2]),
        (["a", "b", REQUEUED, PLACED, "d"], [4]),
        (["a", failed(0), *elastic(2), "a", "c"], [3]),
    ],
    ids=["restart", "requeue", "torchrun"],
)
def test_labels_hide_no_start(
    label: str, lines: list[str], begins: list[int], tmp_path: Path
) -> None:
    labelled = [
        line if line == REQUEUED else label.format(number % 2) + line
        for number, line in enumerate(lines)
    ]
    path = write(tmp_path / "slurm-7.out", "".join(f"{line}\n" for line in labelled))
    (log,) = find([str(path)])
    assert begins_of_starts(log, 0.0) == begins
