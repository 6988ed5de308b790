"""The same training on one rank and on several, and with a checkpoint between; run as ``exactness.py FOLDER``."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, IterableDataset

from srunddp.train import Callback, CheckpointConfig, Config, Trainer
from tests.train.forked import world_of
from tests.train.problems import settings
from tests.train.worlds import StandIn

SAMPLES = 50 * 64  # 50 steps an epoch
PART = 47  # samples of the epoch that is interrupted


class IndexedSamples(Dataset[tuple[Tensor, Tensor]]):
    """Samples whose first input is their index."""

    def __init__(self, samples: int, dtype: torch.dtype = torch.float64) -> None:
        generator = torch.Generator().manual_seed(1)
        self.inputs = torch.randn(samples, 8, generator=generator, dtype=dtype)
        self.targets = self.inputs[:, 1:5].argmax(dim=1)
        self.inputs[:, 0] = torch.arange(samples)

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.inputs[index], self.targets[index]


class NamedStream(IterableDataset[tuple[Tensor, Tensor]]):
    def __init__(self, samples: int) -> None:
        self.data = IndexedSamples(samples)

    def __iter__(self) -> Any:
        return (self.data[index] for index in range(len(self.data)))


class Noting(nn.Module):
    """A network that does not look at the samples' indices, but notes them."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(7, 16), nn.Tanh(), nn.Linear(16, 4)).to(dtype)
        self.noted: list[int] = []  # of the last batch

    def forward(self, inputs: Tensor) -> Tensor:
        if self.training:
            self.noted = [int(index) for index in inputs[:, 0]]
        output: Tensor = self.layers(inputs[:, 1:])
        return output


class Journal(Callback):
    """The samples of each step, and each step's loss one step late; stops after a step by an exception."""

    def __init__(self, stop: int | None = None) -> None:
        self.samples: dict[int, list[int]] = {}
        self.losses: list[float | None] = []
        self.stop = stop

    def on_step(self, trainer: Trainer, step: int, loss: float | None) -> None:
        self.losses.append(loss)
        self.samples[step] = trainer.model.noted
        if step == self.stop:
            raise KeyboardInterrupt


def train(world: StandIn, dtype: torch.dtype, config: Config, data: Any, stop: int | None = None) -> Any:
    model, journal = Noting(dtype), Journal(stop)
    # AdamW divides by the root of gradients' squares, so that one wrong by a factor would still look right.
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    trainer = Trainer(model, optimizer, nn.CrossEntropyLoss(), config, world=world, callbacks=[journal])
    try:
        records = trainer.fit(data)
    except KeyboardInterrupt:
        records = trainer.state.records
    return records, model.state_dict(), journal.losses, journal.samples


def equality(folder: Path) -> dict[Any, Any]:
    """By dtype and (ranks, batch size, accumulation): the record of 50 steps, the weights, the losses."""
    results = {}
    for dtype in (torch.float64, torch.float32):
        for ranks, batch_size, accumulation in [(1, 64, 1), (4, 16, 1), (1, 16, 4), (4, 4, 4)]:
            config = settings(batch_size=batch_size, accumulation=accumulation)
            args = (dtype, config, IndexedSamples(SAMPLES, dtype))
            by_rank = world_of(ranks, folder, train, *args) if ranks > 1 else [train(StandIn(), *args)]
            results[dtype, ranks, batch_size, accumulation] = by_rank
    return results


def resumed(folder: Path, kind: type[Any]) -> dict[int, Any]:
    """By the number of ranks that go on: the samples by step of four ranks, then those of these."""
    results = {}
    for ranks in (2, 6):
        config = Config(
            epochs=1,
            batch_size=2,
            output_dir=str(folder / f"{kind.__name__}{ranks}"),
            tensorboard=False,
            checkpoint=CheckpointConfig(every_steps=3),
        )
        before = world_of(4, folder, train, torch.float64, config, kind(PART), 4)
        again = Config(**{**vars(config), "resume": "auto"})
        after = world_of(ranks, folder, train, torch.float64, again, kind(PART))
        results[ranks] = ([samples for *_, samples in before], [samples for *_, samples in after])
    return results


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    results = {
        "equality": equality(folder),
        "resumed": resumed(folder, IndexedSamples),
        "streams": resumed(folder, NamedStream),
    }
    torch.save(results, folder / "results.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
