r"""Weights & Biases as a callback of Trainer: one run, written by rank 0, which goes on when
training is resumed.

Start it on a cluster, under MPI, or alone; ``WANDB_MODE=offline`` needs no server:

    srun --ntasks-per-node=4 \
      srunddp docs/examples/wandb_callback.py --output-dir=runs/wandb --resume=auto
    mpirun -n 2 srunddp docs/examples/wandb_callback.py
    python docs/examples/wandb_callback.py

The data are scikit-learn's handwritten digits. It needs ``pip install wandb``.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import TensorDataset

import srunddp
from srunddp.train import EpochRecord, accuracy


class WandbCallback(srunddp.Callback):
    def __init__(self, **arguments: Any) -> None:
        """Arguments of ``wandb.init()``, such as project and name."""
        self.arguments = arguments
        self.run = None

    def on_fit_start(self, trainer: srunddp.Trainer) -> None:
        if trainer.world.rank == 0:
            import wandb  # only on rank 0

            self.run = wandb.init(config=asdict(trainer.config), resume="allow", **self.arguments)
            self.arguments["id"] = self.run.id

    def on_evaluation(self, trainer: srunddp.Trainer, figures: Mapping[str, float]) -> None:
        if self.run:
            self.run.log(
                {f"val/{name}": value for name, value in figures.items()}, step=trainer.state.step
            )

    def on_epoch(self, trainer: srunddp.Trainer, record: EpochRecord) -> None:
        if self.run:
            self.run.log(
                {f"train/{name}": value for name, value in record.train.items()},
                step=trainer.state.step,
            )

    def on_fit_end(self, trainer: srunddp.Trainer) -> None:
        if self.run:
            self.run.finish()

    def state_dict(self) -> dict[str, Any]:
        return {"id": self.arguments.get("id")}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.arguments |= state


@dataclass(frozen=True, kw_only=True)
class Settings(srunddp.Config):
    epochs: int = 5
    batch_size: int = 16


def main() -> None:
    settings = srunddp.read_config(Settings)
    digits = load_digits()
    torch.manual_seed(0)
    images = torch.tensor(digits.data / 16, dtype=torch.float32)
    classes = torch.tensor(digits.target)
    train, val = (
        TensorDataset(images[part], classes[part]) for part in (slice(1400), slice(1400, None))
    )
    with srunddp.init() as world:
        model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
        trainer = srunddp.Trainer(
            model,
            torch.optim.Adam(model.parameters(), lr=0.003),
            nn.CrossEntropyLoss(),
            settings,
            world=world,
            metrics={"accuracy": accuracy},
            callbacks=[WandbCallback(project="digits")],
        )
        figures = trainer.fit(train, val)[-1].val
    if world.rank == 0:
        print(f"val accuracy {100 * figures['accuracy']:.2f} %", flush=True)


if __name__ == "__main__":
    main()
