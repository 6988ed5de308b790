"""The control groups in which Slurm puts a step: their limits end what goes beyond, and their
figures are the job's.
"""

from __future__ import annotations

import pytest

from tests.cluster.requirements import cgroup_version
from tests.conftest import BED
from tests.slurm.conftest import PYTHON, SRUNDDP, SlurmJobRunner
from tests.support.starting import write

pytestmark = pytest.mark.slurm

MIB = 1 << 20
TAKES_MORE = """
import os, time
taken = [bytearray(b"1") * (64 << 20) for _ in range(30)] if os.environ["RANK"] == "1" else []
time.sleep(60)
"""
# In the first start alone.
TAKES_MORE_ONCE = """
import os
if os.environ["RANK"] == "1" and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    taken = [bytearray(b"1") * (64 << 20) for _ in range(30)]
"""
FIGURES = """
import json, os, time
from pathlib import Path
from srunddp.util.cgroup import JobGroup, memory_limit
groups = Path("/proc/self/cgroup").read_text()
found = JobGroup.find(groups)
before = found.cpu_seconds(), found.memory_bytes(), time.process_time()
held, end = bytearray(b"1") * (200 << 20), time.process_time() + 1.0
while time.process_time() < end: pass
after = found.cpu_seconds(), found.memory_bytes(), time.process_time()
used = {"cpu": after[0] - before[0], "memory": after[1] - before[1], "own": after[2] - before[2]}
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


def test_out_of_memory_all_ranks_start_anew(runner: SlurmJobRunner) -> None:
    """The exit code is srun's, which ends with 1 after the kernel has killed a process."""
    script = write(runner.cluster.shared / "takes_more_once.py", TAKES_MORE_ONCE)
    done = runner.srun("-N2", "-n2", "--mem=300", SRUNDDP, "--restarts=1", str(script))
    assert " failed: killed by SIGKILL, out of memory (exit code 137)\n" in done.errors
    assert "srunddp: ended with 0 after 1 restart" in done.errors


@pytest.mark.skipif(
    not BED or cgroup_version() == 1,
    reason="needs Slurm 24.11 and control groups of version 2: bin/test --slurm 24.11 --cgroup2",
)
def test_where_slurm_ends_a_whole_step_memory_and_the_option_are_named(
    runner: SlurmJobRunner,
) -> None:
    """The kernel kills srunddp with its script, so nobody is left to start the rank anew."""
    script = write(runner.cluster.shared / "takes_more_once.py", TAKES_MORE_ONCE)
    words = ("-N2", "-n2", "--mem=300", "--oom-kill-step=1", SRUNDDP, "--restarts=1", str(script))
    done = runner.srun(*words)
    assert done.code != 0
    assert "out of memory" in done.errors
    assert "srun --oom-kill-step=0" in done.errors


def test_the_job_s_group_tells_its_cpu_time_and_memory(runner: SlurmJobRunner) -> None:
    done = runner.srun("-N1", "-n1", "--mem=500", PYTHON, "-c", FIGURES)
    (figures,) = done.reports
    assert figures["limit"] == 500 * MIB
    # The kernel counts up to 64 pages of each CPU later.
    assert 199 * MIB <= figures["memory"] <= 220 * MIB
    # The process is alone in its job but for Slurm's own.
    assert figures["own"] >= 1.0
    assert 0.9 * figures["own"] <= figures["cpu"] <= 1.2 * figures["own"] + 0.3
