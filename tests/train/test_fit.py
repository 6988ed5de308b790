"""What goes on around the steps: when to evaluate, to save and to stop, in a single process."""

from __future__ import annotations

import itertools
import json
import math
import random
import re
import shutil
import threading
import time
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.data import IterableDataset

import srunddp
from srunddp import telemetry
from srunddp.errors import ConfigError
from srunddp.train import (
    Callback,
    CheckpointConfig,
    CheckpointError,
    Config,
    DataLoaderConfig,
    PreemptionConfig,
    Trainer,
    load_checkpoint,
    read_config,
    save_checkpoint,
)
from srunddp.train.checkpoint.directory import CheckpointDirectory
from srunddp.train.data.order import Sequential
from srunddp.train.progress import EpochRecord
from tests.train.local_world import LocalWorld, run_ranks
from tests.train.metrics.test_logger import lines
from tests.train.problems import OnStep, Stop, classes, optimizer_of, same, settings, trainer_of

NEVER = CheckpointConfig(every_epochs=0, keep_best=0)

pytestmark = pytest.mark.usefixtures("one_thread")


class EventRecorder(Callback):
    """What the loop calls, and when; kept by ``(event, step, ...)``."""

    def __init__(self) -> None:
        self.events: list[tuple[Any, ...]] = []
        self.trainers: set[int] = set()

    def on_fit_start(self, trainer: Trainer) -> None:
        self.events.append(("start", trainer.total_steps))

    def on_before_optimizer_step(self, trainer: Trainer) -> None:
        self.events.append(("gradient", trainer.model.weight.grad is not None))

    def on_step(self, trainer: Trainer, step: int, loss: Tensor | None) -> None:
        self.trainers.add(id(trainer))
        self.events.append(("step", step))

    def on_evaluation(self, trainer: Trainer, figures: Mapping[str, float]) -> None:
        self.events.append(("evaluation", trainer.state.step))

    def on_epoch(self, trainer: Trainer, record: Any) -> None:
        self.events.append(("epoch", trainer.state.step, record.epoch))

    def on_checkpoint(self, trainer: Trainer, path: Path) -> None:
        assert path.exists()
        self.events.append(("checkpoint", path.name))

    def on_fit_end(self, trainer: Trainer) -> None:
        self.events.append(("end", trainer.state.step))

    def of(self, kind: str) -> list[Any]:
        return [event[1] for event in self.events if event[0] == kind]


def steps_kept(folder: Path) -> list[int]:
    return sorted(int(path.name[5:13]) for path in (folder / "checkpoints").glob("step-*.pt"))


def score_after(scores: Mapping[int, float], monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the evaluation after a step come to this loss; 9.0 where it is not told."""
    whole = Trainer._evaluate

    def evaluate(self: Trainer, *args: Any) -> dict[str, float]:
        return {**whole(self, *args), self.config.monitor: scores.get(self.state.step, 9.0)}

    monkeypatch.setattr(Trainer, "_evaluate", evaluate)


# Evaluation.


@pytest.mark.parametrize(
    ("epochs", "steps", "expected"),
    [
        (1, 0, [5, 10, 15, 20]),
        (2, 0, [10, 20]),
        (3, 0, [15]),
        (0, 4, [4, 8, 12, 16, 20]),
        (1, 4, [4, 5, 8, 10, 12, 15, 16, 20]),
        (0, 0, []),
    ],
)
def test_evaluations_are_after_every_so_many_epochs_and_steps(
    epochs: int, steps: int, expected: list[int]
) -> None:
    """Five steps an epoch. A step that is due for both reasons is evaluated once."""
    recorder = EventRecorder()
    trainer = trainer_of(
        recorder, epochs=4, evaluate_every_epochs=epochs, evaluate_every_steps=steps
    )
    records = trainer.fit(classes(20), classes(8))
    assert recorder.of("evaluation") == expected
    assert [bool(record.val) for record in records] == [
        bool(epochs) and n % epochs == 0 for n in (1, 2, 3, 4)
    ]


def test_training_figures_are_no_evaluation_but_tell_the_best(tmp_path: Path) -> None:
    recorder = EventRecorder()
    trainer = trainer_of(recorder, epochs=2, output_dir=str(tmp_path), log_every=0)
    trainer.fit(classes(20))
    assert recorder.of("evaluation") == []
    assert trainer.state.best == min(record.train["loss"] for record in trainer.state.records)
    assert [line["kind"] for line in lines(tmp_path)] == ["epoch", "epoch"]


class Drawing(nn.Linear):
    """Draws in training and in evaluation from all three kinds of random numbers."""

    drawn: list[float]

    def forward(self, inputs: Tensor) -> Tensor:
        value = torch.rand(()).item() + random.random() + numpy.random.random()
        if self.training:
            self.drawn.append(value)
        return super().forward(inputs)


def test_an_evaluation_changes_nothing_that_training_draws() -> None:
    drawn = []
    for every in (0, 2):
        model = Drawing(8, 4)
        model.drawn = []
        random.seed(1)
        numpy.random.seed(1)
        trainer_of(model=model, evaluate_every_epochs=0, evaluate_every_steps=every).fit(
            classes(20), classes(8)
        )
        drawn.append(model.drawn)
    assert drawn[0] == drawn[1]
    assert len(drawn[0]) == 5


# Stopping early.


@pytest.mark.parametrize(
    ("scores", "changes", "step", "epochs"),
    [
        ({5: 3.0, 10: 2.0, 15: 2.0, 20: 2.5}, {}, 20, 4),
        (
            {2: 3.0, 4: 2.0, 6: 2.5, 8: 2.5},
            {"evaluate_every_epochs": 0, "evaluate_every_steps": 2},
            8,
            2,
        ),
        (
            {5: 3.0, 10: 3.5, 15: 2.0, 20: 2.5, 25: 1.0},
            {"epochs": 5, "evaluate_every_steps": 5},
            25,
            5,
        ),
    ],
    ids=["at an epoch's end", "amid an epoch", "a step at an epoch's end counts once"],
)
def test_training_stops_early(
    scores: dict[int, float],
    changes: dict[str, Any],
    step: int,
    epochs: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    score_after(scores, monkeypatch)
    trainer = trainer_of(**({"epochs": 9, "patience": 2} | changes))
    assert len(trainer.fit(classes(20), classes(8))) == epochs
    assert trainer.state.step == step


@pytest.mark.parametrize(
    ("first", "last", "mode", "expected"),
    [(3.0, 2.5, "min", 10), (3.0, 2.5, "max", 5), (math.nan, math.nan, "min", 10)],
)
def test_the_best_is_the_least_or_the_most_that_is_a_number(
    first: float, last: float, mode: str, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    score_after({5: first, 10: 2.0, 15: last}, monkeypatch)
    trainer = trainer_of(epochs=3, mode=mode)
    trainer.fit(classes(20), classes(8))
    assert min(trainer.state.scores, key=trainer.state.scores.__getitem__) == expected
    assert trainer.state.step == 15
    assert not any(map(math.isnan, trainer.state.scores.values()))


def test_a_run_that_was_over_stays_over(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    score_after({5: 2.0}, monkeypatch)
    options: dict[str, Any] = {"epochs": 9, "patience": 1, "output_dir": str(tmp_path)}
    first = trainer_of(**options).fit(classes(20), classes(8))
    recorder = EventRecorder()
    again = trainer_of(recorder, **options, resume="auto").fit(classes(20), classes(8))
    assert again == first
    assert len(first) == 2
    assert recorder.events == [("start", 45), ("end", 10)]


def test_reduce_lr_on_plateau_is_stepped_by_evaluations(monkeypatch: pytest.MonkeyPatch) -> None:
    score_after({5: 3.0, 10: 3.0, 15: 1.0, 20: 1.0}, monkeypatch)
    rates: list[float] = []

    def note(trainer: Trainer, record: EpochRecord) -> None:
        rates.append(optimizer_of(trainer).param_groups[0]["lr"])

    callback = Callback()
    callback.on_epoch = note  # type: ignore[method-assign]  # of this object, as a user may
    plateau = partial(ReduceLROnPlateau, factor=0.1, patience=0)
    trainer = trainer_of(callback, scheduler=plateau)
    trainer.config = settings(epochs=4, monitor="loss", mode="min", tensorboard=False)
    trainer.fit(classes(20), classes(8))
    assert rates == pytest.approx([0.1, 0.01, 0.01, 0.001])


# Checkpoints.


@pytest.mark.parametrize(
    ("when", "expected"),
    [
        ({"every_epochs": 1}, [5, 10, 15, 20]),
        ({"every_epochs": 2}, [10, 20]),
        ({"every_epochs": 0}, [20]),
        ({"every_epochs": 0, "every_steps": 6}, [6, 12, 18, 20]),
        ({"every_epochs": 1, "every_steps": 6}, [5, 6, 10, 12, 15, 18, 20]),
    ],
)
def test_checkpoints_are_written_at_each_interval_and_the_end(
    when: dict[str, int], expected: list[int], tmp_path: Path
) -> None:
    checkpoint = CheckpointConfig(keep_last=99, keep_best=0, **when)
    trainer_of(epochs=4, output_dir=str(tmp_path), checkpoint=checkpoint).fit(
        classes(20), classes(8)
    )
    assert steps_kept(tmp_path) == expected


def test_checkpoints_are_written_after_so_many_minutes(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """By a clock on which each step takes a minute."""
    now = [0.0]
    monkeypatch.setattr(
        "srunddp.train.checkpoint_policy.time", SimpleNamespace(monotonic=lambda: now[0])
    )

    def minute_later(trainer: Trainer, step: int) -> None:
        now[0] += 60.0

    monkeypatch.setattr("srunddp.train.preemption.preemption.MOST_STEPS", 1)
    checkpoint = CheckpointConfig(every_epochs=0, every_minutes=3, keep_last=99, keep_best=0)
    trainer_of(OnStep(minute_later), epochs=2, output_dir=str(tmp_path), checkpoint=checkpoint).fit(
        classes(40)
    )
    assert steps_kept(tmp_path) == [4, 8, 12, 16, 20], (
        "due after three minutes, written after the next step"
    )


@pytest.mark.parametrize(
    ("scores", "changes", "when", "best", "last"),
    [
        ({5: 3.0, 10: 1.0, 15: 2.0, 20: 2.5, 25: 2.6}, {"epochs": 5}, 1, 10, 25),
        (
            {3: 3.0, 6: 1.0, 9: 2.0},
            {"epochs": 2, "evaluate_every_epochs": 0, "evaluate_every_steps": 3},
            0,
            6,
            10,
        ),
    ],
    ids=["among those that are due", "where none is due"],
)
def test_the_best_one_stays_and_has_a_link(
    scores: Any,
    changes: Any,
    when: int,
    best: int,
    last: int,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    score_after(scores, monkeypatch)
    checkpoint = CheckpointConfig(every_epochs=when, keep_last=1, keep_best=1)
    trainer_of(output_dir=str(tmp_path), checkpoint=checkpoint, **changes).fit(
        classes(20), classes(8)
    )
    assert steps_kept(tmp_path) == [best, last]
    assert (tmp_path / "checkpoints" / "best.pt").resolve().name == f"step-{best:08}.pt"


def test_an_epoch_s_end_is_saved_also_where_its_last_step_was(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The evaluation, the record and the epoch's number are in the file; the best has its link."""
    score_after({5: 3.0, 10: 1.0}, monkeypatch)
    checkpoint = CheckpointConfig(every_steps=5, keep_last=1)
    trainer_of(epochs=2, output_dir=str(tmp_path), checkpoint=checkpoint).fit(
        classes(20), classes(8)
    )
    state = load_checkpoint(tmp_path / "checkpoints" / "best.pt")
    assert (state["step"], state["epoch"], state["samples_seen"], len(state["records"])) == (
        10,
        2,
        0,
        2,
    )
    assert state["scores"] == {5: 3.0, 10: 1.0}


def test_sums_of_a_checkpoint_do_not_reach_the_next_epoch(tmp_path: Path) -> None:
    """Where a checkpoint was written amid an epoch, and none at its end."""
    plain = trainer_of(epochs=3).fit(classes(20))
    checkpoint = CheckpointConfig(every_epochs=0, every_steps=3, keep_best=0)
    saved = trainer_of(epochs=3, output_dir=str(tmp_path), checkpoint=checkpoint).fit(classes(20))
    assert [record.train for record in saved] == [record.train for record in plain]


# Callbacks, figures and files.


def test_callbacks_are_called_at_their_moments_in_their_order(
    tmp_path: Path, page: telemetry.TelemetryPage
) -> None:
    """And may take longer than --stall-timeout: no step is expected meanwhile."""
    expected = set()
    long = Callback()
    for name in (
        "on_before_optimizer_step",
        "on_step",
        "on_evaluation",
        "on_epoch",
        "on_checkpoint",
    ):
        setattr(long, name, lambda *_: expected.add(page.read()))
    first = EventRecorder()
    second = EventRecorder()
    second.events = first.events
    options: dict[str, Any] = {
        "batch_size": 10,
        "max_grad_norm": 1.0,
        "output_dir": str(tmp_path),
        "checkpoint": NEVER,
    }
    trainer = trainer_of(first, second, long, **options)
    trainer.fit(classes(20), classes(8))
    events = [event for event, _ in itertools.groupby(first.events)]
    assert len(first.events) == 2 * len(events)
    steps = [("gradient", True), ("step", 1), ("gradient", True), ("step", 2)]
    epoch = [("evaluation", 2), ("epoch", 2, 1), ("checkpoint", "step-00000002.pt")]
    assert events == [("start", 2), *steps, *epoch, ("end", 2)]
    assert first.trainers == second.trainers == {id(trainer)}
    assert expected == {0}


def test_the_lines_of_figures(tmp_path: Path) -> None:
    """And the settings, which are there to be read again."""
    changes: dict[str, Any] = {
        "epochs": 2,
        "log_every": 2,
        "evaluate_every_steps": 3,
        "evaluate_every_epochs": 2,
        "warmup_steps": 9,
    }
    trainer = trainer_of(
        output_dir=str(tmp_path), checkpoint=CheckpointConfig(every_minutes=7.5), **changes
    )
    records = trainer.fit(classes(20), classes(8))
    assert read_config(Config, [f"--config={tmp_path / 'config.yaml'}"]) == trainer.config
    found = lines(tmp_path)
    kinds = [(line["kind"], line["step"]) for line in found]
    assert [step for kind, step in kinds if kind == "step"] == [2, 4, 6, 8, 10]
    assert [step for kind, step in kinds if kind == "evaluation"] == [3, 6, 9, 10]
    epochs = [line for line in found if line["kind"] == "epoch"]
    assert [(line["epoch"], line["step"], line["loss"]) for line in epochs] == [
        (1, 5, records[0].train["loss"]),
        (2, 10, records[1].train["loss"]),
    ]
    assert epochs[1]["val/loss"] == records[1].val["loss"]
    assert [line["lr"] for line in found if line["kind"] == "step"] == pytest.approx(
        [0.02, 0.04, 0.06, 0.08, 0.1]
    )
    assert kinds.index(("step", 10)) < kinds.index(("evaluation", 10)) < kinds.index(("epoch", 10))


def from_the_guide(name: str) -> Any:
    """The class or function of this name in docs/guides/training.md."""
    text = (Path(__file__).parents[2] / "docs" / "guides" / "training.md").read_text()
    block = next(part for part in text.split("```python\n")[1:] if name in part)
    names: dict[str, Any] = {"srunddp": srunddp, "torch": torch}
    exec(block.partition("```")[0], names)
    return names[name]


def test_the_callback_of_the_docs_traces_its_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    trainer_of(from_the_guide("Trace")(), epochs=4).fit(classes(20))
    found = {event["name"] for event in json.loads(Path("trace.json").read_text())["traceEvents"]}
    assert {name for name in found if name.startswith("ProfilerStep#")} == {
        f"ProfilerStep#{n}" for n in range(10, 15)
    }


def predictions(world: LocalWorld, samples: int) -> tuple[torch.Tensor, torch.Tensor]:
    """By the guide, and by one forward pass."""
    torch.manual_seed(0)
    model = nn.Linear(8, 4)
    data = classes(samples)
    expected = model(data.tensors[0]).detach()
    return from_the_guide("predict")(model, data, world), expected


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_guides_predictions_are_of_each_sample_in_its_place(ranks: int, tmp_path: Path) -> None:
    for found, expected in run_ranks(ranks, tmp_path, predictions, 131):
        torch.testing.assert_close(found, expected)


def test_the_guides_callback_ends_a_training_at_a_loss_that_is_not_finite() -> None:
    model = nn.Linear(8, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=math.inf)
    trainer = trainer_of(from_the_guide("StopOnNaN")(), model=model, optimizer=optimizer)
    with pytest.raises(FloatingPointError, match="step 2"):
        trainer.fit(classes(20))


def test_without_an_output_dir_nothing_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    trainer_of(evaluate_every_steps=2).fit(classes(20), classes(8))
    assert list(tmp_path.iterdir()) == []


# Resuming.


def interrupted(folder: Path, **changes: Any) -> dict[str, Any]:
    """A run that was killed after its 7th step, with checkpoints of the 3rd and 6th; what to go on
    with.
    """
    checkpoint = CheckpointConfig(every_epochs=0, every_steps=3, keep_last=3)
    options: dict[str, Any] = {"epochs": 2, "output_dir": str(folder), "checkpoint": checkpoint}
    with pytest.raises(KeyboardInterrupt):
        trainer_of(Stop(7), **options | changes).fit(classes(20), classes(8))
    for thread in threading.enumerate():  # it is written beside training
        if thread.name == "checkpoint":
            thread.join()
    assert 6 in steps_kept(folder)
    return options | changes


def test_a_run_goes_on_from_its_newest_checkpoint(tmp_path: Path) -> None:
    whole = trainer_of(epochs=2)
    whole.fit(classes(20), classes(8))
    options = interrupted(tmp_path)
    again = trainer_of(**options, resume="auto")
    assert again.fit(classes(20), classes(8)) == whole.state.records
    assert same(again.model.state_dict(), whole.model.state_dict())
    steps = [line["step"] for line in lines(tmp_path) if line["kind"] == "epoch"]
    assert steps == [5, 10]


@pytest.mark.parametrize("resume", ["never", "an older checkpoint"])
def test_a_job_that_slurm_started_again_resumes_in_any_case(
    resume: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = interrupted(tmp_path)
    if resume != "never":
        resume = str(
            shutil.copy(tmp_path / "checkpoints" / "step-00000003.pt", tmp_path / "elsewhere.pt")
        )
    recorder = EventRecorder()
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    trainer_of(recorder, **options, resume=resume).fit(classes(20), classes(8))
    assert recorder.of("step") == [7, 8, 9, 10]


def test_a_folder_with_an_earlier_run_s_checkpoints_is_refused(tmp_path: Path) -> None:
    options = interrupted(tmp_path)
    with pytest.raises(
        ConfigError, match=r"step-\d+.pt exists .* and resume is never; .* resume=auto"
    ):
        trainer_of(**options).fit(classes(20), classes(8))


def test_a_run_from_another_folder_saves_in_its_own(tmp_path: Path) -> None:
    """Also where nothing is left to do."""
    for folder, resume in (
        ("first", "never"),
        ("second", str(tmp_path / "first/checkpoints/step-00000005.pt")),
    ):
        trainer_of(output_dir=str(tmp_path / folder), resume=resume).fit(classes(20))
        assert steps_kept(tmp_path / folder) == [5]


@pytest.mark.parametrize("change", ["model", "groups", "other file", "version"])
def test_a_checkpoint_of_something_else_is_refused(tmp_path: Path, change: str) -> None:
    options = interrupted(tmp_path)
    path = tmp_path / "checkpoints" / "step-00000006.pt"
    model = nn.Linear(8, 4) if change != "model" else nn.Linear(8, 5)
    trainer = trainer_of(model=model, **options, resume=str(path))
    if change == "groups":
        optimizer = optimizer_of(trainer)
        bias = optimizer.param_groups[0]["params"].pop()
        optimizer.add_param_group({"params": [bias]})
    if change == "other file":
        save_checkpoint(path, {"model": model.state_dict()})
    if change == "version":
        save_checkpoint(path, load_checkpoint(path) | {"version": 99})
    with pytest.raises(
        CheckpointError,
        match=(
            r"^.*(checkpoint (is not of this model|has the version)|not saved by a"
            r" CheckpointManager|the run before steps model.bias in group 0 of the optimizer)"
            r".*; .* -> "
        ),
    ) as caught:
        trainer.fit(classes(20), classes(8))
    assert "\n" not in str(caught.value)


def test_fit_called_again_goes_on_where_it_was(tmp_path: Path) -> None:
    """Also with checkpoints, which are this trainer's own."""
    once = trainer_of(epochs=2)
    once.fit(classes(20))
    twice = trainer_of(epochs=1, output_dir=str(tmp_path))
    assert len(twice.fit(classes(20))) == 1
    assert len(twice.fit(classes(20))) == 1, "all epochs are done"
    twice.config = settings(epochs=2, output_dir=str(tmp_path), tensorboard=False)
    assert twice.fit(classes(20)) == once.state.records
    left = trainer_of(Stop(3), epochs=2)
    with pytest.raises(KeyboardInterrupt):
        left.fit(classes(20))
    left.fit(classes(20))
    for trainer in (twice, left):
        assert same(trainer.model.state_dict(), once.model.state_dict())


def test_a_checkpoint_of_another_precision_or_kernel_resumes(tmp_path: Path) -> None:
    options = interrupted(tmp_path, fused=False)
    trainer = trainer_of(**options | {"fused": True, "precision": "fp16"}, resume="auto")
    trainer.fit(classes(20), classes(8))
    assert trainer.state.step == 10
    assert optimizer_of(trainer).param_groups[0]["fused"]


# Data.


class Numbers(IterableDataset[Any]):
    def __init__(self, samples: int) -> None:
        self.samples = samples

    def __iter__(self) -> Any:
        return (
            (torch.full((8,), float(index)), torch.tensor(index % 4))
            for index in range(self.samples)
        )


class Sized(Numbers):
    def __len__(self) -> int:
        return self.samples


def test_validation_data_of_a_sharded_stream_may_have_indices() -> None:
    (record,) = trainer_of().fit(Numbers(20), classes(8), sharded=True)
    assert record.val["loss"] > 0


def test_a_stream_with_a_length_can_have_a_cosine() -> None:
    trainer = trainer_of(schedule="cosine", epochs=2)
    trainer.fit(Sized(20))
    assert optimizer_of(trainer).param_groups[0]["lr"] == pytest.approx(0.0, abs=1e-9)
    with pytest.raises(
        ConfigError,
        match=(
            r"schedule cosine, and data without a length; .* -> set max_steps, give the data set a"
            r" __len"
        ),
    ):
        trainer_of(schedule="cosine").fit(Numbers(20))


@pytest.mark.parametrize(
    ("data", "changes"),
    [
        (Numbers(0), {}),
        (classes(3), {"dataloader": DataLoaderConfig(num_workers=0, drop_last=True)}),
    ],
)
def test_an_epoch_without_a_step_is_refused(data: Any, changes: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"an epoch without a step; .* -> "):
        trainer_of(**changes).fit(data)


@pytest.mark.parametrize(
    ("order", "words"),
    [
        ([0, 1], "an order that is a list"),
        (
            type("Short", (Sequential,), {"__len__": lambda _: 6})(8),
            "of shape .8,., and its length 6",
        ),
    ],
)
def test_an_order_of_another_kind_or_length_is_refused(order: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=f"{words}.* -> "):
        trainer_of().fit(classes(20), order=order)


# Settings.


AT_LEAST_0 = (
    "evaluate_every_steps evaluate_every_epochs patience warmup_steps log_every seed"
    " checkpoint.keep_best"
)
AT_LEAST_0 += (
    " checkpoint.every_epochs checkpoint.every_steps checkpoint.every_minutes"
    " preemption.lead_seconds"
)
AT_LEAST_0 += " preemption.max_requeues dataloader.num_workers"
AT_LEAST_1 = (
    "epochs max_steps batch_size gradient_accumulation_steps base_batch_size checkpoint.keep_last"
)
AT_LEAST_1 += " dataloader.prefetch_factor num_threads ddp.bucket_cap_mb"


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        *((name, -1, "-1; expected at least 0") for name in AT_LEAST_0.split()),
        *((name, 0, "0; expected at least 1") for name in AT_LEAST_1.split()),
        ("seed", 2**64, "18446744073709551616; expected at most"),
        ("ema_decay", 0.0, "0.0; expected above 0 and below 1"),
        ("ema_decay", 1.0, "1.0; expected above 0 and below 1"),
        ("ema_decay", math.nan, "nan"),
        ("max_grad_norm", 0.0, "0.0; expected above 0"),
        ("max_grad_norm", math.nan, "nan"),
        ("preemption.lead_seconds", math.nan, "nan"),
        ("ddp.comm_hook", "bf-16", "'bf-16'; expected one of none, fp16, bf16"),
        ("precision", "half", "'half'; expected one of fp32, bf16, fp16"),
        ("schedule", "cosin", "'cosin'; expected one of constant, cosine"),
        ("mode", "lowest", "'lowest'; expected one of min, max"),
        (
            "dataloader.multiprocessing_context",
            "thread",
            "'thread'; expected one of fork, spawn, forkserver",
        ),
        ("resume", "auto", "auto, and there is no output_dir"),
        ("resume", "run/best.pt", "run/best.pt, and there is no output_dir"),
    ],
)
def test_settings_that_make_no_sense_are_refused_at_the_start(
    name: str, value: Any, words: str
) -> None:
    group, _, setting = name.rpartition(".")
    if group:
        changes = {group: replace(getattr(settings(), group), **{setting: value})}
    else:
        changes = {name: value}
    with pytest.raises(ConfigError, match=f"^{re.escape(name)} is {re.escape(words)}.* -> "):
        trainer_of(**changes)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"scheduler": ReduceLROnPlateau, "evaluate_every_epochs": 0},
            "ReduceLROnPlateau, and evaluate_every.* -> ",
        ),
        (
            {"warmup_steps": 11, "epochs": 2},
            "warmup_steps is 11; expected at most the 10 steps of the run -> ",
        ),
        ({"monitor": "loss/first"}, "monitor=loss/first; expected one of loss -> "),
        (
            {"parallel": "ddp"},
            "parallel is no longer a setting; .* -> .*docs/examples/fsdp_loop.py",
        ),
        ({"fsdp": None}, "fsdp is no longer a setting; .* -> .*docs/examples/fsdp_loop.py"),
        (
            {"profile": "1:3"},
            "profile is no longer a setting; .* -> .*a callback that calls torch.profiler",
        ),
        (
            {"preemption": PreemptionConfig(signals=("USR3",))},
            "preemption.signals has 'USR3'.* -> ",
        ),
    ],
)
def test_settings_that_do_not_fit_the_run_are_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        trainer_of(**changes).fit(classes(20), classes(8))


@pytest.mark.parametrize("name", ["metrics.jsonl", "config.yaml"])
def test_an_error_at_the_start_leaves_no_signal_handler(name: str, tmp_path: Path) -> None:
    import signal

    before = signal.getsignal(signal.SIGUSR1)
    (tmp_path / name).mkdir()
    with pytest.raises(ConfigError, match=f"{name}.*; expected .* -> "):
        trainer_of(output_dir=str(tmp_path)).fit(classes(20))
    assert signal.getsignal(signal.SIGUSR1) is before


def test_every_checkpoint_is_reported_however_slow_its_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    add = CheckpointDirectory.add

    def slow(directory: CheckpointDirectory, step: int, state: Any) -> None:
        time.sleep(0.02)
        add(directory, step, state)

    monkeypatch.setattr(CheckpointDirectory, "add", slow)
    recorder = EventRecorder()
    often = CheckpointConfig(every_steps=1, keep_last=100, keep_best=0)
    trainer_of(recorder, output_dir=str(tmp_path), checkpoint=often).fit(classes(32))
    # The last one twice: the epoch's end makes another one of it.
    assert list(dict.fromkeys(recorder.of("checkpoint"))) == [
        f"step-{step:08}.pt" for step in range(1, 9)
    ]
