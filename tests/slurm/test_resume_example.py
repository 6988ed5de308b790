"""The job script among the examples: warned by Slurm, it is started again and goes on."""

from __future__ import annotations

import re
import time

import pytest

from tests.conftest import ROOT
from tests.slurm.conftest import SlurmJobRunner

pytestmark = pytest.mark.slurm

EPOCHS = 60
LONG = 180.0


def test_the_job_script_example_resumes_where_it_was_stopped(runner: SlurmJobRunner) -> None:
    out = runner.cluster.shared / "resume.out"
    folder = runner.cluster.shared / "runs"
    layout = ("--ntasks-per-node=1", "--gpus-per-node=0", "--cpus-per-task=1", "--time=10")
    places = (
        f"--chdir={ROOT}",
        f"--output={out}",
        f"--export=ALL,SRUNDDP_IFACES={runner.ifaces},OMP_NUM_THREADS=1",
    )
    script = (
        str(ROOT / "docs" / "examples" / "resume.sh"),
        f"--epochs={EPOCHS}",
        f"--output-dir={folder}",
    )
    job = runner.cluster.run("sbatch", "--parsable", *layout, *places, *script).stdout.strip()

    def wait_for(pattern: str) -> None:
        end = time.monotonic() + LONG
        while not (out.exists() and re.search(pattern, out.read_text())):
            assert time.monotonic() < end, out.exists() and out.read_text()
            # A requeued job would wait 15 s for its old credentials to expire.
            runner.cluster.run("scontrol", "update", f"jobid={job}", "StartTime=now", check=False)
            time.sleep(0.3)

    wait_for("Epoch 1 ")
    runner.cluster.run("scancel", "--signal=USR2", job)
    wait_for("\nval accuracy")
    text = out.read_text()
    assert re.search(
        r"stopped after step \d+ by SIGUSR2; checkpoint \S+; the job is requeued \(exit code 143\)",
        text,
    )
    assert [int(epoch) for epoch in re.findall(r"^Epoch (\d+) ", text, re.MULTILINE)] == list(
        range(1, EPOCHS + 1)
    )
