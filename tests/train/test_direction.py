"""Whether a greater or a smaller figure is better, and what a resume makes of another figure."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import ReduceLROnPlateau

from srunddp.train import CheckpointConfig, Trainer
from srunddp.train.config import Config
from srunddp.train.evaluations import direction
from srunddp.train.metrics.accumulator import Metric, accuracy
from tests.support.facts import tells
from tests.train.local_world import LocalWorld
from tests.train.problems import classes, message, settings

pytestmark = pytest.mark.usefixtures("one_thread")


def right(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs.argmax(dim=1) == targets).double()


class Says:
    """As a torchmetrics object does."""

    def __init__(self, higher_is_better: bool | None) -> None:
        self.higher_is_better = higher_is_better


METRICS: dict[str, Any] = {
    "accuracy": right,
    "top5_accuracy": right,
    "squared_error": right,
    "score": right,
    "says more": Says(True),
    "says less": Says(False),
    "says nothing": Says(None),
    "many": {"Kappa": Says(True), "Distance": Says(False)},
}


@pytest.mark.parametrize(
    ("monitor", "mode", "expected"),
    [
        ("loss", None, "min"),
        ("loss", "max", "max"),
        ("accuracy", None, "max"),
        ("top5_accuracy", None, "max"),
        ("accuracy", "min", "min"),
        ("squared_error", None, "min"),
        ("says more", None, "max"),
        ("says less", None, "min"),
        ("many/Kappa", None, "max"),
        ("many/Distance", None, "min"),
        ("score", "max", "max"),
    ],
)
def test_the_direction_is_derived_where_it_is_known(monitor: str, mode: Any, expected: str) -> None:
    assert direction(Config(mode=mode), monitor, METRICS) == expected


@pytest.mark.parametrize("monitor", ["score", "says nothing", "many/Other"])
def test_and_else_asked_for(monitor: str) -> None:
    text = message(lambda: direction(Config(monitor=monitor), monitor, METRICS))
    assert tells(text, f"monitor={monitor}", "no mode", "; expected ", "mode=max")


def trainer_with(
    scheduler: Any = None,
    metrics: dict[str, Metric] | None = None,
    val_metrics: dict[str, Metric] | None = None,
    **changes: Any,
) -> Trainer:
    torch.manual_seed(0)
    model = nn.Linear(8, 4)
    return Trainer(
        model,
        torch.optim.Adam(model.parameters(), lr=0.1),
        nn.CrossEntropyLoss(),
        settings(**{"tensorboard": False} | changes),
        world=LocalWorld(),
        scheduler=scheduler,
        metrics={"accuracy": right} if metrics is None else metrics,
        val_metrics=val_metrics,
    )


def test_the_model_that_is_most_often_right_is_the_best(tmp_path: Path) -> None:
    trainer = trainer_with(
        monitor="accuracy",
        epochs=5,
        output_dir=str(tmp_path),
        checkpoint=CheckpointConfig(keep_best=1),
    )
    records = trainer.fit(classes(64), classes(64))
    figures = [record.val["accuracy"] for record in records]
    assert figures[0] < max(figures)  # else nothing would be shown
    best = (tmp_path / "checkpoints" / "best.pt").resolve()
    first = figures.index(max(figures)) + 1
    assert torch.load(best, weights_only=True)["step"] == 16 * first


@pytest.mark.parametrize(
    ("monitor", "mode", "plateau", "fits"),
    [
        ("accuracy", None, "min", False),
        ("accuracy", None, "max", True),
        ("loss", None, "min", True),
        ("loss", None, "max", False),
        ("accuracy", "min", "max", False),
    ],
)
def test_a_plateau_scheduler_of_the_other_direction_is_refused(
    monitor: str, mode: Any, plateau: Any, fits: bool
) -> None:
    trainer = trainer_with(
        lambda optimizer: ReduceLROnPlateau(optimizer, mode=plateau), monitor=monitor, mode=mode
    )
    text = message(lambda: trainer.fit(classes(16), classes(16)))
    if fits:
        assert text == "no error"
    else:
        assert text.startswith(f"ReduceLROnPlateau(mode={plateau!r}), and of {monitor} ")


def test_another_figure_begins_anew_at_a_resume(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options: dict[str, Any] = {"output_dir": str(tmp_path), "resume": "auto", "patience": 2}
    trainer_with(monitor="accuracy", epochs=3, **options).fit(classes(64), classes(64))
    capsys.readouterr()
    trainer = trainer_with(monitor="loss", epochs=6, **options)
    records = trainer.fit(classes(64), classes(64))
    assert len(records) == 6
    losses = {16 * record.epoch: record.val["loss"] for record in records[3:]}
    assert trainer.state.scores == losses
    assert trainer.state.best == min(losses.values())
    best = (tmp_path / "checkpoints" / "best.pt").resolve()
    assert torch.load(best, weights_only=True)["step"] == min(losses, key=losses.__getitem__)
    said = capsys.readouterr().err
    assert tells(said, "accuracy (max)", "loss (min)", "anew")


def test_the_same_figure_goes_on_at_a_resume(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options: dict[str, Any] = {
        "output_dir": str(tmp_path),
        "resume": "auto",
        "monitor": "accuracy",
    }
    first = trainer_with(epochs=2, **options)
    first.fit(classes(64), classes(64))
    second = trainer_with(epochs=3, **options)
    second.fit(classes(64), classes(64))
    assert first.state.scores.items() <= second.state.scores.items()
    assert "begins anew" not in capsys.readouterr().err


# Metrics of evaluations alone.


def mixed(samples: list[Any]) -> tuple[Tensor, Tensor]:
    """Soft targets, as MixUp makes them."""
    inputs = torch.stack([each for each, _ in samples])
    targets = nn.functional.one_hot(torch.tensor([int(each) for _, each in samples]), 4).float()
    return (inputs + inputs.roll(1, 0)) / 2, (targets + targets.roll(1, 0)) / 2


def test_a_metric_may_be_of_evaluations_alone() -> None:
    """Training has targets that it could not compare."""
    trainer = trainer_with(metrics={}, val_metrics={"accuracy": accuracy}, monitor="accuracy")
    (record,) = trainer.fit(
        classes(32), classes(16), collate=mixed, val_collate=torch.utils.data.default_collate
    )
    assert "accuracy" not in record.train
    assert 0 <= record.val["accuracy"] <= 1
    assert trainer.evaluate(classes(16)) == record.val


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (
            {"metrics": {"accuracy": accuracy}, "val_metrics": {"accuracy": accuracy}},
            "accuracy in metrics and in val_metrics",
        ),
        ({"metrics": {}, "val_metrics": {"loss": accuracy}}, "a metric named 'loss'"),
        (
            {"metrics": {}, "val_metrics": {"accuracy": accuracy}, "monitor": "accuracy"},
            "monitor=accuracy",
        ),
    ],
)
def test_val_metrics_that_do_not_fit_are_refused(options: dict[str, Any], words: str) -> None:
    assert words in message(lambda: trainer_with(**options).fit(classes(16)))


def test_mixed_targets_of_a_metric_are_refused_with_the_way_out() -> None:
    trainer = trainer_with(metrics={"accuracy": accuracy})
    text = message(lambda: trainer.fit(classes(32), collate=mixed))
    assert "val_metrics" in text
