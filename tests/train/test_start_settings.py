"""A resume under other settings says so; a healthy one says nothing."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, AdamW, Optimizer
from torch.optim import lr_scheduler as lrs

from srunddp.train import Callback, Trainer, checkpoint_policy
from srunddp.train.progress import EpochRecord
from tests.train import problems
from tests.train.problems import classes, message

pytestmark = pytest.mark.usefixtures("one_thread")

Make = Callable[..., Any]


def adamw(**options: Any) -> Make:
    return lambda parameters: AdamW(parameters, **{"lr": 0.01} | options)


def said(
    folder: Path,
    capsys: pytest.CaptureFixture[str],
    before: dict[str, Any],
    now: dict[str, Any],
    *callbacks: Callback,
    starts: int = 2,
) -> list[str]:
    """The lines of the last start on what has changed."""
    for number in range(starts):
        options: dict[str, Any] = {"make": adamw(), "epochs": number + 1}
        options |= before if number == 0 else now
        torch.manual_seed(0)
        model = nn.Linear(8, 4)
        capsys.readouterr()
        problems.trainer_of(
            *callbacks,
            model=model,
            optimizer=options.pop("make")(model.parameters()),
            output_dir=str(folder),
            resume="auto",
            **options,
        ).fit(classes(32), classes(8))
    lines = capsys.readouterr().err.splitlines()
    return [line for line in lines if " is used, not " in line or " from here on" in line]


USED = "is used, not the script's"


@pytest.mark.parametrize(
    ("before", "now", "expected"),
    [
        (
            {"make": adamw(weight_decay=0.01)},
            {"make": adamw(weight_decay=0.5)},
            [f"weight_decay of AdamW: the checkpoint's 0.01 {USED} 0.5"],
        ),
        (
            {"make": adamw(lr=0.01)},
            {"make": adamw(lr=0.1)},
            [f"lr of AdamW: the checkpoint's 0.01 {USED} 0.1"],
        ),
        (
            {"make": adamw(betas=(0.9, 0.99))},
            {"make": adamw(betas=(0.5, 0.99))},
            [f"betas of AdamW: the checkpoint's (0.9, 0.99) {USED} (0.5, 0.99)"],
        ),
        (
            {"scheduler": lambda optimizer: lrs.StepLR(optimizer, 2)},
            {"scheduler": lambda optimizer: lrs.StepLR(optimizer, 5)},
            [f"step_size of StepLR: the checkpoint's 2 {USED} 5"],
        ),
        (
            {"scheduler": lambda optimizer: lrs.CosineAnnealingLR(optimizer, T_max=4)},
            {"scheduler": lambda optimizer: lrs.CosineAnnealingLR(optimizer, T_max=8)},
            [f"T_max of CosineAnnealingLR: the checkpoint's 4 {USED} 8"],
        ),
        (
            {"scheduler": lambda o: lrs.ReduceLROnPlateau(o, patience=1)},
            {"scheduler": lambda o: lrs.ReduceLROnPlateau(o, patience=9)},
            [f"patience of ReduceLROnPlateau: the checkpoint's 1 {USED} 9"],
        ),
        (
            {"scheduler": lambda o: lrs.ChainedScheduler([lrs.ExponentialLR(o, 0.9)])},
            {"scheduler": lambda o: lrs.ChainedScheduler([lrs.ExponentialLR(o, 0.5)])},
            [f"part 1, gamma of ChainedScheduler: the checkpoint's 0.9 {USED} 0.5"],
        ),
        ({"batch_size": 4}, {"batch_size": 8}, ["batch_size was 4, and is 8 from here on"]),
        (
            {"max_grad_norm": 1.0},
            {"max_grad_norm": None},
            ["max_grad_norm was 1.0, and is None from here on"],
        ),
        ({"warmup_steps": 2}, {"warmup_steps": 3}, ["warmup_steps was 2, and is 3 from here on"]),
    ],
)
def test_a_resume_under_another_setting_says_which_counts(
    before: dict[str, Any],
    now: dict[str, Any],
    expected: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    if "scheduler" in before:
        before |= {"scheduler_interval": "epoch"}
        now |= {"scheduler_interval": "epoch"}
    lines = said(tmp_path / "run", capsys, before, now)
    assert len(lines) == len(expected)
    for line, words in zip(lines, expected, strict=True):
        assert words in line


def test_and_again_at_the_next_resume(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As long as the value of then is used."""
    before = {"make": adamw(weight_decay=0.01)}
    now = {"make": adamw(weight_decay=0.5)}
    (line,) = said(tmp_path / "run", capsys, before, now, starts=3)
    assert f"weight_decay of AdamW: the checkpoint's 0.01 {USED} 0.5" in line


class OtherDecay(Callback):
    def on_epoch(self, trainer: Trainer, record: EpochRecord) -> None:
        problems.optimizer_of(trainer).param_groups[0]["weight_decay"] = 0.1 * record.epoch


HEALTHY: dict[str, tuple[dict[str, Any], tuple[Callback, ...]]] = {
    "nothing": ({}, ()),
    "cosine": ({"schedule": "cosine", "warmup_steps": 2}, ()),
    "a step schedule": ({"scheduler": lambda o: lrs.StepLR(o, 1)}, ()),
    "one cycle with momentum": (
        {
            "make": lambda parameters: SGD(parameters, lr=0.1, momentum=0.9),
            "scheduler": lambda o: lrs.OneCycleLR(o, 0.1, total_steps=60),
        },
        (),
    ),
    "a plateau": ({"scheduler": lambda o: lrs.ReduceLROnPlateau(o, patience=0)}, ()),
    "cyclic": (
        {
            "make": lambda parameters: SGD(parameters, lr=0.1, momentum=0.9),
            "scheduler": lambda o: lrs.CyclicLR(o, 0.01, 0.1, step_size_up=3),
        },
        (),
    ),
    "warm restarts": ({"scheduler": lambda o: lrs.CosineAnnealingWarmRestarts(o, 3)}, ()),
    "sequential": (
        {
            "scheduler": lambda o: lrs.SequentialLR(
                o, [lrs.ConstantLR(o), lrs.ExponentialLR(o, 0.9)], [4]
            )
        },
        (),
    ),
    "a chain": (
        {"scheduler": lambda o: lrs.ChainedScheduler([lrs.LinearLR(o), lrs.StepLR(o, 2)])},
        (),
    ),
    "by a function": ({"scheduler": lambda o: lrs.LambdaLR(o, lambda step: 0.9**step)}, ()),
    "weight decay that a callback changes": ({}, (OtherDecay(),)),
    "a learning rate as a tensor": ({"make": lambda p: AdamW(p, lr=torch.tensor(0.01))}, ()),
    "a scaled learning rate": ({"scale_lr": "linear", "base_batch_size": 1}, ()),
    "an average": ({"ema_decay": 0.9}, ()),
    "clipping": ({"max_grad_norm": 0.1}, ()),
    "accumulation": ({"gradient_accumulation_steps": 2}, ()),
    "two groups": (
        {
            "make": lambda parameters: AdamW(
                [{"params": [each], "lr": 0.01 * n} for n, each in enumerate(parameters, 1)]
            )
        },
        (),
    ),
    "a monitor": ({"evaluate_every_steps": 3, "patience": 9}, ()),
}


@pytest.mark.parametrize("kind", HEALTHY)
def test_a_healthy_resume_says_nothing(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options, callbacks = HEALTHY[kind]
    assert said(tmp_path / "run", capsys, options, options, *callbacks, starts=3) == []


class SetsDecay(Callback):
    def on_fit_start(self, trainer: Trainer) -> None:
        problems.optimizer_of(trainer).param_groups[0]["weight_decay"] = 0.5


def test_the_new_one_can_be_set_as_the_line_says(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(epochs: int, *callbacks: Callback) -> Optimizer:
        model = nn.Linear(8, 4)
        optimizer = AdamW(model.parameters(), lr=0.01)
        problems.trainer_of(
            *callbacks,
            model=model,
            optimizer=optimizer,
            epochs=epochs,
            output_dir=str(tmp_path),
            resume="auto",
        ).fit(classes(16))
        return optimizer

    run(1)
    assert run(2, SetsDecay()).param_groups[0]["weight_decay"] == 0.5


def fold(folder: Path, resume: str = "auto") -> Trainer:
    trainer = problems.trainer_of(output_dir=str(folder), resume=resume)
    trainer.fit(classes(16))
    return trainer


def test_folds_of_one_script_in_one_folder_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second would go on with the first one's weights, also by another name of the folder."""
    monkeypatch.setattr(checkpoint_policy, "_runs_of_this_process", {})
    (tmp_path / "link").symlink_to(tmp_path / "1")
    first = fold(tmp_path / "1")
    fold(tmp_path / "2")
    for name in ("1", "link"):
        for resume in ("auto", "never"):
            text = message(partial(fold, tmp_path / name, resume))
            assert text.startswith("another Trainer of this process has used ")
    first.fit(classes(16))
    named = fold(tmp_path / "1", str(tmp_path / "1" / "checkpoints" / "step-00000004.pt"))
    ours = first.model.get_parameter("weight")
    assert torch.equal(named.model.get_parameter("weight"), ours)
