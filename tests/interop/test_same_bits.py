"""Each program has the losses, and all else that it leaves, of a run under its own launcher to the
bit.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.interop.conftest import FOR_ACCELERATE, STARTS_ITS_RANKS, Run, mpirun, srun
from tests.slurm.conftest import SlurmJobRunner

MODULE = "tests.interop.programs.torchrun_style"  # started by -m
FOR_TORCHRUN = (
    MODULE,
    "torchmetrics_ddp",
    "ignite_engine",
    "fsdp2_checkpoint",
    "dcp_async",
    "tensor_parallel",
    "pipelining",
    "torch_rpc",
    "torchft_manager",
    "timm_model",
    "mmengine_runner",
    "mosaic_streaming",
    "sentence_trainer",
    "pyg_graphs",
    "monai_training",
    "metric_learning",
)
pytestmark = pytest.mark.parametrize("name", STARTS_ITS_RANKS + FOR_ACCELERATE + FOR_TORCHRUN)

Own = Callable[[str], Run]


@pytest.mark.mpirun
def test_below_mpirun(own: Own, name: str, tmp_path: Path) -> None:
    ours = mpirun(name, tmp_path)
    assert ours.results() == own(name).results()
    assert starts_no_ranks(ours)


@pytest.mark.slurm
def test_below_srun_on_one_node(own: Own, name: str, runner: SlurmJobRunner) -> None:
    ours = srun(runner, name)
    assert ours.results() == own(name).results()
    assert starts_no_ranks(ours)


@pytest.mark.slurm
def test_losses_below_srun_on_two_nodes(own: Own, name: str, runner: SlurmJobRunner) -> None:
    if name in STARTS_ITS_RANKS:
        layout: tuple[str, ...] = ("--devices=1", "--nodes=2")
    else:
        layout = ()
    ours = srun(runner, name, *layout, nodes=2, per_node=1)
    assert ours.places() == [(0, 0, 2), (1, 0, 2)]
    assert ours.losses() == own(name).losses()
    assert starts_no_ranks(ours)


def starts_no_ranks(run: Run) -> bool:
    """Lightning could; it is to take those that are there, with the environment that it has for
    torchrun's.
    """
    taken = {"environment": "TorchElasticEnvironment", "started": 0}
    return all(record.get("launch", taken) == taken for record in run.records)
