"""A loss whose mean is not over samples, and no weight that says so."""

from __future__ import annotations

import io
from contextlib import redirect_stderr
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from srunddp.train import Trainer
from tests.train.local_world import LocalWorld, run_ranks
from tests.train.problems import classes, settings

pytestmark = pytest.mark.usefixtures("one_thread")

CLASS_WEIGHTS = torch.tensor([1.0, 2.0, 5.0, 9.0])
SAID = "srunddp: the loss's mean is over "


def ignored(samples: int) -> TensorDataset:
    """Every third label is ignored, and some more of the first half."""
    data = classes(samples)
    labels = data.tensors[1].clone()
    labels[::3] = -100
    labels[: samples // 2 : 2] = -100
    return TensorDataset(data.tensors[0], labels)


def by_function(model: nn.Module, batch: Any) -> Tensor:
    return nn.functional.nll_loss(model(batch[0]).log_softmax(1), batch[1], ignore_index=-100)


LOSSES: dict[str, Any] = {
    "plain": {"loss_function": nn.CrossEntropyLoss()},
    "weights": {"loss_function": nn.CrossEntropyLoss(weight=CLASS_WEIGHTS)},
    "ignored": {"loss_function": nn.CrossEntropyLoss()},
    "by a function": {"step": by_function},
    "smoothing": {"loss_function": nn.CrossEntropyLoss(label_smoothing=0.1)},
    "of squares": {"step": lambda model, batch: model(batch[0]).square().mean()},
}


def ignores(kind: str) -> bool:
    return kind in ("ignored", "by a function")


def fit(world: LocalWorld, kind: str, weight: Any = None, **changes: Any) -> Any:
    torch.manual_seed(0)
    model = nn.Linear(8, 4)
    trainer = Trainer(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        config=settings(**{"tensorboard": False} | changes),
        world=world,
        weight=weight,
        **LOSSES[kind],
    )
    trainer.fit(ignored(48) if ignores(kind) else classes(48))
    return model.weight.detach().clone()


def said(capfd: pytest.CaptureFixture[str]) -> list[str]:
    return [line for line in capfd.readouterr().err.splitlines() if line.startswith(SAID)]


PARTS = {
    "weights": "the weights of the classes",
    "ignored": "the labels that are not ignored",
    "by a function": "the labels that are not ignored",
}


@pytest.mark.parametrize("kind", LOSSES)
@pytest.mark.parametrize("accumulation", [1, 3])
def test_a_mean_that_is_not_over_samples_is_said_once(
    kind: str, accumulation: int, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    fit(LocalWorld(), kind, gradient_accumulation_steps=accumulation, epochs=2)
    lines = said(capfd)
    if kind in PARTS:
        (line,) = lines
        assert line.startswith(SAID + PARTS[kind])
    else:
        assert lines == []


def said_by_rank(world: LocalWorld, kind: str) -> str:
    with redirect_stderr(io.StringIO()) as errors:
        fit(world, kind)
    return errors.getvalue()


@pytest.mark.parametrize("kind", ["weights", "plain"])
def test_it_is_said_by_rank_zero(kind: str, tmp_path: Path) -> None:
    first, second = run_ranks(2, tmp_path, said_by_rank, kind)
    assert (SAID in first) == (kind in PARTS)
    assert SAID not in second


def test_with_a_weight_nothing_is_said(capfd: pytest.CaptureFixture[str]) -> None:
    fit(LocalWorld(), "weights", weight=lambda batch: CLASS_WEIGHTS[batch[1]].sum())
    assert said(capfd) == []


def test_watching_changes_no_bit() -> None:
    """A weight, even that of the samples, turns it off."""
    watched = fit(LocalWorld(), "weights")
    unwatched = fit(LocalWorld(), "weights", weight=lambda batch: len(batch[1]))
    assert torch.equal(watched, unwatched)
