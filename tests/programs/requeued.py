"""A training that may have to leave its nodes; tests read what it writes by tests/trained.py.

Each start writes ``samples.START.RANK``, a line for each step: its number and the indices of its samples. Its end
writes ``weights.RANK``: their SHA-256.
"""

from __future__ import annotations

import hashlib
import os
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TextIO

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

import srunddp
from srunddp.train import Callback, CheckpointConfig, LoadingConfig, Trainer

SAMPLES, FEATURES, CLASSES = 800, 16, 4


@dataclass(frozen=True, kw_only=True)
class Settings(srunddp.Config):
    """The loop's settings, and the program's own.

    Attributes:
        start: how often it was started before.
        pace: seconds that a step takes at least.
    """

    start: int = 0
    pace: float = 0.0
    epochs: int = 3
    batch_size: int = 4
    tensorboard: bool = False
    loading: LoadingConfig = field(default_factory=lambda: LoadingConfig(num_workers=1))
    checkpoint: CheckpointConfig = field(default_factory=lambda: CheckpointConfig(keep_last=100))


class Noisy(Dataset[tuple[Tensor, Tensor]]):
    """Samples whose first input is their index, and that are never read twice as the same."""

    def __init__(self) -> None:
        self.inputs = torch.randn(SAMPLES, FEATURES, generator=torch.Generator().manual_seed(1))
        self.targets = self.inputs[:, :CLASSES].argmax(dim=1)

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        noisy = self.inputs[index] + 0.1 * torch.randn(FEATURES)
        return torch.cat([torch.tensor([float(index)]), noisy]), self.targets[index]


class Network(nn.Module):
    """Does not look at the samples' indices, but notes them."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(FEATURES, 32), nn.ReLU(), nn.Dropout(0.5), nn.Linear(32, CLASSES))
        self.noted: list[int] = []

    def forward(self, inputs: Tensor) -> Tensor:
        self.noted = [int(index) for index in inputs[:, 0]]
        scores: Tensor = self.layers(inputs[:, 1:])
        return scores


class Journal(Callback):
    """Writes each step down, and makes it last."""

    def __init__(self, file: TextIO, pace: float) -> None:
        self._file, self._pace = file, pace

    def on_step(self, trainer: Trainer, step: int, loss: float | None) -> None:
        time.sleep(self._pace)
        print(step, *trainer.model.noted, file=self._file, flush=True)


def main() -> None:
    settings = srunddp.read_config(Settings)
    torch.manual_seed(0)
    model = Network()
    optimizer, loss = torch.optim.Adam(model.parameters(), lr=1e-3), nn.CrossEntropyLoss()
    with srunddp.init() as world:
        file = opened(Path(settings.output_dir or "."), settings.start, world.rank)
        torch.manual_seed(world.rank)  # each drops other units
        journal = Journal(file, settings.pace)
        srunddp.Trainer(model, optimizer, loss, settings, world=world, callbacks=[journal]).fit(Noisy())
        Path(file.name).with_name(f"weights.{world.rank}").write_text(digest(model))


def opened(folder: Path, start: int, rank: int) -> TextIO:
    """For the samples of this start; who this is is written down too."""
    folder.mkdir(exist_ok=True)
    (folder / f"process.{start}.{rank}").write_text(str(os.getpid()))
    return (folder / f"samples.{start}.{rank}").open("w")


def digest(model: nn.Module) -> str:
    weights = hashlib.sha256()
    for name, value in model.state_dict().items():
        weights.update(name.encode() + value.numpy().tobytes())
    return weights.hexdigest()


if __name__ == "__main__":
    main()
