"""What Slurm itself counts of a step, on the cluster with its accounting."""

from __future__ import annotations

import pytest

from tests.slurm.conftest import PYTHON, SlurmJobRunner
from tests.support.starting import until

pytestmark = [pytest.mark.slurm, pytest.mark.usefixtures("accounting")]

TASKS = 4
SECONDS = 2.0
# Holds 64 MiB and its CPU for so many seconds of CPU time; then waits to be told to end.
BUSY = """
import pathlib, sys, time
held = b"x" * (64 << 20)
while time.process_time() < {seconds}: pass
while not pathlib.Path(sys.argv[1]).exists(): time.sleep(0.05)
"""


def rows(runner: SlurmJobRunner, *words: str) -> dict[str, list[str]]:
    """Of sacct or sstat, by the first column."""
    done = runner.cluster.run(*words, "--noheader", "--parsable2", check=False)
    return {first: rest for first, *rest in (line.split("|") for line in done.stdout.splitlines())}


def seconds(shown: str) -> float:
    """Of a time such as 01:02.345 or 00:01:02."""
    total = 0.0
    for part in shown.split(":"):
        total = 60 * total + float(part)
    return total


def megabytes(shown: str) -> float:
    """Slurm shows a size that fits in M, and else in K."""
    return float(shown[:-1]) / {"K": 1024, "M": 1}[shown[-1]]


def test_slurm_counts_a_steps_tasks_cpu_time_and_memory(runner: SlurmJobRunner) -> None:
    end = runner.cluster.shared / "busy.end"
    layout = ("--nodes=2", f"--ntasks={TASKS}", "--job-name=busy step", "--time=7")
    code = BUSY.format(seconds=SECONDS)
    with runner.cluster.popen("srun", *layout, PYTHON, "-c", code, str(end)) as step:
        try:
            job = until(
                lambda: runner.cluster.run(
                    "squeue", "--noheader", "--name=busy step", "--format=%A"
                ).stdout.strip()
            )
            running = until(lambda: at_work(runner, job))
        finally:
            end.touch()
        step.communicate(timeout=300)
    assert (step.returncode, running[0]) == (0, str(TASKS))
    assert 40 < megabytes(running[2]) < 100  # by control groups Slurm counts anonymous memory

    ended = until(lambda: over(runner, job))
    state, tasks, cpu, highest, mean, _, _ = ended[f"{job}.0"]
    assert (state, tasks) == ("COMPLETED", str(TASKS))
    assert seconds(cpu) == pytest.approx(TASKS * SECONDS, rel=0.15)
    assert 40 < megabytes(mean) <= megabytes(highest) < 100
    assert ended[job][-2:] == ["00:07:00", "busy step"]


def at_work(runner: SlurmJobRunner, job: str) -> list[str] | None:
    """The step's row of sstat, as soon as each task has used its CPU."""
    row = rows(runner, "sstat", f"--jobs={job}", "--format=JobID,NTasks,MinCPU,AveRSS").get(
        f"{job}.0"
    )
    if row and all(row[1:3]) and seconds(row[1]) >= SECONDS - 1:
        return row
    return None


def over(runner: SlurmJobRunner, job: str) -> dict[str, list[str]] | None:
    """The rows of sacct, as soon as the job's says so, and the step has its figures: those come
    later.
    """
    columns = "JobID,State,NTasks,TotalCPU,MaxRSS,AveRSS,Timelimit,JobName"
    seen = rows(runner, "sacct", f"--jobs={job}", f"--format={columns}")
    # The job's row is there before its time limit and its name.
    if job in seen and seen[job][0] == "COMPLETED" and seen[job][-2] and all(seen[f"{job}.0"][3:5]):
        return seen
    return None


def test_nobody_needs_an_account(runner: SlurmJobRunner) -> None:
    assert (
        runner.cluster.run("setpriv", "--reuid=65534", "--clear-groups", "srun", "id", "-u").stdout
        == "65534\n"
    )
