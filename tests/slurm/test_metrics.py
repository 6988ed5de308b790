"""The metrics of real jobs on one node, and what is left of them when Slurm kills a job."""

from __future__ import annotations

import os
import re
import signal
import subprocess
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.slurm.conftest import SRUNDDP, SlurmJobRunner
from tests.support.starting import until, write

pytestmark = pytest.mark.slurm

SCRIPT = """
import pathlib, sys, time
import srunddp
while not pathlib.Path(sys.argv[1]).exists():
    srunddp.heartbeat()
    time.sleep(0.1)
"""


def submit(runner: SlurmJobRunner, ifaces: Path, end: Path) -> str:
    """A job on node01, where others have room; it ends when there is a file `end`."""
    script = write(end.parent / "train.py", SCRIPT)
    return runner.cluster.run(
        *("sbatch", "--parsable", "--nodelist=node01", "--ntasks=1", "--cpus-per-task=1"),
        *("--mem=200", f"--output={end}.out", f"--chdir={end.parent}"),
        f"--wrap=SRUNDDP_IFACES={ifaces} srun {SRUNDDP} {script} {end}",
    ).stdout.strip()


def writer_of(file: Path) -> int:
    """The process id of the supervisor. By scancel a step gets SIGTERM before SIGKILL."""
    found = re.match(r"# srunddp \S+, process (\d+) .* in (\S+)\n", file.read_text())
    assert found
    assert found[2] == os.readlink("/proc/self/ns/pid")
    return int(found[1])


def epilog_line() -> str:
    """The one that docs/admin.md gives, with its folder."""
    text = (ROOT / "docs" / "admin.md").read_text()
    found = re.search(r"^rm -f (\S+)/srunddp-.*$", text, re.MULTILINE)
    assert found
    return found[0]


def test_two_jobs_on_a_node_and_what_a_killed_one_leaves(runner: SlurmJobRunner) -> None:
    folder = runner.cluster.shared / "metrics-of-jobs"
    metrics = folder / "metrics"
    metrics.mkdir(parents=True)
    ifaces = write(
        folder / "ifaces.conf",
        f'- nodes: "*"\n  interface: auto\n  metrics: {metrics}\n',
    )
    jobs = [submit(runner, ifaces, folder / f"end.{number}") for number in range(3)]

    def present() -> set[str]:
        return {re.sub(r"srunddp-(\d+)\.0\..+\.node01\.prom", r"\1", each) for each in names()}

    def names() -> list[str]:
        return [each.name for each in metrics.iterdir() if each.name.endswith(".prom")]

    until(lambda: present() == {*jobs}, why=lambda: sorted(folder.glob("*.out")))
    for file in metrics.iterdir():
        if file.name.startswith(tuple(f"srunddp-{job}." for job in jobs[:2])):
            os.kill(writer_of(file), signal.SIGKILL)
    until(lambda: runner.cluster.run("squeue", "-h", "-o%i").stdout.split() == [jobs[2]])
    assert present() == {*jobs}

    # The next run on the node removes what the user's killed jobs have left, and the epilog what
    # it knows by the job's number. Here it is called for one of them.
    line = re.sub(r"^rm -f \S+/", f"rm -f {metrics}/", epilog_line())
    subprocess.run(["bash", "-c", line], env={"SLURM_JOB_ID": jobs[0]}, check=True)
    assert present() == {*jobs[1:]}
    jobs.append(submit(runner, ifaces, folder / "end.3"))
    until(lambda: present() == {*jobs[2:]})
    for number in range(4):
        (folder / f"end.{number}").touch()
    until(lambda: present() == set())
