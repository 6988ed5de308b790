"""What control groups of either version limit and count, read from files as the kernel shows
them.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from srunddp.util import cgroup
from srunddp.util.cgroup import JobGroup, cpu_quota, cpuset, memory_limit, oom_kills
from tests.support.starting import write

GIB = 1 << 30
V2 = "0::/job/step\n"
V1 = "4:memory:/job\n3:cpu,cpuacct:/job/step\n2:cpuset:/\n0::/init\n"
OF_JOB = "0::/system.slice/slurmstepd.scope/job_71/step_0/user/task_1\n"
JOB = "system.slice/slurmstepd.scope/job_71"
SLUID = "system.slice/node01_slurmstepd.scope/s08SM8C0WHB800"


def write_all(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        write(root / name, f"{text}\n")


@pytest.mark.parametrize(
    ("groups", "files", "expected"),
    [
        (V2, {"job/step/cpu.max": "max 100000"}, None),
        (V2, {"job/step/cpu.max": "250000 100000"}, 2.5),
        (V2, {"job/step/cpu.max": "max 100000", "job/cpu.max": "400000 100000"}, 4),
        (V2, {"job/step/cpu.max": "300000 100000", "job/cpu.max": "100000 50000"}, 2),
        ("0::/host/s/name\n", {"cpu.max": "200000 100000"}, 2),  # a container's
        (
            V1,
            {
                "cpu,cpuacct/job/step/cpu.cfs_quota_us": "-1",
                "cpu,cpuacct/job/step/cpu.cfs_period_us": "100000",
            },
            None,
        ),
        (
            V1,
            {
                "cpu,cpuacct/job/cpu.cfs_quota_us": "300000",
                "cpu,cpuacct/job/cpu.cfs_period_us": "100000",
            },
            3,
        ),
        (
            V1,
            {"cpu,cpuacct/cpu.cfs_quota_us": "50000", "cpu,cpuacct/cpu.cfs_period_us": "100000"},
            0.5,
        ),
        ("", {}, None),
    ],
)
def test_the_least_quota_counts(
    groups: str, files: dict[str, str], expected: float | None, tmp_path: Path
) -> None:
    write_all(tmp_path, files)
    assert cpu_quota(groups, tmp_path) == expected


@pytest.mark.parametrize(
    ("groups", "files", "expected"),
    [
        (V2, {"job/cpuset.cpus.effective": "0-2,8", "cpuset.cpus.effective": "0-15"}, {0, 1, 2, 8}),
        (V1, {"cpuset/cpuset.effective_cpus": "4-5"}, {4, 5}),
        ("", {}, set()),
    ],
)
def test_the_nearest_group_tells_the_cpus(
    groups: str, files: dict[str, str], expected: set[int], tmp_path: Path
) -> None:
    write_all(tmp_path, files)
    assert cpuset(groups, tmp_path) == expected


@pytest.mark.parametrize(
    ("groups", "files", "expected"),
    [
        (V2, {"job/step/memory.max": "max", "job/memory.max": f"{2 * GIB}"}, 2 * GIB),
        (V2, {"job/step/memory.max": f"{GIB}", "job/memory.max": f"{2 * GIB}"}, GIB),
        (V1, {"memory/job/memory.limit_in_bytes": f"{GIB}"}, GIB),
        (V1, {"memory/job/memory.limit_in_bytes": "9223372036854771712"}, None),  # none, in pages
        ("", {}, None),
    ],
)
def test_the_least_memory_counts(
    groups: str, files: dict[str, str], expected: int | None, tmp_path: Path
) -> None:
    write_all(tmp_path, files)
    assert memory_limit(groups, tmp_path) == expected


@pytest.mark.parametrize(
    ("groups", "file", "expected"),
    [
        (V2, "job/step/memory.events", 3),
        (V1, "memory/job/memory.oom_control", 3),
        (V2, "job/memory.events", 0),
    ],
)
def test_kills_are_of_the_own_group(
    groups: str, file: str, expected: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_all(tmp_path, {file: "oom 1\noom_kill 3"})
    monkeypatch.setattr(cgroup, "ROOT", tmp_path)
    monkeypatch.setattr(cgroup, "own_groups", lambda: groups)
    assert oom_kills() == expected


@pytest.mark.parametrize(
    ("groups", "job"),
    [(OF_JOB, JOB), (f"0::/{SLUID}/step_0/user/task_0\n", SLUID)],
    ids=["until 25.11", "since 26.05"],
)
def test_cpu_time_and_memory_are_those_of_the_whole_job(
    groups: str, job: str, tmp_path: Path
) -> None:
    """Version 2; tests/slurm/test_control_groups.py reads real groups of version 1."""
    task = groups.strip().removeprefix("0::/")
    for folder, part in ((job, 1), (f"{job}/step_0", 2), (task, 4)):
        cpu = f"usage_usec {12_500_000 // part}\nuser_usec 12000000\nsystem_usec 500000"
        memory = f"anon {GIB}\ninactive_anon 5\ninactive_file {3 * GIB // part}\nactive_file 7"
        files = {"cpu.stat": cpu, "memory.current": f"{8 * GIB // part}", "memory.stat": memory}
        write_all(tmp_path / folder, files)
    found = JobGroup.find(groups, tmp_path)
    assert found
    # Without the file pages that the kernel would drop first.
    assert (found.cpu_seconds(), found.memory_bytes()) == (12.5, 5 * GIB)


@pytest.mark.parametrize(
    "groups",
    [
        OF_JOB,  # no such folder
        "0::/user.slice/user-1000.slice/session-4.scope\n",
        "0::/\n",
        "",
        "4:memory:/slurm/uid_1000/job_71/step_0/task_1\n",  # memory alone
        "0::/system.slice/slurmstepd.scope/job_x/step_0\n",
        "0::/system.slice/slurmstepd.scope/system\n",
    ],
)
def test_a_job_may_have_no_group(tmp_path: Path, groups: str) -> None:
    write_all(tmp_path, {"cpu.stat": "usage_usec 1", "memory.current": "1"})
    write_all(tmp_path, {"memory/slurm/uid_1000/job_71/memory.usage_in_bytes": "1"})
    assert JobGroup.find(groups, tmp_path) is None
