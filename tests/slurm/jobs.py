"""Batch jobs from their submission to their end, over all their starts."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from tests.cluster.slurm import URGENT
from tests.conftest import ROOT
from tests.slurm.conftest import OVER, SlurmJobRunner
from tests.support import starting

LONG = 100.0
# By Slurm, within 30 s of draw_near(): not before the ranks are at work.
SIGNALLED = ("--time=60", "--signal=USR2@280")
ALL_GPUS = ("--nodelist=node05,node06", "--gpus-per-node=8")  # of a job that is to be preempted
NEAR_END = "--time=2"  # a job leaves after half of it, which is long enough to start in
STOPPED = (
    r"srunddp: stopped after step (\d+) by {}; checkpoint \S+/step-0*\1\.pt{} \(exit code 143\)"
)


@dataclass
class Job:
    """A batch job with a folder of its own, and what was last seen of it."""

    runner: SlurmJobRunner
    folder: Path
    number: str
    output: str = ""
    restarts: int = 0
    state: str = ""
    code: int = 0
    hastened: int = 0

    def is_over(self) -> bool:
        """Look how far it is.

        Once requeued it waits 15 s for its old credentials to expire: most of that it is spared. It
        gets enough time.
        """
        shown = self.runner.cluster.run("scontrol", "show", "job", self.number).stdout
        self.state = found(shown, r"JobState=(\w+)")
        self.restarts = int(found(shown, r"Restarts=(\d+)"))
        self.code = int(found(shown, r" ExitCode=(\d+)"))
        out = self.folder / "out"
        if out.exists():
            self.output = out.read_text()
        else:
            self.output = ""
        if self.state == "PENDING" and self.restarts > self.hastened:
            self.hastened = self.restarts
            # Not at once: within the second of its end its nodes refuse it, as "Job credential
            # revoked".
            words = (
                "scontrol",
                "update",
                f"jobid={self.number}",
                "StartTime=now+3",
                "TimeLimit=60",
            )
            self.runner.cluster.run(*words, check=False)
        return self.state in OVER


def submit(runner: SlurmJobRunner, name: str, body: str, *options: str) -> Job:
    """A job script; its folder is FOLDER in it."""
    folder = runner.cluster.shared / name.replace(" ", "-")
    folder.mkdir()
    script = (
        f"#!/bin/bash\nexport SRUNDDP_IFACES={runner.ifaces} OMP_NUM_THREADS=1"
        f" FOLDER={folder}\n{body}"
    )
    (folder / "job.sh").write_text(script)
    layout = (
        "--parsable",
        "-N2",
        f"--chdir={ROOT}",
        f"--output={folder}/out",
        "--open-mode=append",
    )
    words = ("sbatch", *layout, *options, str(folder / "job.sh"))
    return Job(runner, folder, runner.cluster.run(*words).stdout.strip())


def draw_near(job: Job) -> None:
    """Bring the end of its time so near that Slurm sends the signal it asked for, with minutes to
    spare.
    """
    job.runner.cluster.run("scontrol", "update", f"jobid={job.number}", "TimeLimit=5")


# The last lines of a job script, as in docs/examples/resume.sh.
END = """code=$?
slurm=$(srun --version)
requeues=24.05
[ $code = 143 ] && [[ ${slurm##* } < $requeues ]] && sleep 600
exit $code
"""


def preempt(runner: SlurmJobRunner) -> float:
    """Take a job's nodes by one of another partition; returns when, in seconds since the epoch."""
    began = time.time()
    runner.cluster.run(
        "sbatch", f"--partition={URGENT}", "-N2", *ALL_GPUS, "--output=/dev/null", "--wrap=true"
    )
    return began


def found(text: str, pattern: str) -> str:
    match = re.search(pattern, text)
    assert match, text
    return match[1]


def look(jobs: Iterable[Job]) -> bool:
    """At all of them; whether all are over."""
    return all([job.is_over() for job in jobs])


def until(condition: Callable[[], object], jobs: Iterable[Job], limit: float = LONG) -> None:
    starting.until(condition, limit, lambda: [(job.is_over(), job) for job in jobs])
