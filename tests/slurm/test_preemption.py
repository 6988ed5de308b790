"""A job that has to leave its nodes goes on by itself: Slurm starts it again, once, and it resumes. Without Trainer."""

from __future__ import annotations

import os
import signal

import pytest

from tests.cluster.slurm import URGENT
from tests.conftest import PROGRAMS
from tests.slurm.conftest import SRUNDDP, SlurmJobRunner
from tests.slurm.jobs import NEAR_END, SIGNALLED, STOPPED, Job, draw_near, found, look, submit, until

pytestmark = pytest.mark.slurm

LIMIT = 240.0
RANKS = 4
ALL_GPUS = ("--nodelist=node05,node06", "--gpus-per-node=8")


def processes(job: Job) -> list[int]:
    """Of its ranks at work in their first attempt."""
    return [int(file.read_text().split()[0]) for file in sorted(job.folder.glob("at.0.?"))]


def preempted(runner: SlurmJobRunner, name: str, *options: str, lead: int = 120) -> Job:
    """A job of four ranks on two nodes that trains."""
    body = (
        f"export LEAD={lead}\n"
        # Where steps are tracked by control groups, Slurm's SIGTERM ends the shell, and srun and its output with it.
        "trap : TERM\n"
        f"srun {SRUNDDP} --quiet {PROGRAMS / 'preempted.py'} $FOLDER\n"
        "code=$?\n"
        "[ $code = 75 ] && scontrol requeue $SLURM_JOB_ID\n"
        # Slurm decides what follows its SIGTERM; a preempted job that ends by itself is not requeued.
        "[ $code = 143 ] && sleep 600\n"
        "exit $code\n"
    )
    return submit(runner, f"preempted-{name}", body, "--ntasks-per-node=2", *options)


@pytest.fixture(scope="module")
def jobs(runner: SlurmJobRunner) -> dict[str, Job]:
    """All at once, as Slurm looks at time limits every 30 s only; each from its start to its end."""
    run = runner.cluster.run
    all_jobs = {
        "limit": preempted(runner, "limit", *SIGNALLED, lead=0),
        "end": preempted(runner, "end", NEAR_END),
        "preempted": preempted(runner, "preempted", *ALL_GPUS),
        **{name: preempted(runner, name) for name in ("signal", "one rank", "cancelled", "requeued")},
    }
    until(lambda: all(len(processes(job)) == RANKS for job in all_jobs.values()), all_jobs.values())
    draw_near(all_jobs["limit"])
    run("scancel", "--signal=USR2", all_jobs["signal"].number)
    os.kill(processes(all_jobs["one rank"])[2], signal.SIGUSR2)
    run("scancel", all_jobs["cancelled"].number)
    run("sbatch", f"--partition={URGENT}", "-N2", *ALL_GPUS, "--output=/dev/null", "--wrap=true")
    run("scontrol", "requeue", all_jobs["requeued"].number)
    until(lambda: look(all_jobs.values()), all_jobs.values(), LIMIT)
    return all_jobs


@pytest.mark.parametrize(
    ("name", "cause"),
    [
        ("limit", "SIGUSR2"),
        ("end", "the end of the job's time"),
        ("signal", "SIGUSR2"),
        ("one rank", "SIGUSR2"),
    ],
)
def test_a_warned_job_is_requeued_once_and_resumes(name: str, cause: str, jobs: dict[str, Job]) -> None:
    job = jobs[name]
    step = found(job.output, STOPPED.format(cause, "; the job is requeued"))
    assert f"done from step {step} to {int(step) + 5}\n" in job.output, job
    assert (job.state, job.restarts) == ("COMPLETED", 1), job
    assert job.output.count("srunddp: ") == 1, job
    assert "Traceback" not in job.output


def test_a_cancelled_job_has_its_checkpoint_and_is_not_requeued(jobs: dict[str, Job]) -> None:
    job = jobs["cancelled"]
    found(job.output, STOPPED.format("SIGTERM", ""))
    assert (job.state, job.restarts) == ("CANCELLED", 0), job
    assert job.output.count("srunddp: ") == 1, job


@pytest.mark.parametrize("name", ["requeued", "preempted"])
def test_a_job_slurm_requeues_has_its_checkpoint_and_resumes(name: str, jobs: dict[str, Job]) -> None:
    """Upon ``scontrol requeue``, or as another partition goes before its own."""
    job = jobs[name]
    step = found(job.output, STOPPED.format("SIGTERM", ""))
    assert f"done from step {step} to {int(step) + 5}\n" in job.output, job
    assert (job.state, job.restarts) == ("COMPLETED", 1), job
