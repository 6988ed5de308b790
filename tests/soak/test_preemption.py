"""Jobs that are signalled or cancelled at random moments: each has its checkpoint, and resumes
where it is requeued.
"""

from __future__ import annotations

import random
import time
from functools import partial

import pytest

from tests.slurm.conftest import SlurmJobRunner
from tests.slurm.jobs import STOPPED, Job, found, look, until
from tests.slurm.test_preemption import RANKS, preempted, processes

pytestmark = pytest.mark.soak

TIMES = 10
LIMIT = 300.0


def signalled(runner: SlurmJobRunner, name: str, *options: str) -> list[Job]:
    """Jobs that get what these options of scancel send, each after a time of its own."""
    draw = random.Random(name)
    jobs = [preempted(runner, f"{name}-{number}") for number in range(TIMES)]
    until(lambda: all(len(processes(job)) == RANKS for job in jobs), jobs, LIMIT)
    for job in jobs:
        time.sleep(draw.uniform(0.0, 0.3))
        runner.cluster.run("scancel", *options, job.number)
    until(partial(look, jobs), jobs, LIMIT)
    return jobs


def test_usr2_writes_a_checkpoint_and_requeues(runner: SlurmJobRunner) -> None:
    for job in signalled(runner, "usr2", "--signal=USR2"):
        step = found(job.output, STOPPED.format("SIGUSR2", "; the job is requeued"))
        assert f"done from step {step} to {int(step) + 5}\n" in job.output, job
        assert (job.state, job.restarts) == ("COMPLETED", 1), job


def test_scancel_writes_a_checkpoint(runner: SlurmJobRunner) -> None:
    for job in signalled(runner, "scancel"):
        step = found(job.output, STOPPED.format("SIGTERM", ""))
        assert (job.folder / f"step-{int(step):08d}.pt").exists(), job
        assert (job.state, job.restarts) == ("CANCELLED", 0), job
