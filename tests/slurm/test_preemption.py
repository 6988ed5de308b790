"""A job that has to leave its nodes goes on by itself: Slurm starts it again, once, and it resumes. Without Trainer."""

from __future__ import annotations

import os
import signal

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


@pytest.fixture(scope="module")
def jobs(runner: SlurmJobRunner) -> dict[str, Job]:
    """Each from its start to its end."""
    all_jobs = {name: preempted(runner, name) for name in ("signal", "one rank", "cancelled")}
    until(lambda: all(len(processes(job)) == RANKS for job in all_jobs.values()), all_jobs.values())
    runner.cluster.run("scancel", "--signal=USR2", all_jobs["signal"].number)
    os.kill(processes(all_jobs["one rank"])[2], signal.SIGUSR2)
    runner.cluster.run("scancel", all_jobs["cancelled"].number)
    until(lambda: look(all_jobs.values()), all_jobs.values(), LIMIT)
    return all_jobs


@pytest.mark.parametrize("name", ["signal", "one rank"])
def test_a_warned_job_is_requeued_once_and_resumes(name: str, jobs: dict[str, Job]) -> None:
    job = jobs[name]
    step = found(job.output, STOPPED.format("SIGUSR2", "; the job is requeued"))
    assert f"done from step {step} to {int(step) + 5}\n" in job.output, job
    assert (job.state, job.restarts) == ("COMPLETED", 1), job
    assert job.output.count("srunddp: ") == 1, job
    assert "Traceback" not in job.output


def test_a_cancelled_job_has_its_checkpoint_and_is_not_requeued(jobs: dict[str, Job]) -> None:
    job = jobs["cancelled"]
    found(job.output, STOPPED.format("SIGTERM", ""))
    assert (job.state, job.restarts) == ("CANCELLED", 0), job
    assert job.output.count("srunddp: ") == 1, job
