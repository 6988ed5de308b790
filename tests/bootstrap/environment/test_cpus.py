"""Which CPUs the launcher and the cgroups leave a rank, and what is said where it could have more."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from srunddp.bootstrap.environment.cpus import Cpus, advice, share


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
    ],
)
def test_share_is_its_own_and_no_more_than_asked_for(
    cpus: int, sharers: int, asked: dict[str, str], expected: int
) -> None:
    assert share(cpus, sharers, asked) == expected


ADVICE = """
import os
from srunddp.bootstrap.environment.cpus import Cpus, advice
print("\\n".join(advice(os.environ, Cpus.here())))
"""


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two CPUs")
def test_cpus_that_srun_did_not_pass_on_are_said() -> None:
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
        ({}, 1, []),
        ({"SLURM_CPUS_PER_TASK": "4"}, 4, []),
        ({"SLURM_CPUS_PER_TASK": "4"}, 2, ["4"]),
        ({"SRUN_CPUS_PER_TASK": "8", "SLURM_CPUS_PER_TASK": "4"}, 4, ["8"]),
        ({"SLURM_CPUS_PER_TASK": "many"}, 1, []),
    ],
)
def test_only_fewer_cpus_than_asked_for_are_a_sign(variables: dict[str, str], allowed: int, asked: list[str]) -> None:
    assert [line.split()[0] for line in advice(variables, Cpus(allowed, 64))] == asked


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
def test_one_core_by_mpirun_is_said_where_others_are_idle(
    ranks: int, cpus: Cpus, variables: dict[str, str], warned: bool
) -> None:
    lines = advice({"OMPI_COMM_WORLD_LOCAL_SIZE": str(ranks), **variables}, cpus)
    assert [line.endswith(" -> mpirun --bind-to none") for line in lines] == [True] * warned
