"""FSDP2's sharded checkpoints are written by two ranks and read by three, under torchrun and under
srunddp.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.interop.conftest import Run, mpirun, shared, srun, torchrun
from tests.slurm.conftest import SlurmJobRunner

NAME = "fsdp2_checkpoint"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("checkpoint")


@pytest.fixture(scope="module")
def saved(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    return torchrun(NAME, tmp_path_factory.mktemp("saved"), f"--save={checkpoint}")


@pytest.fixture(scope="module")
def loaded(saved: Run, checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    run = torchrun(NAME, tmp_path_factory.mktemp("loaded"), f"--load={checkpoint}", ranks=3)
    assert {record["loaded"] for record in run.records} == {saved.records[0]["saved"]}
    return run


def loads(run: Run) -> list[str]:
    """Of each rank: the digest of all weights and moments that it has read."""
    return [record["loaded"] for record in run.records]


@pytest.mark.mpirun
def test_torchruns_checkpoint_resumes_below_mpirun_bit_for_bit(
    loaded: Run, checkpoint: Path, tmp_path: Path
) -> None:
    ours = mpirun(NAME, tmp_path, f"--load={checkpoint}", ranks=3)
    assert loads(ours) == loads(loaded)
    assert ours.losses() == loaded.losses()


@pytest.mark.slurm
def test_what_two_nodes_saved_goes_on_on_three_to_the_same_bits(
    saved: Run, loaded: Run, runner: SlurmJobRunner
) -> None:
    folder = shared(runner, "checkpoint")
    first = srun(runner, NAME, f"--save={folder}", nodes=2, per_node=1)
    assert {record["saved"] for record in first.records} == {saved.records[0]["saved"]}
    second = srun(runner, NAME, f"--load={folder}", nodes=3, per_node=1)
    assert loads(second) == loads(loaded)
    assert second.losses() == loaded.losses()
