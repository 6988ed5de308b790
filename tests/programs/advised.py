"""A training with a trouble that a note of `srunddp report` names: ``advised.py TROUBLE SETTINGS``.

The settings are those of Trainer, so that a note's hint can be followed on the command line.
"""

import sys
import time
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils.data import Dataset, TensorDataset

import srunddp
from srunddp.train import Callback

FEATURES = 16
# Seconds that a sample takes to be read or computed, and that a step of rank 0 takes more.
SAMPLE_S = 0.002
CALLBACK_S = 0.05


@dataclass(frozen=True, kw_only=True)
class Settings(srunddp.Config):
    """The loop's settings, and the program's own.

    Attributes:
        lr: The learning rate.
        rows: How many samples there are.
        width: The width of the hidden layer.
        writes: Whether rank 0 spends time in a callback after each step.
    """

    lr: float = 0.01
    rows: int = 2048
    width: int = 16
    writes: bool = False


class Rows(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Samples that take as long as those of a file, or of an augmentation."""

    def __init__(self, rows: int, *, compute: bool) -> None:
        self._rows = rows
        self._compute = compute

    def __len__(self) -> int:
        return self._rows

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        if self._compute:
            began = time.thread_time()
            while time.thread_time() - began < SAMPLE_S:
                sum(range(1000))
        else:
            time.sleep(SAMPLE_S)
        row = torch.full((FEATURES,), float(index % 7))
        return row, row[:1]


class Writes(Callback):
    """Has this rank do something of its own after each step."""

    def on_step(self, trainer: srunddp.Trainer, step: int, loss: torch.Tensor | None) -> None:
        time.sleep(CALLBACK_S)


def data_of(trouble: str, rows: int) -> Dataset[Any]:
    if trouble == "storage":
        return Rows(rows, compute=False)
    if trouble == "computed":
        return Rows(rows, compute=True)
    inputs = torch.rand(rows, FEATURES)
    return TensorDataset(inputs, inputs[:, :1])


def main() -> None:
    trouble = sys.argv[1]
    settings = srunddp.read_config(Settings, sys.argv[2:])
    torch.manual_seed(0)
    with srunddp.init() as world:
        model = nn.Sequential(
            nn.Linear(FEATURES, settings.width), nn.ReLU(), nn.Linear(settings.width, 1)
        )
        optimizer = torch.optim.SGD(model.parameters(), lr=settings.lr)
        callbacks = [Writes()] if settings.writes and world.rank == 0 else []
        trainer = srunddp.Trainer(
            model, optimizer, nn.MSELoss(), settings, world=world, callbacks=callbacks
        )
        trainer.fit(data_of(trouble, settings.rows))


if __name__ == "__main__":
    main()
