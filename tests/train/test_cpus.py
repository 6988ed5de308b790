"""Which CPUs a rank may use, and what is said where it could have more."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from worlds import StandIn

from srunddp.train import cpus
from srunddp.train.cpus import Cpus, advice, quota, set_threads, share

if TYPE_CHECKING:
    from conftest import Ranks

several_cpus = pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two CPUs")


@contextmanager
def on_one_cpu() -> Iterator[None]:
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(before)})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def test_a_rank_alone_has_its_affinity_and_not_the_machine() -> None:
    assert share(StandIn()) == len(os.sched_getaffinity(0))
    with on_one_cpu():
        assert share(StandIn()) == Cpus.here().allowed == 1
        assert Cpus.here().machine == os.cpu_count()


def test_ranks_of_a_node_divide_the_mask_that_they_share(three_ranks: Ranks) -> None:
    """But not one that is a task's own, nor with another node; and each has one CPU at least."""
    assert three_ranks["shares"] == [[3, 4, 8, 1], [3, 4, 8, 1], [3, 6, 8, 1]]


V2 = "0::/job/step\n"
V1 = "4:memory:/job\n3:cpu,cpuacct:/job/step\n2:cpuset:/\n0::/init\n"


@pytest.mark.parametrize(
    ("cgroups", "files", "expected"),
    [
        (V2, {"job/step/cpu.max": "max 100000"}, None),
        (V2, {"job/step/cpu.max": "250000 100000"}, 2.5),
        (V2, {"job/step/cpu.max": "max 100000", "job/cpu.max": "400000 100000"}, 4),
        (V2, {"job/step/cpu.max": "300000 100000", "job/cpu.max": "100000 50000"}, 2),
        ("0::/host/s/name\n", {"cpu.max": "200000 100000"}, 2),
        (V1, {"cpu,cpuacct/job/step/cpu.cfs_quota_us": "-1", "cpu,cpuacct/job/step/cpu.cfs_period_us": "100000"}, None),
        (V1, {"cpu,cpuacct/job/cpu.cfs_quota_us": "300000", "cpu,cpuacct/job/cpu.cfs_period_us": "100000"}, 3),
        (V1, {"cpu,cpuacct/cpu.cfs_quota_us": "50000", "cpu,cpuacct/cpu.cfs_period_us": "100000"}, 0.5),
        (None, {}, None),
    ],
)
def test_a_container_s_quota_is_found_in_either_cgroup_version(
    cgroups: str | None, files: dict[str, str], expected: float | None, tmp_path: Path
) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text + "\n")
    if cgroups is not None:
        (tmp_path / "self").write_text(cgroups)
    assert quota(tmp_path / "self", tmp_path) == expected


@pytest.mark.parametrize(("found", "expected"), [(2.5, 2), (0.5, 1), (100.0, 16), (None, 16)])
def test_a_quota_below_the_affinity_counts(found: float | None, expected: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpus, "quota", lambda: found)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(16)))
    assert share(StandIn()) == expected


@pytest.mark.parametrize(
    ("before", "cpus", "wanted", "variables", "after"),
    [
        (4, 2, None, {}, 2),
        (1, 2, None, {}, 1),
        (4, 2, None, {"OMP_NUM_THREADS": "4"}, 4),
        (4, 2, None, {"MKL_NUM_THREADS": "4"}, 4),
        (4, 2, 3, {"OMP_NUM_THREADS": "4"}, 3),
        (1, 1, 2, {}, 2),
    ],
)
def test_row_25_torch_has_no_more_threads_than_cpus_unless_told(
    before: int, cpus: int, wanted: int | None, variables: dict[str, str], after: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    own = torch.get_num_threads()
    torch.set_num_threads(before)
    try:
        set_threads(cpus, wanted)
        assert torch.get_num_threads() == after
    finally:
        torch.set_num_threads(own)


ADVICE = """
import os
from srunddp.train.cpus import Cpus, advice
print("\\n".join(advice(os.environ, Cpus.here())))
"""


@several_cpus
def test_row_23_cpus_that_srun_did_not_pass_on_are_said_with_the_cure() -> None:
    """In a process that has one CPU, though the job asked for two."""
    done = subprocess.run(
        ["taskset", "-c", str(min(os.sched_getaffinity(0))), sys.executable, "-c", ADVICE],
        env={**os.environ, "SLURM_CPUS_PER_TASK": "2"},
        capture_output=True,
        text=True,
        check=True,
    )
    (line,) = done.stdout.splitlines()
    assert line.startswith("2 CPUs per task were asked for, and this rank may use 1; expected 2")
    assert line.endswith(
        "-> export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK in the job script, or srun --cpus-per-task=2"
    )


@pytest.mark.parametrize(
    ("variables", "allowed", "asked"),
    [
        ({}, 1, None),
        ({"SLURM_CPUS_PER_TASK": "4"}, 4, None),
        ({"SLURM_CPUS_PER_TASK": "4"}, 64, None),
        ({"SLURM_CPUS_PER_TASK": "4"}, 2, 4),
        ({"SRUN_CPUS_PER_TASK": "8", "SLURM_CPUS_PER_TASK": "4"}, 4, 8),
        ({"SLURM_CPUS_PER_TASK": "many"}, 1, None),
    ],
)
def test_row_23_only_fewer_cpus_than_asked_for_are_a_sign(
    variables: dict[str, str], allowed: int, asked: int | None
) -> None:
    lines = advice(variables, Cpus(allowed, 64))
    assert [line.split()[0] for line in lines] == ([] if asked is None else [str(asked)])


@pytest.mark.parametrize(
    ("ranks", "cpus", "variables", "told"),
    [
        (2, Cpus(1, 64), {}, True),
        (2, Cpus(2, 64, core=2), {}, True),
        (2, Cpus(64, 64), {}, False),
        (4, Cpus(16, 64), {}, False),
        (2, Cpus(1, 2), {}, False),
        (2, Cpus(1, 64), {"SLURM_CPUS_ON_NODE": "2"}, False),
        (2, Cpus(1, 64), {"SLURM_CPUS_ON_NODE": "8"}, True),
        (2, Cpus(1, 2), {"SLURM_CPUS_PER_TASK": "4"}, False),
    ],
)
def test_row_24_one_core_by_mpirun_is_a_sign_where_others_stay_idle(
    ranks: int, cpus: Cpus, variables: dict[str, str], told: bool
) -> None:
    lines = advice({"OMPI_COMM_WORLD_LOCAL_SIZE": str(ranks), **variables}, cpus)
    assert [line.endswith(" -> mpirun --bind-to none") for line in lines] == [True] * told
