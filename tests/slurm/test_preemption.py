"""A job that has to leave its nodes goes on by itself: Slurm starts it again, once, and it resumes. Without torch."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.cluster.slurm import URGENT
from tests.conftest import PROGRAMS, ROOT
from tests.slurm.conftest import SRUNDDP, Bench

pytestmark = pytest.mark.slurm

RANKS = 4
LONG = 100.0
ALL_GPUS = ("--nodelist=node05,node06", "--gpus-per-node=8")
OVER = ("COMPLETED", "CANCELLED", "FAILED", "TIMEOUT")
STOPPED = r"srunddp: stopped after step (\d+) by {}; checkpoint \S+/step-0*\1\.pt{} \(exit code 143\)"


@dataclass
class Job:
    """A batch job of four ranks on two nodes that trains in a folder of its own."""

    bench: Bench
    folder: Path
    number: str
    output: str = ""
    restarts: int = 0
    state: str = ""

    def processes(self) -> list[int]:
        """Of its ranks at work in their first attempt."""
        return [int(file.read_text().split()[0]) for file in sorted(self.folder.glob("at.0.?"))]

    def is_over(self) -> bool:
        """Look how far it is, and spare it the 15 s that a requeued job waits for its old credentials to expire."""
        shown = self.bench.cluster.run("scontrol", "show", "job", self.number).stdout
        self.state, self.restarts = found(shown, r"JobState=(\w+)"), int(found(shown, r"Restarts=(\d+)"))
        out = self.folder / "out"
        self.output = out.read_text() if out.exists() else ""
        if self.state == "PENDING" and self.restarts:
            self.bench.cluster.run("scontrol", "update", f"jobid={self.number}", "StartTime=now", check=False)
        return self.state in OVER


def found(text: str, pattern: str) -> str:
    match = re.search(pattern, text)
    assert match, text
    return match[1]


def submit(bench: Bench, name: str, *options: str, lead: int = 120) -> Job:
    folder = bench.cluster.shared / f"preempted-{name}"
    folder.mkdir()
    (folder / "job.sh").write_text(
        f"#!/bin/bash\nexport SRUNDDP_IFACES={bench.ifaces} LEAD={lead}\n"
        f"srun {SRUNDDP} --quiet {PROGRAMS / 'preempted.py'} {folder}\n"
        "code=$?\n"
        "[ $code = 75 ] && scontrol requeue $SLURM_JOB_ID\n"
        # Slurm decides what follows its SIGTERM; a preempted job that ends by itself is not requeued.
        "[ $code = 143 ] && sleep 600\n"
        "exit $code\n"
    )
    layout = ("--parsable", "-N2", "--ntasks-per-node=2", f"--chdir={ROOT}", f"--output={folder}/out")
    words = ("sbatch", *layout, "--open-mode=append", *options, str(folder / "job.sh"))
    return Job(bench, folder, bench.cluster.run(*words).stdout.strip())


def until(condition: Callable[[], object], jobs: Iterable[Job]) -> None:
    end = time.monotonic() + LONG
    while not condition():
        assert time.monotonic() < end, [(job.is_over(), job) for job in jobs]
        time.sleep(0.1)


@pytest.fixture(scope="module")
def jobs(bench: Bench) -> dict[str, Job]:
    """All at once, as Slurm looks at time limits every 30 s only; each from its start to its end."""
    run = bench.cluster.run
    all_jobs = {
        "limit": submit(bench, "limit", "--time=1", "--signal=USR2@10", lead=0),
        "end": submit(bench, "end", "--time=1"),
        "preempted": submit(bench, "preempted", *ALL_GPUS),
        **{name: submit(bench, name.replace(" ", "-")) for name in ("signal", "one rank", "cancelled", "requeued")},
    }
    until(lambda: all(len(job.processes()) == RANKS for job in all_jobs.values()), all_jobs.values())
    run("scancel", "--signal=USR2", all_jobs["signal"].number)
    os.kill(all_jobs["one rank"].processes()[2], signal.SIGUSR2)
    run("scancel", all_jobs["cancelled"].number)
    run("sbatch", f"--partition={URGENT}", "-N2", *ALL_GPUS, "--output=/dev/null", "--wrap=true")
    run("scontrol", "requeue", all_jobs["requeued"].number)
    until(lambda: all([job.is_over() for job in all_jobs.values()]), all_jobs.values())
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
def test_a_job_that_is_warned_is_requeued_once_and_resumes_where_it_stopped(
    name: str, cause: str, jobs: dict[str, Job]
) -> None:
    job = jobs[name]
    step = found(job.output, STOPPED.format(cause, "; the job is requeued"))
    assert f"done from step {step} to {int(step) + 5}\n" in job.output, job
    assert (job.state, job.restarts) == ("COMPLETED", 1), job
    assert job.output.count("srunddp: ") == 1, job
    assert "Traceback" not in job.output


def test_a_job_that_is_cancelled_has_its_checkpoint_and_is_not_requeued(jobs: dict[str, Job]) -> None:
    job = jobs["cancelled"]
    found(job.output, STOPPED.format("SIGTERM", ""))
    assert (job.state, job.restarts) == ("CANCELLED", 0), job
    assert job.output.count("srunddp: ") == 1, job


@pytest.mark.parametrize("name", ["requeued", "preempted"])
def test_a_job_that_slurm_itself_requeues_has_its_checkpoint_and_resumes(name: str, jobs: dict[str, Job]) -> None:
    """Upon ``scontrol requeue``, or as another partition goes before its own."""
    job = jobs[name]
    step = found(job.output, STOPPED.format("SIGTERM", ""))
    assert f"done from step {step} to {int(step) + 5}\n" in job.output, job
    assert (job.state, job.restarts) == ("COMPLETED", 1), job
