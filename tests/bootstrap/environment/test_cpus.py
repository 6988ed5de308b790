"""Which CPUs the launcher and the cgroups leave a rank, and what is said where it could have
more.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from srunddp.bootstrap.environment.cpus import Cpus, advice, mask, share, usable


@pytest.fixture
def one_cpu() -> Iterator[int]:
    """Binds this process to one of its CPUs."""
    allowed = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {max(allowed)})
    yield max(allowed)
    os.sched_setaffinity(0, allowed)


def test_a_process_knows_the_cpus_that_it_is_bound_to(one_cpu: int) -> None:
    here = Cpus.here()
    assert (here.allowed, here.machine) == (1, os.cpu_count())
    assert here.core >= 1
    assert usable() in (0, 1)  # 0 where a cgroup leaves less than one
    bound = mask()
    os.sched_setaffinity(0, range(here.machine))
    assert (mask() == bound) == (len(os.sched_getaffinity(0)) == 1)


@pytest.mark.parametrize(
    ("cpus", "sharers", "asked", "expected"),
    [
        (8, 1, {}, 8),
        (8, 2, {}, 4),
        (9, 2, {}, 4),
        (2, 4, {}, 1),
        (0, 1, {}, 1),
        (64, 4, {"SLURM_CPUS_PER_TASK": "4"}, 4),
        (64, 4, {"SLURM_CPUS_PER_TASK": "4", "SRUN_CPUS_PER_TASK": "8"}, 8),
        (1, 1, {"SLURM_CPUS_PER_TASK": "4"}, 1),
        (8, 2, {"SLURM_CPUS_PER_TASK": "x"}, 4),
        (64, 4, {"SLURM_TRES_PER_TASK": "cpu=4,gres/gpu=2"}, 4),
        (64, 4, {"SLURM_TRES_PER_TASK": "gres/gpu=2"}, 16),
        # Since Slurm 23.11 srun does not read the last of these.
        (64, 4, {"SLURM_TRES_PER_TASK": "cpu=4", "SRUN_CPUS_PER_TASK": "8"}, 4),
    ],
)
def test_share_is_its_own_and_at_most_as_asked(
    cpus: int, sharers: int, asked: dict[str, str], expected: int
) -> None:
    assert share(cpus, sharers, asked) == expected


@pytest.mark.parametrize(
    ("variables", "allowed", "asked"),
    [
        ({}, 1, 0),
        ({"SLURM_CPUS_PER_TASK": "4"}, 4, 0),
        ({"SLURM_CPUS_PER_TASK": "4"}, 2, 4),
        ({"SRUN_CPUS_PER_TASK": "8", "SLURM_CPUS_PER_TASK": "4"}, 4, 8),
        ({"SLURM_CPUS_PER_TASK": "many"}, 1, 0),
    ],
)
def test_only_fewer_cpus_than_asked_for_are_a_sign(
    variables: dict[str, str], allowed: int, asked: int
) -> None:
    lines = advice(variables, Cpus(allowed, 64))
    assert len(lines) == bool(asked)
    for line in lines:
        found = (
            f"{asked} CPUs per task were asked for, and this rank may use {allowed}; expected"
            f" {asked}"
        )
        hint = "-> export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK in the job script, or srun"
        assert line.startswith(f"{found}, but srun of Slurm 22.05 and 23.02 does not")
        assert line.endswith(f"{hint} --cpus-per-task={asked}")


@pytest.mark.parametrize(
    ("cpus", "expected"),
    [
        (Cpus(4, 64), None),
        (Cpus(2, 2), "4, but the machine has 2 -> --cpus-per-task=2"),
        (Cpus(2, 64), "4, as srun was told -> see what it binds ranks to with srun --cpu-bind="),
    ],
)
def test_since_slurm_23_11_srun_knows_the_jobs_option(cpus: Cpus, expected: str | None) -> None:
    """sbatch -c4 there: a plain srun has taken it over, so that no export helps."""
    given = {"SLURM_CPUS_PER_TASK": "4", "SLURM_TRES_PER_TASK": "cpu=4"}
    lines = advice(given, cpus)
    assert len(lines) == (expected is not None)
    for line in lines:
        assert f"this rank may use 2; expected {expected}" in line
        assert "SRUN_CPUS_PER_TASK" not in line


@pytest.mark.parametrize(
    ("ranks", "cpus", "variables", "warned"),
    [
        (2, Cpus(2, 64, core=2), {}, True),
        (2, Cpus(64, 64), {}, False),
        (2, Cpus(1, 2), {}, False),
        (2, Cpus(1, 64), {"SLURM_CPUS_ON_NODE": "2"}, False),
        (2, Cpus(1, 64), {"SLURM_CPUS_ON_NODE": "8"}, True),
        (2, Cpus(1, 2), {"SLURM_CPUS_PER_TASK": "4"}, False),
    ],
)
def test_one_core_by_mpirun_beside_idle_ones(
    ranks: int, cpus: Cpus, variables: dict[str, str], warned: bool
) -> None:
    lines = advice({"OMPI_COMM_WORLD_LOCAL_SIZE": str(ranks), **variables}, cpus)
    assert [line.endswith(" -> mpirun --bind-to none") for line in lines] == [True] * warned
