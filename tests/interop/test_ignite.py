"""PyTorch Ignite beside what test_same_bits.py has: its own way to start ranks, and jobs with
mpirun.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.interop.conftest import Run, alone, mpirun_in_job, program, read, srun
from tests.slurm.conftest import SlurmJobRunner

NAME = "ignite_engine"


def test_its_own_ranks_train_to_the_same_bits(own: Callable[[str], Run], tmp_path: Path) -> None:
    assert alone([program(NAME), "--spawn=2"], tmp_path).results() == own(NAME).results()


@pytest.mark.slurm
def test_on_two_nodes_of_two_ranks_it_knows_its_place(runner: SlurmJobRunner) -> None:
    run = srun(runner, NAME, nodes=2, per_node=2)
    assert run.places() == [(0, 0, 4), (1, 1, 4), (2, 0, 4), (3, 1, 4)]
    assert [record["node_rank"] for record in run.records] == [0, 0, 1, 1]


@pytest.mark.slurm
@pytest.mark.mpirun
def test_below_mpirun_in_a_job_it_stops_at_the_daemons_variables(runner: SlurmJobRunner) -> None:
    _, done = mpirun_in_job(runner, NAME, nodes=2, per_node=1)
    assert done.code == 1
    assert "inconsistent with equivalent SLURM env variable" in done.errors


@pytest.mark.slurm
@pytest.mark.mpirun
def test_below_mpirun_in_a_job_it_trains_without_the_job_id(
    own: Callable[[str], Run], runner: SlurmJobRunner
) -> None:
    out, done = mpirun_in_job(runner, NAME, nodes=2, per_node=1, wrapper="env -u SLURM_JOB_ID")
    assert read(out, done.code, done.errors).losses() == own(NAME).losses()
