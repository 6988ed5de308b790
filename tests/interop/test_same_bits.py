"""Each program has the losses, and all else that it leaves, of a run under its own launcher to the bit."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.interop.conftest import Run, alone, mpirun, program, srun, torchrun
from tests.slurm.conftest import Bench

STARTS_ITS_RANKS = ("lightning_trainer", "lightning_fabric")
FOR_TORCHRUN = ("torchrun_style", "torchmetrics_ddp", "ignite_engine", "fsdp2_checkpoint")


@pytest.fixture(scope="module", params=STARTS_ITS_RANKS + FOR_TORCHRUN)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def own(name: str, tmp_path_factory: pytest.TempPathFactory) -> Run:
    out = tmp_path_factory.mktemp("own")
    run = alone([program(name)], out) if name in STARTS_ITS_RANKS else torchrun(name, out)
    assert run.places() == [(0, 0, 2), (1, 1, 2)]
    assert run.trained()
    return run


@pytest.mark.mpirun
def test_below_mpirun(own: Run, name: str, tmp_path: Path) -> None:
    assert mpirun(name, tmp_path).results() == own.results()


@pytest.mark.slurm
def test_below_srun_on_one_node(own: Run, name: str, bench: Bench) -> None:
    assert srun(bench, name).results() == own.results()


@pytest.mark.slurm
def test_losses_below_srun_on_two_nodes(own: Run, name: str, bench: Bench) -> None:
    layout = ("--devices=1", "--nodes=2") if name in STARTS_ITS_RANKS else ()
    ours = srun(bench, name, *layout, nodes=2, per_node=1)
    assert ours.places() == [(0, 0, 2), (1, 0, 2)]
    assert ours.losses() == own.losses()


@pytest.mark.mpirun
def test_a_module_below_mpirun(tmp_path: Path) -> None:
    module = "tests.interop.programs.torchrun_style"
    folders = tmp_path / "own", tmp_path / "ours"
    assert mpirun(module, folders[1]).results() == torchrun(module, folders[0]).results()
