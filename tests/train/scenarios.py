"""What three ranks do in one start; each scenario's result goes to ``rank<N>.pt`` for the tests to judge."""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from srunddp.train import Trainer, accuracy
from tests.train.figures_scenarios import FIGURES
from tests.train.problems import (
    Numbered,
    classes,
    message,
    normalised_network,
    scale_trainer,
    settings,
    trainer_of,
)
from tests.train.worlds import StandIn, joined


def uneven(world: StandIn, folder: Path) -> Any:
    """10 samples on 3 ranks, and fewer samples than ranks; by (samples, batch size)."""
    figures = {}
    for samples, batch_size in [(10, 1), (10, 2), (10, 3), (10, 4), (10, 64), (2, 4), (1, 4)]:
        data = Numbered(samples)
        (record,) = scale_trainer(world, batch_size=batch_size).fit(data, data)
        figures[samples, batch_size] = (record.train, record.test)
    return figures


def orders(world: StandIn, folder: Path) -> Any:
    """The samples this rank reads in each of three epochs of training, then in a test of them."""
    read = []
    trainer = scale_trainer(world)
    for epochs in (1, 2, 3):
        data, test_data = Numbered(30), Numbered(10)
        trainer.config = settings(epochs=epochs)
        trainer.fit(data, test_data)
        read.append(data.read)
    continued = Numbered(30)
    scale_trainer(world, epochs=3).fit(continued)
    return read, continued.read, test_data.read


def normalised(world: StandIn, folder: Path) -> Any:
    """BatchNorm and a flag among the buffers."""
    torch.manual_seed(world.rank)
    model = normalised_network()
    model.register_buffer("flag", torch.tensor([world.rank == 0]))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    config = settings(epochs=2, output_dir=str(folder / "normalised"), tensorboard=False)
    metrics = {"accuracy": accuracy}
    trainer = Trainer(model, optimizer, nn.CrossEntropyLoss(), config, world=world, metrics=metrics)
    history = trainer.fit(classes(58), classes(20))
    return model.state_dict(), history


def averaged(world: StandIn, folder: Path) -> Any:
    """The averaged model on each rank, with BatchNorm's statistics, and its figures."""
    torch.manual_seed(world.rank)
    model = normalised_network()
    trainer = trainer_of(model=model, world=world, epochs=2, ema_decay=0.8)
    records = trainer.fit(classes(58), classes(20))
    assert trainer.averaged is not None
    return trainer.averaged.state_dict(), model.state_dict(), records[-1].test["loss"]


def waits(world: StandIn, folder: Path) -> Any:
    """How often Python reads a value back from the device and calls an all-reduce; of 5 batches, of 20."""
    counts = []
    for batch_size in (4, 1):
        with counted() as calls:
            scale_trainer(world, epochs=2, batch_size=batch_size).fit(Numbered(60), Numbered(60))
        counts.append(dict(calls))
    return counts


@contextmanager
def counted() -> Iterator[Counter[str]]:
    calls: Counter[str] = Counter()
    places = [(torch.Tensor, name) for name in ("item", "tolist", "__float__", "__int__", "__bool__", "numpy")]
    saved = [(place, name, getattr(place, name)) for place, name in [*places, (dist, "all_reduce")]]
    for place, name, function in saved:
        setattr(place, name, counting(calls, name, function))
    try:
        yield calls
    finally:
        for place, name, function in saved:
            setattr(place, name, function)


def counting(calls: Counter[str], name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        calls[name] += 1
        return function(*args, **kwargs)

    return call


def modes(world: StandIn, folder: Path) -> Any:
    """(training, gradients on) of the model in training, then with a test, then in training again."""
    trainer = scale_trainer(world)
    seen = []
    for epochs, test_data in enumerate((None, Numbered(6), None), start=1):
        trainer.model.modes.clear()
        trainer.config = settings(epochs=epochs, batch_size=2)
        trainer.fit(Numbered(6), test_data)
        seen.append(set(trainer.model.modes))
    return seen


def disagreements(world: StandIn, folder: Path) -> Any:
    """Each rank's message where ranks were given different things."""
    first = world.rank == 0
    cases: list[tuple[Any, ...]] = [
        (Numbered(10 + world.rank), None, {}),
        (Numbered(10), Numbered(4) if first else None, {}),
        (Numbered(10), None, {"batch_size": 2 if first else 5}),
        (Numbered(10), None, {"epochs": 2 if first else 1}),
        (Numbered(10), None, {"best_mode": "min" if first else "max"}),
        (Numbered(0), None, {}),
    ]
    return [message(lambda case=case: scale_trainer(world, **case[2]).fit(*case[:2])) for case in cases]


def result(scenario: Callable[..., Any], world: StandIn, folder: Path) -> Any:
    try:
        return scenario(world, folder)
    except Exception as error:  # the test that reads this result fails with it, the others go on
        return RuntimeError(f"{type(error).__name__}: {error}")


def main(folder: Path) -> None:
    scenarios = (uneven, orders, normalised, waits, averaged, modes, disagreements, *FIGURES)
    with joined() as world:
        results = {}
        for scenario in scenarios:
            print(f"[{scenario.__name__}]", flush=True)
            results[scenario.__name__] = result(scenario, world, folder)
        torch.save(results, folder / f"rank{world.rank}.pt")
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
