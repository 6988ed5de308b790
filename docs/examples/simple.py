r"""The smallest whole training: 10 figures in, 50 hidden units, 2 classes out, on as many nodes as
there are.

Start it on six nodes with a GPU each, on the same nodes without GPUs, under MPI, or alone:

    srun --nodes=6 --ntasks-per-node=1 --gpus-per-node=1 --gpu-bind=none \
      srunddp --backend=nccl docs/examples/simple.py
    srun --nodes=6 --ntasks-per-node=1 srunddp --backend=gloo docs/examples/simple.py
    mpirun -n 2 srunddp docs/examples/simple.py
    python docs/examples/simple.py

Without ``--backend`` it is NCCL where there are GPUs, and Gloo elsewhere. Where the nodes'
interfaces have different names, each node finds its own; ``etc/ifaces.conf``, or the file that
``--ifaces`` names, says so where it finds the wrong one. The data are the ten means that
scikit-learn's breast cancer data have of each of 569 cell samples.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from torch.utils.data import TensorDataset

import srunddp
from srunddp.train import accuracy


@dataclass(frozen=True, kw_only=True)
class Settings(srunddp.Config):
    """The loop's settings, and the example's own.

    Attributes:
        lr: Adam's learning rate.
    """

    lr: float = 0.01
    epochs: int = 20
    batch_size: int = 16


def main() -> None:
    settings = srunddp.read_config(Settings)
    torch.manual_seed(0)
    with srunddp.init() as world:
        model = nn.Sequential(nn.Linear(10, 50), nn.ReLU(), nn.Linear(50, 2))
        optimizer = torch.optim.Adam(model.parameters(), lr=settings.lr)
        loss = nn.CrossEntropyLoss()
        trainer = srunddp.Trainer(
            model, optimizer, loss, settings, world=world, metrics={"accuracy": accuracy}
        )
        history = trainer.fit(*read())
    if world.rank == 0:
        figures = history[-1].val
        print(
            f"val loss {figures['loss']:.4f}, val accuracy {100 * figures['accuracy']:.2f} %",
            flush=True,
        )


def read() -> tuple[TensorDataset, TensorDataset]:
    """To train and to validate with: 10 figures of mean 0 and deviation 1 per sample, and its
    class.
    """
    from sklearn.datasets import load_breast_cancer
    from sklearn.model_selection import train_test_split

    cells = load_breast_cancer()
    train, val = train_test_split(
        range(len(cells.target)), test_size=0.2, random_state=0, stratify=cells.target
    )
    figures = torch.tensor(cells.data[:, :10], dtype=torch.float32)
    classes = torch.tensor(cells.target)
    figures = (figures - figures[train].mean(dim=0)) / figures[train].std(dim=0)
    return TensorDataset(figures[train], classes[train]), TensorDataset(figures[val], classes[val])


if __name__ == "__main__":
    main()
