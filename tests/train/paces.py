"""Where two ranks' time goes in steps in which one of them is slow; run as ``paces.py FOLDER``."""

from __future__ import annotations

import functools
import io
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from srunddp import telemetry
from srunddp.train import Callback, CheckpointConfig, DDPConfig, Trainer
from tests.train.forked import world_of
from tests.train.problems import settings, trainer_of
from tests.train.worlds import StandIn

STEPS, SLEEP = 12, 0.05


class Samples(Dataset[tuple[Tensor, Tensor]]):
    """Whose reading may take time."""

    def __init__(self, count: int, seconds: float) -> None:
        self._count, self._seconds = count, seconds

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        time.sleep(self._seconds)
        return torch.ones(8), torch.tensor(index % 2)


class Sleeps(Callback):
    """After each step. It also saves the model as a whole, which is not to hold anything of ours."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    def on_step(self, trainer: Trainer, step: int, loss: float | None) -> None:
        time.sleep(self._seconds)
        if trainer.config.parallel == "ddp":  # torch saves no model in shards so
            torch.save(trainer.model, io.BytesIO())


def of(world: StandIn, *, slow: int, where: str, buffers: bool = False, **changes: Any) -> dict[str, Any]:
    """The sums of a training in which one rank sleeps in each step, and its events."""
    page = telemetry.TelemetryPage(recording=True)
    telemetry.install(page)
    seconds = SLEEP if world.rank == slow else 0.0
    norm: list[nn.Module] = [nn.BatchNorm1d(8)] if buffers else []
    model = nn.Sequential(nn.Linear(8, 8), *norm, nn.Linear(8, 2))
    data = Samples(2 * STEPS * 4, seconds / 4 if where == "data" else 0.0)
    trainer = trainer_of(Sleeps(seconds if where == "callback" else 0.0), model=model, world=world, **changes)
    began = time.perf_counter()
    trainer.fit(data, Samples(8, 0.0))
    again = dict(zip(telemetry.Steps._fields, page.read_steps(), strict=True))
    whole = again | {"seconds": time.perf_counter() - began, "events": page.events(0)[0]}
    if where == "callback":
        trainer.config = settings(epochs=2, tensorboard=False)
        trainer.fit(data)
        whole["steps of two fits"] = page.read_steps().steps
    return whole


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    checkpoint = CheckpointConfig(every_steps=5)
    scenarios = {
        "data of 1": functools.partial(of, slow=1, where="data"),
        "work of 0": functools.partial(of, slow=0, where="callback"),
        "work of 0, buffers": functools.partial(of, slow=0, where="data", buffers=True),
        "work of 0, shards": functools.partial(
            of, slow=0, where="data", parallel="fsdp", ddp=DDPConfig(activation_checkpointing=("Linear",))
        ),
        "accumulation": functools.partial(of, slow=1, where="data", accumulation=3),
        "checkpoints": functools.partial(
            of, slow=1, where="", output_dir=str(folder / "training"), checkpoint=checkpoint
        ),
    }
    results = {name: world_of(2, folder / "world", scenario) for name, scenario in scenarios.items()}
    torch.save(results, folder / "results.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
