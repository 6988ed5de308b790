"""A training that writes down which samples each step learned from, to be interrupted and resumed.

    resumable.py FOLDER [--key=value ...]

FOLDER gets ``pid<RANK>``; ``ids<RANK>``, a line per step, of which the last for a step counts;
``tested<RANK>``, a byte per test batch; and at the end ``result<RANK>.json``.
"""

import hashlib
import json
import os
import random
import sys
from collections import deque
from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

import srunddp
from srunddp.train import Callback, Config, Trainer, World, accuracy, read_config

FEATURES = 32
CLASSES = 8
WIDTH = 512
# 11 full steps of three ranks, and one of 36 samples; 17 of two, and one of 20: none leaves a rank
# one sample alone, which BatchNorm does not take.
SAMPLES = 564
TESTS = 150
SETTINGS = (
    "--epochs=12",
    "--batch_size=8",
    "--gradient_accumulation_steps=2",
    "--max_grad_norm=1.0",
    "--schedule=cosine",
    "--warmup_steps=4",
    "--evaluate_every_steps=7",
    "--checkpoint.every_steps=3",
    "--ddp.bucket_cap_mb=1",
    "--dataloader.num_workers=2",
    "--dataloader.multiprocessing_context=fork",
    "--num_threads=1",
    "--log_every=5",
    "--tensorboard=false",
    "--preemption.lead_seconds=0",
    "--resume=auto",
)


class Samples(Dataset[tuple[Tensor, Tensor]]):
    """Inputs are a sample's number and its features, under noise that each reading draws anew."""

    def __init__(self, samples: int) -> None:
        self.features = torch.randn(samples, FEATURES, generator=torch.Generator().manual_seed(1))
        self.targets = self.features[:, :CLASSES].argmax(dim=1)

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        noise = (
            torch.randn(FEATURES) * random.random()
            + torch.from_numpy(numpy.random.rand(FEATURES)).float()
        )
        return torch.cat(
            [torch.tensor([float(index)]), self.features[index] + 0.1 * noise]
        ), self.targets[index]


class Network(nn.Module):
    """Has 2.3 MB of gradients, so three of DistributedDataParallel's buckets of 1 MB; notes its
    last two batches.

    Args:
        tested: a file descriptor that gets a byte per test batch.
    """

    def __init__(self, tested: int = -1) -> None:
        super().__init__()
        sizes = [FEATURES, WIDTH, WIDTH, WIDTH]
        self.layers = nn.Sequential(
            *(self._layer(*pair) for pair in pairwise(sizes)), nn.Linear(WIDTH, CLASSES)
        )
        self.noted: deque[list[int]] = deque(maxlen=2)
        self._tested = tested

    @staticmethod
    def _layer(inputs: int, outputs: int) -> nn.Module:
        return nn.Sequential(
            nn.Linear(inputs, outputs), nn.BatchNorm1d(outputs), nn.ReLU(), nn.Dropout(0.2)
        )

    def forward(self, inputs: Tensor) -> Tensor:
        if self.training:
            self.noted.append([int(number) for number in inputs[:, 0]])
        else:
            os.write(self._tested, b".")
        outputs: Tensor = self.layers(inputs[:, 1:])
        return outputs


class Journal(Callback):
    """Each step's samples, on the disk as far as a killed process is concerned."""

    def __init__(self, file: int) -> None:
        self._file = file

    def on_step(self, trainer: Trainer, step: int, loss: Tensor | None) -> None:
        assert isinstance(trainer.model, Network)
        os.write(self._file, f"{step} {json.dumps(list(trainer.model.noted))}\n".encode())


def train(world: World, folder: Path, *arguments: str) -> None:
    """Go on with the training in this folder, to its end."""
    config = read_config(Config, [*SETTINGS, f"--output_dir={folder}", *arguments])
    ids, tested = (open_to_append(folder / f"{name}{world.rank}") for name in ("ids", "tested"))
    for seed in (random.seed, numpy.random.seed, torch.manual_seed):
        seed(world.rank)
    model = Network(tested)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.003)
    trainer = Trainer(
        model,
        optimizer,
        nn.CrossEntropyLoss(),
        config,
        world=world,
        metrics={"accuracy": accuracy},
        callbacks=[Journal(ids)],
    )
    (folder / f"pid{world.rank}").write_text(str(os.getpid()))
    trainer.fit(Samples(SAMPLES), Samples(TESTS))
    (folder / f"result{world.rank}.json").write_text(json.dumps(result(trainer)))


def open_to_append(path: Path) -> int:
    return os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)


def result(trainer: Trainer) -> dict[str, Any]:
    """What must not depend on whether the training was interrupted."""
    state = trainer.state
    assert isinstance(trainer.optimizer, torch.optim.Optimizer)
    moments = [
        values[name] for values in trainer.optimizer.state.values() for name in sorted(values)
    ]
    return {
        "weights": digest(trainer.model.state_dict().values()),
        "average": trainer.averaged and digest(trainer.averaged.state_dict().values()),
        "optimizer": digest(moments),
        "records": [(record.epoch, record.train, record.val) for record in state.records],
        "best": [
            state.step,
            state.evaluated,
            state.best,
            state.evals_since_best,
            sorted(state.scores.items()),
        ],
    }


def digest(tensors: Iterable[Tensor]) -> str:
    """SHA-256 of the bytes."""
    whole = hashlib.sha256()
    for tensor in tensors:
        whole.update(tensor.detach().contiguous().numpy().tobytes())
    return whole.hexdigest()


if __name__ == "__main__":
    with srunddp.init() as here:
        train(here, Path(sys.argv[1]), *sys.argv[2:])
