"""Lightning takes its ranks from srunddp and starts none by itself; its own ways to find them say the same."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.interop.conftest import Run, alone, mpirun, mpirun_in_job, on_login, program, read, srun
from tests.slurm.conftest import Bench

PROGRAMS = ("lightning_trainer", "lightning_fabric")
TWO_NODES = ("--devices=1", "--nodes=2")
SAID = "lightning_environments"


def launches(run: Run) -> list[tuple[str, int]]:
    """Of each rank: the environment that Lightning chose, and how many ranks it started."""
    return [(record["launch"]["environment"], record["launch"]["started"]) for record in run.records]


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Run:
    run = alone([program("lightning_trainer")], tmp_path_factory.mktemp("own"))
    assert launches(run) == [("LightningEnvironment", 1), ("LightningEnvironment", 0)]
    return run


@pytest.mark.mpirun
@pytest.mark.parametrize("name", PROGRAMS)
def test_below_mpirun_it_starts_no_ranks(name: str, tmp_path: Path) -> None:
    assert launches(mpirun(name, tmp_path)) == [("TorchElasticEnvironment", 0)] * 2


@pytest.mark.slurm
@pytest.mark.parametrize("name", PROGRAMS)
def test_below_srun_it_starts_no_ranks(name: str, bench: Bench) -> None:
    assert launches(srun(bench, name, *TWO_NODES, nodes=2, per_node=1)) == [("TorchElasticEnvironment", 0)] * 2


@pytest.mark.slurm
def test_with_its_own_environment_for_slurm_it_trains_to_the_same_bits(own: Run, bench: Bench) -> None:
    ours = srun(bench, "lightning_trainer", "--environment=slurm")
    assert launches(ours) == [("SLURMEnvironment", 0)] * 2
    assert ours.results() == own.results()


@pytest.mark.mpirun
def test_with_its_own_environment_for_mpi_it_trains_to_the_same_bits(own: Run, tmp_path: Path) -> None:
    ours = mpirun("lightning_trainer", tmp_path, "--environment=mpi")
    assert launches(ours) == [("MPIEnvironment", 0)] * 2
    assert ours.results() == own.results()


@pytest.mark.slurm
def test_in_an_interactive_job_it_trains_to_the_same_bits(own: Run, bench: Bench) -> None:
    """Lightning by itself takes a job called interactive for no job."""
    launcher = ("salloc", "-Q", "--nodes=1", "--ntasks-per-node=2", "srun")
    assert on_login(bench, launcher, "lightning_trainer").results() == own.results()


@pytest.mark.slurm
def test_with_ntasks_it_trains_to_the_same_bits(own: Run, bench: Bench) -> None:
    """Lightning by itself refuses that, and wants --ntasks-per-node."""
    assert on_login(bench, ("srun", "-N1", "--ntasks=2"), "lightning_trainer").results() == own.results()


@pytest.mark.slurm
def test_on_slurm_its_own_environment_says_what_ours_says(bench: Bench) -> None:
    run = srun(bench, SAID, nodes=2, per_node=2)
    for rank, said in enumerate(run.records):
        assert said["TorchElasticEnvironment"] == [rank, rank % 2, rank // 2, 4]
        assert said["SLURMEnvironment"] == said["TorchElasticEnvironment"]


@pytest.mark.mpirun
def test_below_mpirun_its_own_environment_says_what_ours_says(tmp_path: Path) -> None:
    for rank, said in enumerate(mpirun(SAID, tmp_path).records):
        assert said["TorchElasticEnvironment"] == [rank, rank, 0, 2]
        assert said["MPIEnvironment"] == said["TorchElasticEnvironment"]


@pytest.mark.slurm
@pytest.mark.mpirun
def test_below_mpirun_in_a_job_the_ranks_are_mpirun_s(bench: Bench) -> None:
    """Lightning's environment for Slurm would believe the variables of mpirun's daemons."""
    out, done = mpirun_in_job(bench, SAID, nodes=2)
    for rank, said in enumerate(read(out, done.code, done.errors).records):
        assert said["TorchElasticEnvironment"] == [rank, rank % 2, rank // 2, 4]
        assert said["SLURMEnvironment"] != said["TorchElasticEnvironment"]
