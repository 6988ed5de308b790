"""Hugging Face's Trainer and Accelerate train to the same bits as below `accelerate launch`, and agree on ranks."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.interop.conftest import Run, accelerate_launch, mpirun, srun
from tests.slurm.conftest import SlurmJobRunner

PROGRAMS = ("hf_trainer", "accelerate_loop")


@pytest.fixture(scope="module", params=PROGRAMS)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def own(name: str, tmp_path_factory: pytest.TempPathFactory) -> Run:
    run = accelerate_launch(name, tmp_path_factory.mktemp("own"))
    assert run.places() == [(0, 0, 2), (1, 1, 2)]
    for losses in run.losses():
        assert len(losses) == 20
        assert float.fromhex(losses[-1]) < float.fromhex(losses[0])
    return run


@pytest.mark.mpirun
def test_losses_below_mpirun_equal_those_of_accelerate_launch(name: str, own: Run, tmp_path: Path) -> None:
    ours = mpirun(name, tmp_path)
    assert (ours.places(), ours.losses()) == (own.places(), own.losses())


@pytest.mark.mpirun
def test_hydras_own_variables_lead_to_the_same_ranks(name: str, own: Run, tmp_path: Path) -> None:
    """PMI_RANK and PMI_SIZE are what accelerate looks for without a GPU."""
    ours = mpirun(name, tmp_path, mpi="mpich")
    assert (ours.places(), ours.losses()) == (own.places(), own.losses())


@pytest.mark.slurm
def test_losses_below_srun_equal_those_of_accelerate_launch(name: str, own: Run, runner: SlurmJobRunner) -> None:
    ours = srun(runner, name)
    assert (ours.places(), ours.losses()) == (own.places(), own.losses())


@pytest.mark.slurm
@pytest.mark.parametrize("channel", ["slurm", "pmi"])
def test_on_two_nodes_both_are_local_rank_0_with_the_same_losses(
    name: str, own: Run, runner: SlurmJobRunner, channel: str
) -> None:
    options = ("--mpi=pmi2",) if channel == "pmi" else ()
    ours = srun(runner, name, nodes=2, per_node=1, options=options)
    assert ours.places() == [(0, 0, 2), (1, 0, 2)]
    assert ours.losses() == own.losses()
