"""A training that may have to leave its nodes; tests read what it writes by tests/trained.py.

Each start writes ``samples.START.RANK``, a line for each step: its number and the indices of its
samples. Its end writes ``weights.RANK``: their SHA-256.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TextIO

import resumable
import torch
from torch import Tensor, nn

import srunddp
from srunddp.train import Callback, CheckpointConfig, DataLoaderConfig, Trainer

SAMPLES = 800


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
    dataloader: DataLoaderConfig = field(default_factory=lambda: DataLoaderConfig(num_workers=1))
    checkpoint: CheckpointConfig = field(default_factory=lambda: CheckpointConfig(keep_last=100))


class Journal(Callback):
    """Writes each step down, and makes it last."""

    def __init__(self, file: TextIO, pace: float) -> None:
        self._file = file
        self._pace = pace

    def on_step(self, trainer: Trainer, step: int, loss: Tensor | None) -> None:
        time.sleep(self._pace)
        assert isinstance(trainer.model, resumable.Network)
        print(step, *trainer.model.noted[-1], file=self._file, flush=True)


def main() -> None:
    settings = srunddp.read_config(Settings)
    torch.manual_seed(0)
    model = resumable.Network()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    loss = nn.CrossEntropyLoss()
    with srunddp.init() as world:
        file = opened(Path(settings.output_dir or "."), settings.start, world.rank)
        torch.manual_seed(world.rank)  # each drops other units
        callbacks = [Journal(file, settings.pace)]
        trainer = Trainer(model, optimizer, loss, settings, world=world, callbacks=callbacks)
        trainer.fit(resumable.Samples(SAMPLES))
        Path(file.name).with_name(f"weights.{world.rank}").write_text(
            resumable.digest(model.parameters())
        )


def opened(folder: Path, start: int, rank: int) -> TextIO:
    """For the samples of this start; who this is is written down too."""
    folder.mkdir(exist_ok=True)
    (folder / f"process.{start}.{rank}").write_text(str(os.getpid()))
    return (folder / f"samples.{start}.{rank}").open("w")


if __name__ == "__main__":
    main()
