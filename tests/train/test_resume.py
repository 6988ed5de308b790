"""A training that was killed, or that left by a signal, goes on to the very result of one that was
left alone.
"""

from __future__ import annotations

import os
import signal
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import IterableDataset

from srunddp.errors import Stopped
from srunddp.train.checkpoint.manager import CheckpointManager
from tests.train.interrupted import (
    MOMENTS,
    LocalTraining,
    kills,
    left_amid_evaluation,
)
from tests.train.local_world import LocalWorld
from tests.train.preemption.conftest import nothing_is_left  # noqa: F401 - for all tests here
from tests.train.problems import Numbered, classes, scale_trainer, trainer_of

SETTINGS = ("--epochs=4", "--checkpoint.every_steps=5", "--ema_decay=0.9")
ALONE = (*SETTINGS, "--dataloader.num_workers=0", "--epochs=2")


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What comes of a training of three ranks that is left alone."""
    return LocalTraining(tmp_path_factory.mktemp("uninterrupted"), 3, SETTINGS).finish()


def test_kills_change_no_sample_figure_weight_or_optimizer_bit(
    uninterrupted: Any, tmp_path: Path
) -> None:
    """Mid-epoch, with loader workers, dropout, BatchNorm, accumulation, an average and several
    buckets of gradients.
    """
    hit, outcome = kills(LocalTraining(tmp_path, 3, SETTINGS), *MOMENTS)
    assert set(chain(*hit)) >= {
        "at random",
        "amid a save",
        "amid an evaluation",
        "at an epoch's end",
    }
    assert outcome == uninterrupted
    (first, *others) = outcome["results"]
    assert first["average"] not in (None, first["weights"])
    assert others == [first, first]


@pytest.mark.parametrize(
    ("number", "code", "settings"), [(signal.SIGTERM, 143, SETTINGS), (signal.SIGUSR1, 75, ALONE)]
)
def test_all_leave_amid_an_evaluation_and_make_up_for_it_later(
    uninterrupted: Any, number: signal.Signals, code: int, settings: tuple[str, ...], tmp_path: Path
) -> None:
    """Also what was drawn in it is undone: without workers the rank itself reads, which draws for
    dropout too.
    """
    ends, tested, outcome = left_amid_evaluation(
        LocalTraining(tmp_path / "signalled", 3, settings), number
    )
    assert {code for code, _ in ends} == {code}
    assert {said.partition(";")[0] for _, said in ends} == {
        f"stopped after step 7 by {number.name}"
    }
    assert tested == 3, "of 7 test batches"
    if settings is ALONE:
        uninterrupted = LocalTraining(tmp_path / "uninterrupted", 3, ALONE).finish()
    assert outcome == uninterrupted


def test_a_signal_while_resuming_is_obeyed_after_the_first_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(CheckpointManager, "load", lambda *_: os.kill(os.getpid(), signal.SIGUSR2))
    with pytest.raises(Stopped, match="stopped after step 1 by SIGUSR2"):
        scale_trainer(LocalWorld(), output_dir=str(tmp_path), tensorboard=False).fit(Numbered(20))


class Signalling(nn.Linear):
    """Its rank gets SIGTERM in each evaluation after a step."""

    has_trained = False

    def forward(self, inputs: Tensor) -> Tensor:
        if self.training:
            self.has_trained = True
        elif self.has_trained:
            os.kill(os.getpid(), signal.SIGTERM)
        return super().forward(inputs)


def test_a_stop_in_the_evaluation_of_an_epoch_repeats_no_step(tmp_path: Path) -> None:
    whole = trainer_of(epochs=2)
    options: dict[str, Any] = {"epochs": 2, "output_dir": str(tmp_path), "resume": "auto"}
    torch.manual_seed(0)
    with pytest.raises(Stopped, match="stopped after step 5 by SIGTERM"):
        trainer_of(model=Signalling(8, 4), **options).fit(classes(20), classes(8))
    again = trainer_of(**options)
    assert again.fit(classes(20), classes(8)) == whole.fit(classes(20), classes(8))
    assert again.state.step == 10


@pytest.mark.parametrize("length", ["known", "unknown"])
@pytest.mark.parametrize("first", [7, 10, 12])
def test_more_steps_go_on_amid_the_epoch_that_fewer_have_cut(
    first: int, length: str, tmp_path: Path
) -> None:
    """Each sample of that epoch is seen once; epochs have five steps."""

    def run(folder: str, steps: int) -> tuple[Tensor, list[Any]]:
        data: Any = classes(20)
        if length == "unknown":
            data = Streamed(data)
        trainer = trainer_of(max_steps=steps, output_dir=str(tmp_path / folder), resume="auto")
        records = trainer.fit(data, classes(8))
        return trainer.model.get_parameter("weight").detach().clone(), records

    run("parts", first)
    parts, records = run("parts", 13)
    whole, expected = run("whole", 13)
    assert torch.equal(parts, whole)
    assert records == expected
    assert [record.epoch for record in records] == [1, 2, 3]


class Streamed(IterableDataset[Any]):
    """A data set without a length."""

    def __init__(self, data: Any) -> None:
        self.data = data

    def __iter__(self) -> Any:
        return (self.data[index] for index in range(len(self.data)))
