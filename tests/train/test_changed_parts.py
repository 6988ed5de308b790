"""Schedules, callbacks and optimizers that are other ones at a resume than when the run began."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, AdamW, Optimizer
from torch.optim import lr_scheduler as lrs

from srunddp.train import Callback, Trainer
from srunddp.train.schedulers import warmup_then_cosine
from tests.train import problems
from tests.train.problems import classes, message, optimizer_of

pytestmark = pytest.mark.usefixtures("one_thread")

STEPS = 4  # an epoch's
RATE = 0.1
MOMENTUM = 0.9
Options = dict[str, Any]


class Rates(Callback):
    """The learning rate and the momentum that each step was made with."""

    def __init__(self) -> None:
        self.rates: list[float] = []
        self.momenta: list[float] = []

    def on_before_optimizer_step(self, trainer: Trainer) -> None:
        group = optimizer_of(trainer).param_groups[0]
        self.rates.append(float(group["lr"]))
        self.momenta.append(group["momentum"])


def sgd(parameters: Any, lr: Any = RATE) -> Optimizer:
    return SGD(parameters, lr=lr, momentum=MOMENTUM)


def run(
    folder: Path,
    epochs: int,
    *callbacks: Callback,
    make: Callable[..., Optimizer] = sgd,
    **options: Any,
) -> Trainer:
    torch.manual_seed(0)
    model = nn.Linear(8, 4)
    trainer = problems.trainer_of(
        *callbacks,
        model=model,
        optimizer=make(model.parameters()),
        epochs=epochs,
        output_dir=str(folder),
        resume="auto",
        **options,
    )
    trainer.fit(classes(STEPS * problems.BATCH_PER_RANK))
    return trainer


def cosine(step: int) -> float:
    return RATE * warmup_then_cosine(step, 0, 2 * STEPS)


def warmed(step: int) -> float:
    return RATE * warmup_then_cosine(step, 6, None)


def by_epoch(scheduler: Callable[..., Any]) -> Options:
    return {"scheduler": scheduler, "scheduler_interval": "epoch"}


CONSTANT: Options = {}
COSINE: Options = {"schedule": "cosine"}
WARM_UP: Options = {"warmup_steps": 6}
STEPWISE = by_epoch(lambda optimizer: lrs.StepLR(optimizer, 1, gamma=0.5))
EXPONENTIAL = by_epoch(lambda optimizer: lrs.ExponentialLR(optimizer, 0.9))
ONE_CYCLE: Options = {"scheduler": lambda o: lrs.OneCycleLR(o, 1.0, total_steps=2 * STEPS)}


def one_cycle(step: int) -> float:
    optimizer = sgd([nn.Parameter(torch.zeros(1))])
    scheduler = lrs.OneCycleLR(optimizer, 1.0, total_steps=2 * STEPS)
    for _ in range(step):
        optimizer.step()
        scheduler.step()
    return float(optimizer.param_groups[0]["lr"])


@pytest.mark.parametrize("rate", [RATE, torch.tensor(RATE, dtype=torch.float64)])
@pytest.mark.parametrize(
    ("before", "now", "expected"),
    [
        (COSINE, CONSTANT, lambda step: RATE),
        (CONSTANT, COSINE, cosine),
        (STEPWISE, COSINE, cosine),
        (COSINE, WARM_UP, warmed),
        (STEPWISE, EXPONENTIAL, lambda step: RATE),
        (ONE_CYCLE, CONSTANT, lambda step: RATE),
        (ONE_CYCLE, EXPONENTIAL, lambda step: RATE),
        (ONE_CYCLE, COSINE, cosine),
        # A scheduler of the user's own begins where it is put in.
        (CONSTANT, ONE_CYCLE, lambda step: one_cycle(step - STEPS)),
    ],
)
def test_another_schedule_goes_on_from_here(
    before: Options,
    now: Options,
    expected: Callable[[int], float],
    rate: Any,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def make(parameters: Any) -> Optimizer:
        return sgd(parameters, rate.clone() if isinstance(rate, torch.Tensor) else rate)

    run(tmp_path, 1, make=make, **before)
    capsys.readouterr()
    seen = Rates()
    run(tmp_path, 2, seen, make=make, **now)
    assert seen.rates == pytest.approx([expected(step) for step in range(STEPS, 2 * STEPS)])
    if now is not ONE_CYCLE:
        assert seen.momenta == [MOMENTUM] * STEPS
    assert "from here on" in capsys.readouterr().err


def test_with_another_schedule_the_scripts_learning_rate_counts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(tmp_path, 1, **COSINE)
    capsys.readouterr()
    seen = Rates()
    run(tmp_path, 2, seen, make=lambda parameters: sgd(parameters, lr=0.7))
    assert seen.rates == [0.7] * STEPS
    assert "lr of SGD was 0.1, and is 0.7 from here on" in capsys.readouterr().err


class Counter(Callback):
    """Counts the epochs of a run, over all its starts."""

    def __init__(self) -> None:
        self.epochs = 0

    def on_epoch(self, *_: Any) -> None:
        self.epochs += 1

    def state_dict(self) -> dict[str, Any]:
        return {"epochs": self.epochs}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.epochs = state["epochs"]


class OtherCounter(Counter):
    pass


def test_a_callback_with_a_state_may_be_added_and_taken_away(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(tmp_path, 1, Counter())
    capsys.readouterr()

    first = Counter()
    added = OtherCounter()
    run(tmp_path, 2, added, first)
    assert (first.epochs, added.epochs) == (2, 1)
    assert "OtherCounter begins anew" in capsys.readouterr().err

    first = Counter()
    added = OtherCounter()
    run(tmp_path, 3, first, added)
    assert (first.epochs, added.epochs) == (3, 2)
    said = capsys.readouterr().err
    assert "Counter begins" not in said
    assert "Counter has" not in said

    added = OtherCounter()
    run(tmp_path, 4, added)
    assert added.epochs == 3
    assert "Counter has a state in the checkpoint, and is not here" in capsys.readouterr().err


def test_callbacks_of_one_class_keep_their_states_by_their_order(tmp_path: Path) -> None:
    before = (Counter(), Counter())
    before[1].epochs = 10
    run(tmp_path, 1, *before)
    now = (Counter(), Counter())
    run(tmp_path, 2, *now)
    assert [each.epochs for each in now] == [2, 12]


def test_another_optimizer_is_refused_by_both_names(tmp_path: Path) -> None:
    run(tmp_path, 1)
    text = message(lambda: run(tmp_path, 2, make=AdamW))
    assert "SGD" in text
    assert "AdamW" in text
