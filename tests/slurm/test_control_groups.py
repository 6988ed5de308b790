"""The control groups in which Slurm puts a step: their limits end what goes beyond, and their
figures are the job's.
"""

from __future__ import annotations

import pytest

from tests.slurm.conftest import PYTHON, SRUNDDP, SlurmJobRunner

pytestmark = pytest.mark.slurm

MIB = 1 << 20
TAKES_MORE = """
import os, time
taken = [bytearray(b"1") * (64 << 20) for _ in range(30)] if os.environ["RANK"] == "1" else []
time.sleep(60)
"""
FIGURES = """
import json, os, time
from pathlib import Path
from srunddp.util.cgroup import JobGroup, memory_limit
groups = Path("/proc/self/cgroup").read_text()
found = JobGroup.find(groups)
before = found.cpu_seconds(), found.memory_bytes()
held, end = bytearray(b"1") * (200 << 20), time.process_time() + 1.0
while time.process_time() < end: pass
after = found.cpu_seconds(), found.memory_bytes()
used = {"cpu": after[0] - before[0], "memory": after[1] - before[1]}
print(json.dumps({**used, "limit": memory_limit(groups)}))
"""


@pytest.mark.parametrize("nodes", [1, 2])
def test_a_step_over_its_memory_is_named_out_of_memory(runner: SlurmJobRunner, nodes: int) -> None:
    script = runner.cluster.shared / "takes_more.py"
    script.write_text(TAKES_MORE)
    done = runner.srun(f"-N{nodes}", "-n2", "--mem=300", SRUNDDP, "--quiet", str(script))
    assert "srunddp: rank 1 on node0" in done.errors
    assert " failed: killed by SIGKILL, out of memory (exit code 137)\n" in done.errors
    assert done.errors.count("failed: ") == 1, done.errors


def test_the_job_s_group_tells_its_cpu_time_and_memory(runner: SlurmJobRunner) -> None:
    done = runner.srun("-N1", "-n1", "--mem=500", PYTHON, "-c", FIGURES)
    (figures,) = done.reports
    assert figures["limit"] == 500 * MIB
    # The kernel counts up to 64 pages of each CPU later.
    assert 199 * MIB <= figures["memory"] <= 220 * MIB
    assert 1.0 <= figures["cpu"] <= 1.5
