"""The line of an epoch."""

from __future__ import annotations

import pytest

from srunddp.train.progress import EpochRecord, describe, print_epoch

TRAIN = {"loss": 0.23456, "accuracy": 0.92341}


def test_an_epoch_is_one_line() -> None:
    assert describe(EpochRecord(1, TRAIN)) == "Epoch 1 - loss 0.2346, accuracy 92.34 %"


def test_test_figures_follow_on_the_same_line(capsys: pytest.CaptureFixture[str]) -> None:
    print_epoch(EpochRecord(12, TRAIN, {"loss": 0.1234, "accuracy": 0.971, "top5 accuracy": 1.0, "mae": 2.0}))
    assert capsys.readouterr().out == (
        "Epoch 12 - loss 0.2346, accuracy 92.34 %, "
        "test loss 0.1234, test accuracy 97.10 %, test top5 accuracy 100.00 %, test mae 2.0000\n"
    )
