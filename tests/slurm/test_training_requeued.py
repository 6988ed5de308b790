"""A training that has to leave its nodes ends its epochs in the next start, to the bit as if it had
not.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.cluster.slurm import GRACE
from tests.slurm.conftest import OVER, SRUNDDP, SlurmJobRunner
from tests.slurm.jobs import (
    ALL_GPUS,
    END,
    NEAR_END,
    SIGNALLED,
    STOPPED,
    Job,
    draw_near,
    found,
    look,
    preempt,
    submit,
    until,
)
from tests.trained import PROGRAM, Trained

pytestmark = pytest.mark.slurm

LIMIT = 240.0
PACE = 0.2  # seconds a step in the first start: it lasts longer than Slurm lets it
BY_HAND = (
    r"srunddp: stopped after step (\d+) by SIGUSR2; checkpoint \S+; not requeued: no scontrol in"
    r" PATH -> requeue it, "
    r"or start it again with resume=auto \(exit code 75\)"
)
REQUEUED = "; the job is requeued"
NOTES = ("samples/s", "goes on from", "stay idle")  # that a start may print besides its verdict


def training(
    runner: SlurmJobRunner,
    name: str,
    *options: str,
    settings: str = "",
    srun: str = "srun",
    pace: float = PACE,
) -> Job:
    """A job of two ranks on two nodes; it takes its time in its first start alone."""
    body = (
        "trap : TERM\n"  # which Slurm sends to the shell as well, and srun would end with it
        f"start=${{SLURM_RESTART_COUNT:-0}} pace={pace}; [ $start = 0 ] || pace=0\n"
        f"{srun} {SRUNDDP} --quiet {PROGRAM} --output-dir=$FOLDER/run --start=$start --pace=$pace"
        f" {settings}\n"
        f"{END}"
    )
    return submit(runner, f"training {name}", body, "-n2", *options)


def trained(job: Job) -> Trained:
    return Trained(job.folder / "run")


def without_scontrol(folder: Path) -> str:
    """srun with a PATH for its step that has what srunddp needs, but no scontrol, as in a
    container.
    """
    folder.mkdir()
    for name in ("python3", "squeue"):
        (folder / name).symlink_to(f"/usr/bin/{name}")
    return f"PATH={folder} /usr/bin/srun"


def wrong(job: Job, cause: str, then: str, whole: Trained) -> list[str]:
    """What is not as promised of a job that was requeued once."""
    stopped = re.search(STOPPED.format(cause, then), job.output)
    if not stopped:
        return ["the verdict"]
    ours = (line for line in job.output.splitlines() if "srunddp: " in line)
    said = [line for line in ours if not any(note in line for note in NOTES)]
    checks = {
        "one requeue": (job.state, job.restarts) == ("COMPLETED", 1),
        "one line": len(said) == 1 and "Traceback" not in job.output,
    }
    return [name for name, holds in checks.items() if not holds] + trained(job).unequal(
        int(stopped[1]), whole
    )


@pytest.fixture(scope="module")
def jobs(runner: SlurmJobRunner) -> dict[str, Job]:
    """Each from its start to its end; first those that wait for their time limit."""
    run = runner.cluster.run
    shared = runner.cluster.shared
    every = {
        "limit": training(runner, "limit", *SIGNALLED, settings="--preemption.lead-seconds=0"),
        "end": training(runner, "end", NEAR_END, pace=0.3),
    }
    until(lambda: all(trained(job).trains() for job in every.values()), every.values())
    draw_near(every["limit"])
    every |= {
        "whole": training(runner, "whole", pace=0.0),
        "requeued": training(runner, "requeued"),
        "preempted": training(runner, "preempted", *ALL_GPUS),
        "by hand": training(runner, "by hand", srun=without_scontrol(shared / "path")),
    }
    asked = [every[name] for name in ("requeued", "preempted", "by hand")]
    until(
        lambda: look(every.values()) or all(trained(job).trains() for job in asked), every.values()
    )
    run("scontrol", "requeue", every["requeued"].number)
    (shared / "preempted").write_text(str(preempt(runner)))
    run("scancel", "--signal=USR2", every["by hand"].number)
    until(lambda: look(every.values()) or every["by hand"].state in OVER, every.values())
    (shared / "by-hand").write_text(str(every["by hand"].code))
    run("scontrol", "requeue", every["by hand"].number)
    until(lambda: look(every.values()), every.values(), LIMIT)
    return every


@pytest.mark.parametrize(
    ("name", "cause", "then"),
    [
        ("limit", "SIGUSR2", REQUEUED),
        ("end", "the end of the job's time", REQUEUED),
        ("requeued", "SIGTERM", ""),
        ("preempted", "SIGTERM", ""),
    ],
)
def test_it_is_requeued_once_and_ends_as_if_it_had_never_stopped(
    name: str, cause: str, then: str, jobs: dict[str, Job]
) -> None:
    """``--signal``; the known end of the job; ``scontrol requeue``; another partition that goes
    before.
    """
    assert wrong(jobs[name], cause, then, trained(jobs["whole"])) == [], jobs[name].output


def test_a_preempted_job_saves_in_four_fifths_of_its_grace_time(jobs: dict[str, Job]) -> None:
    job = jobs["preempted"]
    step = int(found(job.output, STOPPED.format("SIGTERM", "")))
    # Its change time is that of the renaming which makes it whole.
    there = (job.folder / "run" / "checkpoints" / f"step-{step:08d}.pt").stat().st_ctime
    assert there - float((job.runner.cluster.shared / "preempted").read_text()) < 0.8 * GRACE


def test_without_scontrol_it_leaves_with_75_and_resumes(jobs: dict[str, Job]) -> None:
    job = jobs["by hand"]
    assert (job.runner.cluster.shared / "by-hand").read_text() == "75", job
    assert trained(job).unequal(int(found(job.output, BY_HAND)), trained(jobs["whole"])) == [], job
    assert (job.state, job.restarts) == ("COMPLETED", 1), job
