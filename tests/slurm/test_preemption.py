"""A job of a loop of one's own that is cancelled; tests/slurm/test_sbatch.py has those that are requeued."""

from __future__ import annotations

import pytest

from tests.conftest import PROGRAMS
from tests.slurm.conftest import SRUNDDP, SlurmJobRunner
from tests.slurm.jobs import STOPPED, Job, found, look, submit, until

pytestmark = pytest.mark.slurm

LIMIT = 240.0
RANKS = 4


def processes(job: Job) -> list[int]:
    """Of its ranks at work in their first attempt."""
    return [int(file.read_text().split()[0]) for file in sorted(job.folder.glob("at.0.?"))]


def preempted(runner: SlurmJobRunner, name: str) -> Job:
    """A job of four ranks on two nodes that trains."""
    body = (
        # Where steps are tracked by control groups, Slurm's SIGTERM ends the shell, and srun and its output with it.
        "trap : TERM\n"
        f"srun {SRUNDDP} --quiet {PROGRAMS / 'preempted.py'} $FOLDER\n"
        "code=$?\n"
        "[ $code = 75 ] && scontrol requeue $SLURM_JOB_ID\n"
        # Slurm decides what follows its SIGTERM; a preempted job that ends by itself is not requeued.
        "[ $code = 143 ] && sleep 600\n"
        "exit $code\n"
    )
    return submit(runner, f"preempted-{name}", body, "--ntasks-per-node=2")


def test_a_cancelled_job_has_its_checkpoint_and_is_not_requeued(runner: SlurmJobRunner) -> None:
    job = preempted(runner, "cancelled")
    until(lambda: len(processes(job)) == RANKS, [job])
    runner.cluster.run("scancel", job.number)
    until(lambda: look([job]), [job], LIMIT)
    found(job.output, STOPPED.format("SIGTERM", ""))
    assert (job.state, job.restarts) == ("CANCELLED", 0), job
    assert job.output.count("srunddp: ") == 1, job
