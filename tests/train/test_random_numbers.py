"""What is drawn at random in training steps differs between ranks; outside of them it does not."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from srunddp.train import Callback, CheckpointConfig, Trainer
from tests.train.local_world import LocalWorld, run_ranks
from tests.train.problems import BATCH_PER_RANK, classes, trainer_of

pytestmark = pytest.mark.usefixtures("one_thread")

Drawn = tuple[float, float, float]


def draw() -> Drawn:
    """One number of each generator that scripts draw from."""
    return torch.rand(()).item(), random.random(), float(numpy.random.random())


def seed_all() -> None:
    torch.manual_seed(5)
    random.seed(5)
    numpy.random.seed(5)


class DrawingData(Dataset[Any]):
    """Draws in reading, as an augmentation does."""

    def __init__(self) -> None:
        self.data = classes(24)
        self.drawn: list[Drawn] = []

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> Any:
        self.drawn.append(draw())
        return self.data[index]


class DrawingModel(nn.Linear):
    """Draws in each forward pass, as dropout does."""

    def __init__(self) -> None:
        super().__init__(8, 4)
        self.trained: list[Drawn] = []
        self.evaluated: list[Drawn] = []

    def forward(self, inputs: Tensor) -> Tensor:
        drawn = self.trained if self.training else self.evaluated
        drawn.append(draw())
        return super().forward(inputs)


class DrawingCallback(Callback):
    """Draws at every moment, as one that adds a head does. Draws ``extra`` more after each step."""

    def __init__(self, extra: int = 0) -> None:
        self.drawn: list[Drawn] = []
        self.extra = extra

    def _draw(self, *_: Any, **__: Any) -> None:
        self.drawn.append(draw())

    on_fit_start = on_before_optimizer_step = on_evaluation = on_epoch = on_fit_end = _draw

    def on_step(self, trainer: Trainer, step: int, loss: Tensor | None) -> None:
        for _ in range(1 + self.extra):
            self._draw()


def train(world: LocalWorld, folder: Path, stop: int, extra: int) -> dict[str, list[Drawn]]:
    """Train up to a step, with a checkpoint after each; return what was drawn where."""
    seed_all()
    model = DrawingModel()
    callback = DrawingCallback(extra)
    data = DrawingData()
    trainer = trainer_of(
        callback,
        model=model,
        world=world,
        max_steps=stop,
        output_dir=str(folder),
        resume="auto",
        evaluate_every_steps=1,
        checkpoint=CheckpointConfig(every_steps=1),
    )
    trainer.fit(data, classes(8))
    return {
        "steps": model.trained,
        # Without those of samples that are compared between ranks before the first step.
        "reading": data.drawn[-BATCH_PER_RANK:],
        "callbacks": callback.drawn,
        "evaluations": model.evaluated,
    }


@pytest.fixture(scope="module")
def drawn(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, list[Drawn]]]:
    """What two ranks draw in three steps."""
    folder = tmp_path_factory.mktemp("drawn")
    return run_ranks(2, folder, train, folder / "run", 3, 0)


def differ(one: list[Drawn], other: list[Drawn]) -> bool:
    """Whether no two numbers at the same place are equal, of any generator."""
    pairs = zip(one, other, strict=True)
    return all(a != b for pair in pairs for a, b in zip(*pair, strict=True))


@pytest.mark.parametrize("where", ["steps", "reading"])
def test_ranks_draw_other_numbers_in_steps(where: str, drawn: list[dict[str, Any]]) -> None:
    first, second = drawn
    assert first[where]
    assert differ(first[where], second[where])


@pytest.mark.parametrize("where", ["callbacks", "evaluations"])
def test_ranks_draw_alike_outside_of_steps(where: str, drawn: list[dict[str, Any]]) -> None:
    first, second = drawn
    assert first[where]
    assert first[where] == second[where]
    assert differ(first[where][1:], first[where][:-1]) or where == "evaluations"


def test_what_callbacks_draw_does_not_move_what_steps_draw(
    drawn: list[dict[str, Any]], tmp_path: Path
) -> None:
    more = run_ranks(2, tmp_path, train, tmp_path / "run", 3, 5)
    assert [rank["steps"] for rank in more] == [rank["steps"] for rank in drawn]


def test_both_go_on_after_a_resume(drawn: list[dict[str, Any]], tmp_path: Path) -> None:
    before = run_ranks(2, tmp_path, train, tmp_path / "run", 1, 0)
    after = run_ranks(2, tmp_path, train, tmp_path / "run", 3, 0)
    for rank in range(2):
        assert before[rank]["steps"] + after[rank]["steps"][-2:] == drawn[rank]["steps"]
        # The interruption has moments of its own, so that the numbers are not those of a run
        # without one; but none comes twice. Two are drawn after the last checkpoint:
        # in on_epoch and in on_fit_end.
        assert not set(before[rank]["callbacks"][:-2]) & set(after[rank]["callbacks"])
    assert after[0]["callbacks"] == after[1]["callbacks"]


def test_one_rank_has_one_sequence() -> None:
    """As a loop by hand."""
    model = DrawingModel()
    trainer = trainer_of(model=model)
    seed_all()
    trainer.fit(classes(12))
    seed_all()
    assert model.trained == [draw() for _ in range(3)]
