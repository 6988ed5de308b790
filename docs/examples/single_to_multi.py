r"""The same file on one process, on one node, and on many nodes, with its scaling efficiency.

One rank first, whose samples per second ``--baseline`` keeps; then as many as there are:

    srun --ntasks=1 --cpus-per-task=8 srunddp docs/examples/single_to_multi.py --baseline=one.json
    srun --nodes=1 --ntasks-per-node=4 --cpus-per-task=8 \
      srunddp docs/examples/single_to_multi.py --baseline=one.json
    srun --nodes=2 --ntasks-per-node=4 --cpus-per-task=8 \
      srunddp docs/examples/single_to_multi.py --baseline=one.json

    python docs/examples/single_to_multi.py --baseline=one.json --num_threads=1
    mpirun -n 2 srunddp docs/examples/single_to_multi.py --baseline=one.json --num_threads=1

The efficiency of N ranks is their samples per second by N times those of the one rank, each over
all epochs of a run but its first, which has the warming up. Each rank keeps its ``--batch_size``,
so that a step has N times as many samples (weak scaling); ``--scale_lr=linear`` lets the learning
rate follow. Where the one rank had other settings, another device or another number of threads
there is no efficiency, but a message. The data are scikit-learn's digits.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from statistics import harmonic_mean
from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset

import srunddp
from srunddp.errors import ConfigError
from srunddp.train import EpochRecord, accuracy


@dataclass(frozen=True, kw_only=True)
class Settings(srunddp.Config):
    """The loop's settings, and the example's own.

    Attributes:
        baseline: a file that one rank writes, and that more ranks compare themselves with.
        channels: of the convolutions: the work for each sample.
        copies: of the digits in an epoch: the more ranks, the more are needed for an epoch of many
            steps.
        lr: Adam's learning rate.
    """

    baseline: Path | None = None
    channels: int = 64
    copies: int = 4
    lr: float = 2e-3
    epochs: int = 5
    batch_size: int = 64


class Throughput(srunddp.Callback):
    """How fast all ranks together are, without the first epoch of this run."""

    def __init__(self) -> None:
        self.speeds: list[float] = []

    def on_epoch(self, trainer: srunddp.Trainer, record: EpochRecord) -> None:
        self.speeds.append(record.samples_per_second)

    def samples_per_second(self) -> float:
        if len(self.speeds) < 2:
            found = f"{len(self.speeds)} epochs in this run"
            raise ConfigError(
                found,
                expected="2 at least, as the first is left out",
                hint="add --epochs=5, or more",
            )
        # All samples by all the time, as epochs are equally long.
        return harmonic_mean(self.speeds[1:])


def main() -> None:
    settings = srunddp.read_config(Settings)
    if min(settings.channels, settings.copies) < 1:
        found = f"channels={settings.channels}, copies={settings.copies}"
        raise ConfigError(found, expected="1 or more of both", hint="correct it")
    torch.manual_seed(0)
    with srunddp.init() as world:
        compares = world.rank == 0 and world.world_size > 1 and settings.baseline is not None
        one = read_baseline(settings.baseline) if compares else None
        model = network(settings.channels)
        throughput = Throughput()
        optimizer = torch.optim.Adam(model.parameters(), lr=settings.lr)
        parts = (model, optimizer, nn.CrossEntropyLoss(), settings)
        trainer = srunddp.Trainer(
            *parts, world=world, metrics={"accuracy": accuracy}, callbacks=[throughput]
        )
        history = trainer.fit(*read(settings.copies))
    if world.rank == 0:
        speed = throughput.samples_per_second()
        print(
            f"world_size {world.world_size}, nnodes {world.nnodes}: {speed:.1f} samples/s",
            flush=True,
        )
        here = {"samples_per_second": speed, **conditions(settings, world)}
        if one:
            print(f"scaling efficiency {100 * efficiency(here, one, world.world_size):.1f} %")
        elif settings.baseline:
            write_baseline(settings.baseline, here)
        print(f"val accuracy {100 * history[-1].val['accuracy']:.2f} %", flush=True)


def conditions(settings: Settings, world: srunddp.World) -> dict[str, Any]:
    """What has to be equal for two runs' speeds to be compared; the number of threads is known
    after the training.
    """
    device = torch.cuda.get_device_name(world.device) if world.device.type == "cuda" else "cpu"
    names = ("batch_size", "gradient_accumulation_steps", "precision", "channels", "copies")
    return {
        "device": device,
        "threads": torch.get_num_threads(),
        **{name: getattr(settings, name) for name in names},
    }


def write_baseline(path: Path, here: dict[str, Any]) -> None:
    try:
        path.write_text(json.dumps(here) + "\n")
    except OSError as error:
        raise ConfigError(
            f"{path}: {error.strerror}", expected="a file to write", hint="correct --baseline"
        ) from None


def read_baseline(path: Path) -> dict[str, Any]:
    try:
        return dict(json.loads(path.read_text()))
    except (OSError, ValueError, TypeError) as error:
        found = f"{path}: {getattr(error, 'strerror', 'no JSON object')}"
        expected = "the file that one rank has written"
        hint = "start one rank first, with the same --baseline"
        raise ConfigError(found, expected=expected, hint=hint) from None


def efficiency(here: dict[str, Any], one: dict[str, Any], ranks: int) -> float:
    """Samples per second of these ranks, by that many times those of one rank."""
    for name in here:
        if name != "samples_per_second" and one.get(name) != here[name]:
            found = f"one rank with {name} {one.get(name)}"
            hint = "start one rank again so; threads: --num_threads"
            raise ConfigError(found, expected=f"{here[name]}, as here", hint=hint)
    return float(here["samples_per_second"] / (ranks * one["samples_per_second"]))


def network(channels: int) -> nn.Module:
    """Images of shape (samples, 1, 8, 8) in, ten scores per sample out."""
    return nn.Sequential(
        nn.Conv2d(1, channels, kernel_size=3, padding=1),
        nn.ReLU(),
        nn.Conv2d(channels, channels, kernel_size=3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(channels * 4 * 4, 10),
    )


def read(copies: int) -> tuple[TensorDataset, TensorDataset]:
    """To train and to test with: images of shape (1, 8, 8) from 0 to 1, and their classes."""
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    digits = load_digits()
    train, test = train_test_split(
        range(len(digits.target)), test_size=0.2, random_state=0, stratify=digits.target
    )
    images = torch.tensor(digits.images / 16, dtype=torch.float32).unsqueeze(1)
    classes = torch.tensor(digits.target)
    repeated = TensorDataset(images[train].repeat(copies, 1, 1, 1), classes[train].repeat(copies))
    return repeated, TensorDataset(images[test], classes[test])


if __name__ == "__main__":
    main()
