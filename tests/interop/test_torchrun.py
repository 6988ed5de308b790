"""A script written for torchrun trains to the same bits under srunddp."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.interop.conftest import Run, mpirun, srun, torchrun
from tests.slurm.conftest import Bench

NAME = "torchrun_style"


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Run:
    run = torchrun(NAME, tmp_path_factory.mktemp("own"))
    assert run.places() == [(0, 0, 2), (1, 1, 2)]
    assert len(run.losses()[0]) == 20
    assert float.fromhex(run.losses()[0][-1]) < float.fromhex(run.losses()[0][0])
    return run


@pytest.mark.mpirun
def test_losses_below_mpirun_are_those_of_torchrun_to_the_bit(own: Run, tmp_path: Path) -> None:
    ours = mpirun(NAME, tmp_path)
    assert (ours.places(), ours.losses()) == (own.places(), own.losses())


@pytest.mark.slurm
def test_losses_below_srun_on_one_node_are_those_of_torchrun_to_the_bit(own: Run, bench: Bench) -> None:
    ours = srun(bench, NAME)
    assert (ours.places(), ours.losses()) == (own.places(), own.losses())


@pytest.mark.slurm
def test_losses_below_srun_on_two_nodes_are_those_of_torchrun_to_the_bit(own: Run, bench: Bench) -> None:
    ours = srun(bench, NAME, nodes=2, per_node=1)
    assert ours.places() == [(0, 0, 2), (1, 0, 2)]
    assert ours.losses() == own.losses()
