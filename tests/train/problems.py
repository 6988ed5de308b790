"""Small models and data sets, the same on every rank and alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

from srunddp.errors import ConfigError
from srunddp.train import Callback, Config, DataLoaderConfig, Trainer
from srunddp.train.world import World
from tests.train.local_world import LocalWorld

BATCH_PER_RANK = 4


class Numbered(Dataset[tuple[Tensor, Tensor]]):
    """Sample i is 12 i, so that the mean over 2, 3 or 4 samples is a whole number. Notes what is
    read.
    """

    def __init__(self, length: int) -> None:
        self.length = length
        self.read: list[int] = []

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        self.read.append(index)
        return torch.tensor([12.0 * index]), torch.tensor([0.0])


class Scale(nn.Module):
    """Multiplies by one parameter, 1 at first; notes in which modes it was called."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.ones(()))
        self.modes: set[tuple[bool, bool]] = set()

    def forward(self, inputs: Tensor) -> Tensor:
        self.modes.add((self.training, torch.is_grad_enabled()))
        return inputs * self.factor


def distance(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs - targets).abs().mean()


def value_of_each(outputs: Tensor, targets: Tensor) -> Tensor:
    return outputs.squeeze(1)


def squares(outputs: Tensor, targets: Tensor) -> Tensor:
    return outputs.square().squeeze(1)


def settings(**changes: Any) -> Config:
    """One epoch of batches of 4, read in the rank itself."""
    usual: dict[str, Any] = {
        "epochs": 1,
        "batch_size": BATCH_PER_RANK,
        "dataloader": DataLoaderConfig(num_workers=0),
    }
    return Config(**usual | changes)


def trainer_of(
    *callbacks: Callback,
    model: nn.Module | None = None,
    loss_function: Any = None,
    optimizer: Any = None,
    scheduler: Any = None,
    world: World | None = None,
    **changes: Any,
) -> Trainer:
    """A trainer of :func:`classes`; by SGD with momentum, and alone, unless told otherwise."""
    torch.manual_seed(0)
    model = model or nn.Linear(8, 4)
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    config = settings(**({"tensorboard": False} | changes))
    world = world or LocalWorld()
    loss = loss_function or nn.CrossEntropyLoss()
    return Trainer(
        model, optimizer, loss, config, world=world, scheduler=scheduler, callbacks=callbacks
    )


def optimizer_of(trainer: Trainer) -> torch.optim.Optimizer:
    """The only one."""
    assert isinstance(trainer.optimizer, torch.optim.Optimizer)
    return trainer.optimizer


class OnStep(Callback):
    """Calls a function after each step."""

    def __init__(self, function: Callable[[Trainer, int], object]) -> None:
        self._function = function

    def on_step(self, trainer: Trainer, step: int, loss: Tensor | None) -> None:
        self._function(trainer, step)


class Stop(Callback):
    """Ends a training after a step."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step(self, trainer: Trainer, step: int, loss: Tensor | None) -> None:
        if step == self.step:
            raise KeyboardInterrupt


def message(action: Callable[[], object]) -> str:
    """The ConfigError that an action ends in."""
    try:
        action()
    except ConfigError as error:
        return str(error)
    return "no error"


def scale_trainer(world: World, **changes: Any) -> Trainer:
    """With a learning rate of 0 the figures of an epoch do not depend on the order of samples."""
    model = Scale()
    metrics = {"value": value_of_each, "squares": squares}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    return Trainer(model, optimizer, distance, settings(**changes), world=world, metrics=metrics)


def exact_figures(samples: int) -> dict[str, float]:
    values = [12.0 * index for index in range(samples)]
    mean = sum(values) / samples
    return {"loss": mean, "value": mean, "squares": sum(value**2 for value in values) / samples}


def classes(samples: int, dtype: torch.dtype = torch.float32) -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(samples, 8, generator=generator, dtype=dtype)
    return TensorDataset(inputs, inputs[:, :4].argmax(dim=1))


def same(ours: dict[str, Any], theirs: dict[str, Any]) -> bool:
    """Whether these are the same tensors, by name and to the bit."""
    return ours.keys() == theirs.keys() and all(
        torch.equal(ours[name], theirs[name]) for name in ours
    )


def normalised_network() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 4))


def counting(calls: Counter[str], name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, whose calls are counted by a name."""

    def call(*args: Any, **kwargs: Any) -> Any:
        calls[name] += 1
        return function(*args, **kwargs)

    return call
