"""Triage of jobs on the cluster, by their number alone."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.slurm.conftest import SRUNDDP, SlurmJobRunner
from tests.slurm.jobs import submit, until

pytestmark = pytest.mark.slurm

BODY = """
start=${SLURM_RESTART_COUNT:-0}
echo start $start
[ $start = 0 ] && srun -N1 -n1 sh -c 'echo MemoryError; sleep 600'
srun -N1 -n1 sh -c 'exit 3'
"""


def triage(runner: SlurmJobRunner, *words: str) -> dict[str, Any]:
    done = runner.on_login(SRUNDDP, "triage", "--json", *words)
    assert done.code == 0, done.errors
    found: dict[str, Any] = json.loads(done.output)
    return found


@pytest.mark.gate
def test_a_requeued_job_is_judged_by_its_last_start(runner: SlurmJobRunner) -> None:
    """Its output has no number: Slurm tells where it is, when the last start began and how it
    ended.
    """
    job = submit(runner, "triage", BODY, "--requeue")
    until(lambda: job.is_over() or "MemoryError" in job.output, [job])
    found = triage(runner, job.number)
    assert (found["start"], found["cause"]) == (0, "host-out-of-memory")
    assert f"job {job.number} still runs" in found["notes"]
    runner.cluster.run("scontrol", "requeue", job.number)
    until(job.is_over, [job])
    found = triage(runner, job.number)
    assert found["files"] == [str(job.folder / "out")]
    assert (found["job"], found["start"], found["cause"]) == (job.number, 1, "unknown"), job.output
    first = next(
        number for number, line in enumerate(job.output.splitlines(), 1) if line == "start 1"
    )
    assert f"left out, of earlier starts: out before line {first}" in found["notes"]
