"""Lightning's own ways to find its ranks say what srunddp says, and train to the same bits."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.interop.conftest import Run, mpirun, mpirun_in_job, on_login, read, srun
from tests.slurm.conftest import SlurmJobRunner

NAME = "lightning_trainer"
SAID = "lightning_environments"


def launches(run: Run) -> list[tuple[str, int]]:
    """Of each rank: the environment that Lightning chose, and how many ranks it started."""
    return [
        (record["launch"]["environment"], record["launch"]["started"]) for record in run.records
    ]


@pytest.mark.slurm
def test_its_own_slurm_environment_trains_to_the_same_bits(
    own: Callable[[str], Run], runner: SlurmJobRunner
) -> None:
    ours = srun(runner, NAME, "--environment=slurm")
    assert launches(ours) == [("SLURMEnvironment", 0)] * 2
    assert ours.results() == own(NAME).results()


@pytest.mark.mpirun
def test_its_own_mpi_environment_trains_to_the_same_bits(
    own: Callable[[str], Run], tmp_path: Path
) -> None:
    ours = mpirun(NAME, tmp_path, "--environment=mpi")
    assert launches(ours) == [("MPIEnvironment", 0)] * 2
    assert ours.results() == own(NAME).results()


@pytest.mark.slurm
def test_in_an_interactive_job_it_trains_to_the_same_bits(
    own: Callable[[str], Run], runner: SlurmJobRunner
) -> None:
    """Lightning by itself takes a job called interactive for no job."""
    launcher = ("salloc", "-Q", "--nodes=1", "--ntasks-per-node=2", "srun")
    assert on_login(runner, launcher, NAME).results() == own(NAME).results()


@pytest.mark.slurm
def test_with_ntasks_it_trains_to_the_same_bits(
    own: Callable[[str], Run], runner: SlurmJobRunner
) -> None:
    """Lightning by itself refuses that, and wants --ntasks-per-node."""
    assert on_login(runner, ("srun", "-N1", "--ntasks=2"), NAME).results() == own(NAME).results()


@pytest.mark.slurm
def test_on_slurm_its_own_environment_says_what_ours_says(runner: SlurmJobRunner) -> None:
    run = srun(runner, SAID, "--ask=slurm", nodes=2, per_node=2)
    for rank, said in enumerate(run.records):
        assert said["slurm"] == said["torchrun"] == [rank, rank % 2, rank // 2, 4]


@pytest.mark.mpirun
def test_below_mpirun_its_own_environment_says_what_ours_says(tmp_path: Path) -> None:
    for rank, said in enumerate(mpirun(SAID, tmp_path, "--ask=mpi").records):
        assert said["mpi"] == said["torchrun"] == [rank, rank, 0, 2]


@pytest.mark.slurm
@pytest.mark.mpirun
def test_below_mpirun_in_a_job_the_ranks_are_mpirun_s(runner: SlurmJobRunner) -> None:
    """Lightning's environment for Slurm would believe the variables of mpirun's daemons."""
    out, done = mpirun_in_job(runner, SAID, "--ask=slurm", nodes=2)
    records = read(out, done.code, done.errors).records
    assert [said["torchrun"] for said in records] == [
        [rank, rank % 2, rank // 2, 4] for rank in range(4)
    ]
    assert len({said["slurm"][0] for said in records}) < 4
