"""Below mpirun a script that imports mpi4py at its top may start processes, as it may without
MPI.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.conftest import PROGRAMS, ROOT
from tests.mpirun.conftest import Mpi, there
from tests.slurm.conftest import SRUNDDP

CHILDREN = str(PROGRAMS / "children.py")
METHODS = ["fork", "spawn", "forkserver"]
pytestmark = pytest.mark.mpirun


@pytest.mark.parametrize("method", METHODS)
def test_processes_of_each_start_method_work_beside_mpi(mpi: Mpi, method: str) -> None:
    """Plain Python's end in MPI_Init or hang, if they are not forked."""
    alone = mpi.run(1, mpi.python, CHILDREN, "fork")
    done = mpi.run(2, SRUNDDP, "--quiet", "--channel", "mpi", CHILDREN, method)
    assert (alone.code, done.code) == (0, 0), done.errors
    expected = alone.output.splitlines()
    assert "Pool [0, 1, 4, 9]" in expected
    assert sorted(done.output.splitlines()) == sorted(expected * 2)


TRAIN = """
import sys
import torch
from mpi4py import MPI
from torch.utils.data import Dataset
import srunddp

comm = MPI.COMM_WORLD

class Numbers(Dataset):
    def __len__(self):
        return 16
    def __getitem__(self, index):
        return torch.randn(4), torch.randn(1)

if __name__ == "__main__":
    config = srunddp.read_config(srunddp.Config)
    with srunddp.init("gloo") as world:
        model = torch.nn.Linear(4, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        trainer = srunddp.Trainer(model, optimizer, torch.nn.MSELoss(), config, world=world)
        trainer.fit(Numbers())
    print(f"rank {comm.Get_rank()} has trained")
"""


@pytest.mark.parametrize("top", ["", "size = comm.Get_size()\n"], ids=["imports", "uses"])
@pytest.mark.parametrize("supervised", [True, False])
def test_loader_workers_start_where_the_script_imports_mpi_at_its_top(
    top: str, supervised: bool, tmp_path: Path
) -> None:
    script = tmp_path / "train.py"
    script.write_text(TRAIN.replace("class Numbers", f"{top}class Numbers"))
    open_mpi = there("openmpi5")
    start = [SRUNDDP, "--quiet"] if supervised else [open_mpi.python]
    settings = ("--epochs=1", "--batch_size=4", "--dataloader.num_workers=2")
    done = open_mpi.run(2, *start, str(script), *settings, env={"PYTHONPATH": str(ROOT)})
    assert done.code == 0, done.errors
    assert {"rank 0 has trained", "rank 1 has trained"} <= {*done.output.splitlines()}
