"""Jobs of loops of one's own that are cancelled or preempted; tests/slurm/test_sbatch.py has
others.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from srunddp.train import load_checkpoint
from tests.conftest import PROGRAMS, ROOT
from tests.slurm.conftest import SRUNDDP, SlurmJobRunner
from tests.slurm.jobs import ALL_GPUS, END, STOPPED, Job, found, look, preempt, submit, until

pytestmark = pytest.mark.slurm

LIMIT = 240.0
RANKS = 4
PROGRAM = f"{PROGRAMS / 'preempted.py'} $FOLDER"


def processes(job: Job) -> list[int]:
    """Of its ranks at work in their first attempt."""
    return [int(file.read_text().split()[0]) for file in sorted(job.folder.glob("at.0.?"))]


def preempted(
    runner: SlurmJobRunner,
    name: str,
    command: str = PROGRAM,
    layout: str = "--ntasks-per-node=2",
    *options: str,
) -> Job:
    """A job on two nodes that trains."""
    body = (
        # Where steps are tracked by control groups, Slurm's SIGTERM ends the shell, and srun and
        # its output with it.
        f"trap : TERM\nsrun {SRUNDDP} --quiet {command}\n{END}"
    )
    return submit(runner, f"preempted-{name}", body, layout, *options)


def test_a_cancelled_job_has_its_checkpoint_and_is_not_requeued(runner: SlurmJobRunner) -> None:
    job = preempted(runner, "cancelled")
    until(lambda: len(processes(job)) == RANKS, [job], LIMIT)
    runner.cluster.run("scancel", job.number)
    until(lambda: look([job]), [job], LIMIT)
    found(job.output, STOPPED.format("SIGTERM", ""))
    assert (job.state, job.restarts) == ("CANCELLED", 0), job
    assert job.output.count("srunddp: ") == 1, job


@pytest.mark.gate
def test_a_preempted_job_has_its_checkpoint_and_goes_on_once_requeued(
    runner: SlurmJobRunner,
) -> None:
    """Slurm asks for an end by SIGTERM, and makes it GRACE seconds later."""
    job = preempted(runner, "by-another", PROGRAM, "-n2", *ALL_GPUS)
    until(lambda: len(processes(job)) == 2, [job], LIMIT)
    preempt(runner)
    until(lambda: look([job]), [job], LIMIT)
    step = int(found(job.output, STOPPED.format("SIGTERM", "")))
    assert f"done from step {step} to {step + 5}\n" in job.output, job
    assert (job.state, job.restarts) == ("COMPLETED", 1), job


def checkpoints(job: Job) -> list[Path]:
    """From the oldest to the newest; what is written just now is not among them."""
    return sorted((job.folder / "checkpoints").glob("step-*.pt"))


def test_the_example_of_an_own_loop_resumes_to_the_bit(runner: SlurmJobRunner) -> None:
    example = f"{ROOT / 'docs' / 'examples' / 'own_loop.py'} --output-dir=$FOLDER"
    whole, stopped = (preempted(runner, name, example, "-n2") for name in ("whole", "stopped"))
    until(lambda: checkpoints(stopped), [whole, stopped], LIMIT)
    runner.cluster.run("scancel", "--signal=USR2", stopped.number)
    until(lambda: look([whole, stopped]), [whole, stopped], LIMIT)
    assert (
        50 <= int(found(stopped.output, STOPPED.format("SIGUSR2", "; the job is requeued"))) < 500
    )
    assert [(job.state, job.restarts) for job in (whole, stopped)] == [
        ("COMPLETED", 0),
        ("COMPLETED", 1),
    ]
    ends = [load_checkpoint(checkpoints(job)[-1]) for job in (whole, stopped)]
    assert [end["step"] for end in ends] == [500] * 2
    torch.testing.assert_close(ends[0]["model"], ends[1]["model"], rtol=0, atol=0)
    torch.testing.assert_close(
        ends[0]["optimizer"]["state"], ends[1]["optimizer"]["state"], rtol=0, atol=0
    )
