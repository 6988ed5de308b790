"""Where Slurm has made a control group for the job, its figures are the node's."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from srunddp.monitor.sampler.cgroup import JobGroup, memory_limit
from srunddp.monitor.sampler.node import COLUMNS, Node
from srunddp.monitor.sampler.tasks import Tasks

GIB = 1 << 30
V2 = "0::/system.slice/slurmstepd.scope/job_71/step_0/user/task_1\n"


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def version_2(root: Path) -> str:
    job = root / "system.slice/slurmstepd.scope/job_71"
    for folder, part in ((job, 1), (job / "step_0", 2), (job / "step_0/user/task_1", 4)):
        write(folder / "cpu.stat", f"usage_usec {12_500_000 // part}\nuser_usec 12000000\nsystem_usec 500000\n")
        write(folder / "memory.current", f"{8 * GIB // part}\n")
        write(folder / "memory.stat", f"anon {GIB}\ninactive_anon 5\ninactive_file {3 * GIB // part}\nactive_file 7\n")
        write(folder / "memory.max", "max\n")
    write(job / "memory.max", f"{16 * GIB}\n")
    return V2


def test_cpu_time_and_memory_are_those_of_the_whole_job(tmp_path: Path) -> None:
    """Version 2; tests/slurm/test_control_groups.py reads real groups of version 1."""
    groups = version_2(tmp_path)
    found = JobGroup.find(groups, tmp_path)
    assert found is not None
    assert found.cpu_seconds() == 12.5
    # Without the file pages that the kernel would drop first.
    assert found.memory_bytes() == 5 * GIB
    assert memory_limit(groups, {"SLURM_MEM_PER_NODE": "1"}, tmp_path) == 16 * GIB
    node = Node(Tasks(0, os.getpid(), None, ""), "ib0", {}, groups, tmp_path)
    row = dict(zip(COLUMNS, node.rows("9.000").strip().split(","), strict=True))
    assert (row["cpu_s"], row["memory_bytes"], row["source"]) == ("12.500", str(5 * GIB), "cgroup")
    assert (row["time"], row["interface"], row["memory_limit_bytes"]) == ("9.000", "ib0", str(16 * GIB))


@pytest.mark.parametrize(
    "groups",
    [
        V2,  # no such folder
        "0::/user.slice/user-1000.slice/session-4.scope\n",
        "0::/\n",
        "",
        "4:memory:/slurm/uid_1000/job_71/step_0/task_1\n",  # memory alone
        "0::/system.slice/slurmstepd.scope/job_x/step_0\n",
    ],
)
def test_without_a_group_of_the_job_its_processes_are_added_up(tmp_path: Path, groups: str) -> None:
    write(tmp_path / "memory/slurm/uid_1000/job_71/memory.usage_in_bytes", "1\n")
    write(tmp_path / "cpu.stat", "usage_usec 1\n")
    write(tmp_path / "memory.current", "1\n")
    assert JobGroup.find(groups, tmp_path) is None
    tasks = Tasks(0, os.getpid(), None, "")
    node = Node(tasks, "ib0", {}, groups, tmp_path)
    tasks.look(thorough=True)
    node.look()
    row = dict(zip(COLUMNS, node.rows("9.000").strip().split(","), strict=True))
    assert row["source"] == "processes"
    assert float(row["cpu_s"]) > 0
    assert int(row["memory_bytes"]) > 1 << 20
    assert 0 < float(row["cpus"]) <= len(os.sched_getaffinity(0))


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({"SLURM_MEM_PER_NODE": "2048"}, 2 * GIB),
        ({"SLURM_MEM_PER_CPU": "512", "SLURM_CPUS_ON_NODE": "8"}, 4 * GIB),
        ({"SLURM_MEM_PER_NODE": "0"}, None),  # all of the node's
        ({"SLURM_MEM_PER_CPU": "512"}, None),
        ({}, None),
    ],
)
def test_where_no_group_limits_memory_what_was_asked_for_does(
    tmp_path: Path, environ: dict[str, str], expected: int | None
) -> None:
    assert memory_limit(V2, environ, tmp_path) == expected
