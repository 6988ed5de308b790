"""What a callback changes during a run counts: what is trained, and which modules evaluate."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.distributed_c10d import _get_default_store
from torch.optim import lr_scheduler as lrs
from torch.utils.data import TensorDataset

from srunddp.train import Callback, Trainer
from srunddp.train.checkpoint.file import CheckpointError
from srunddp.train.model import ddp
from srunddp.train.progress import EpochRecord
from srunddp.train.world import check_all_leave
from tests.support.facts import tells
from tests.train import problems
from tests.train.local_world import LocalWorld, run_ranks
from tests.train.problems import classes, message

pytestmark = pytest.mark.usefixtures("one_thread")

CLOSE = 1e-12  # of float64
EPOCHS = 4
SAMPLES = 52  # the last step of an epoch is not full


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Linear(8, 4)).double()


class Change(Callback):
    """Freezes and unfreezes a layer at the end of an epoch, or after a step."""

    def __init__(self, *, epoch: int = 0, step: int = 0, frozen: bool = False) -> None:
        self.epoch = epoch
        self.step = step
        self.frozen = frozen

    def on_epoch(self, trainer: Trainer, record: EpochRecord) -> None:
        if record.epoch == self.epoch:
            self.change(trainer)

    def on_step(self, trainer: Trainer, step: int, loss: Tensor | None) -> None:
        if step == self.step:
            self.change(trainer)

    def change(self, trainer: Trainer) -> None:
        layer = trainer.model.get_submodule("0")
        layer.requires_grad_(not self.frozen)
        optimizer = problems.optimizer_of(trainer)
        known = {id(p) for group in optimizer.param_groups for p in group["params"]}
        if not self.frozen and id(layer.weight) not in known:
            optimizer.add_param_group({"params": list(layer.parameters()), "lr": 0.05})


def trained(
    world: LocalWorld, kind: str, first: Callable[[nn.Module], object] | None = None, **changes: Any
) -> list[Tensor]:
    """The weights after a run with a change of this kind, as ``at_epoch``."""
    model = network()
    trainer, data = prepared(world, model, kind, **changes)
    trainer.fit(data, data)
    return [parameter.detach().clone() for parameter in model.parameters()]


KINDS = {
    "unfrozen at an epoch's end": (Change(epoch=2), "frozen, not stepped"),
    "unfrozen at an epoch's end, stepped before": (Change(epoch=2), "frozen"),
    "unfrozen after a step": (Change(step=5), "frozen, not stepped"),
    "frozen at an epoch's end": (Change(epoch=2, frozen=True), ""),
    "frozen after a step": (Change(step=5, frozen=True), ""),
}


def prepared(
    world: LocalWorld, model: nn.Sequential, kind: str, **changes: Any
) -> tuple[Trainer, TensorDataset]:
    callback, first = KINDS[kind]
    if "frozen" in first:
        model[0].requires_grad_(False)
    parameters = list(model[2:].parameters() if "not stepped" in first else model.parameters())
    trainer = problems.trainer_of(
        callback,
        world=world,
        model=model,
        optimizer=torch.optim.AdamW(parameters, lr=0.01),
        batch_size=8 // world.world_size,
        **{"epochs": EPOCHS} | changes,
    )
    return trainer, classes(SAMPLES, torch.float64)


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_frozen_or_unfrozen_amid_a_run_is_trained_as_alone(
    kind: str, tmp_path: Path
) -> None:
    first, second = run_ranks(2, tmp_path, trained, kind)
    alone = trained(LocalWorld(), kind)
    for one, other, by_one in zip(first, second, alone, strict=True):
        assert torch.equal(one, other)
        assert (one - by_one).abs().max() < CLOSE


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_a_run_is_resumed_after_its_change(kind: str, ranks: int, tmp_path: Path) -> None:
    """With what was trained then, and in which groups, whatever the script begins with."""
    folder = str(tmp_path / "run")
    settings: dict[str, Any] = {"output_dir": folder, "resume": "auto"}
    world = LocalWorld()
    if ranks == 1:
        whole = trained(world, kind)
        trained(world, kind, epochs=3, **settings)
        resumed = trained(world, kind, **settings)
    else:
        (whole, _) = run_ranks(2, tmp_path / "whole", trained, kind)
        run_ranks(2, tmp_path / "part", trained_with, kind, settings | {"epochs": 3})
        (resumed, _) = run_ranks(2, tmp_path / "rest", trained_with, kind, settings)
    for one, other in zip(whole, resumed, strict=True):
        assert (one - other).abs().max() < CLOSE


def trained_with(world: LocalWorld, kind: str, changes: dict[str, Any]) -> list[Tensor]:
    return trained(world, kind, **changes)


def differing(world: LocalWorld) -> str:
    """The error where rank 1 alone unfreezes."""
    ddp._CHANGED_WITHIN = timedelta(seconds=3)
    model = network()
    model[0].requires_grad_(False)
    if world.rank == 0:
        change = Change()
    else:
        change = Change(epoch=1)
    trainer = problems.trainer_of(
        change,
        world=world,
        model=model,
        optimizer=torch.optim.SGD(model[2:].parameters(), lr=0.1),
        epochs=2,
    )
    return message(lambda: trainer.fit(classes(32, torch.float64)))


def test_ranks_that_differ_at_an_epochs_end_are_named(tmp_path: Path) -> None:
    first, second = run_ranks(2, tmp_path, differing)
    words = "other parameters require a gradient on rank {} than on rank {}: it {} model.0.bias"
    assert first.startswith(words.format(1, 0, "has"))
    assert second.startswith(words.format(0, 1, "has not"))


def differing_after_a_step(world: LocalWorld) -> str:
    """The error where rank 1 alone unfreezes; none on rank 0, which ends with it."""
    ddp._CHANGED_WITHIN = timedelta(seconds=3)
    model = network()
    model[0].requires_grad_(False)
    if world.rank == 0:
        change = Change()
    else:
        change = Change(step=2)
    trainer = problems.trainer_of(
        change,
        world=world,
        model=model,
        optimizer=torch.optim.SGD(model[2:].parameters(), lr=0.1),
        epochs=2,
    )
    with suppress(RuntimeError):
        return message(lambda: trainer.fit(classes(32, torch.float64)))
    return ""


def test_a_rank_that_changes_alone_after_a_step_is_refused(tmp_path: Path) -> None:
    """The others are in the next step by then, and end with this rank."""
    first, second = run_ranks(2, tmp_path, differing_after_a_step)
    assert first == ""
    assert tells(second, "requires a gradient", "rank 1", "not", "rank 0")


class ChangeAmidAStep(Callback):
    def on_before_optimizer_step(self, trainer: Trainer) -> None:
        trainer.model.get_submodule("0").requires_grad_(False)


def changed_amid_a_step(world: LocalWorld) -> str:
    trainer = problems.trainer_of(ChangeAmidAStep(), world=world, model=network())
    return message(lambda: trainer.fit(classes(32, torch.float64)))


def test_a_change_amid_a_step_is_refused(tmp_path: Path) -> None:
    for text in run_ranks(2, tmp_path, changed_amid_a_step):
        assert tells(text, "on_before_optimizer_step", "gradient")


SCHEDULES: dict[str, dict[str, Any]] = {
    "cosine": {"schedule": "cosine", "warmup_steps": 2},
    "lambda": {"scheduler": lambda o: lrs.LambdaLR(o, lambda step: 0.9**step)},
    "steps": {"scheduler": lambda o: lrs.StepLR(o, 3)},
    "plateau": {"scheduler": lambda o: lrs.ReduceLROnPlateau(o, patience=0)},
    "one cycle": {"scheduler": lambda o: lrs.OneCycleLR(o, 0.01, total_steps=60)},
    "cyclic": {
        "scheduler": lambda o: lrs.CyclicLR(o, 0.001, 0.01, step_size_up=3, cycle_momentum=False)
    },
    "sequential": {
        "scheduler": lambda o: lrs.SequentialLR(
            o, [lrs.ConstantLR(o), lrs.LambdaLR(o, lambda step: 0.9**step)], [9]
        )
    },
    "warm restarts": {"scheduler": lambda o: lrs.CosineAnnealingWarmRestarts(o, 5)},
}


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_group_that_is_added_is_scheduled_as_well(schedule: str, tmp_path: Path) -> None:
    """And resumed. torch's schedulers fail at more groups than they began with."""
    kind = "unfrozen at an epoch's end"
    options = {"output_dir": str(tmp_path / "run"), "resume": "auto", **SCHEDULES[schedule]}
    if schedule == "cosine":
        options["max_steps"] = 28
    whole = trained(LocalWorld(), kind, **options | {"output_dir": None, "resume": "never"})
    trained(LocalWorld(), kind, **options | {"epochs": 3} | cut(schedule, 21))
    resumed = trained(LocalWorld(), kind, **options)
    if schedule != "cosine":  # whose end is another with fewer steps
        for one, other in zip(whole, resumed, strict=True):
            assert (one - other).abs().max() < CLOSE


def cut(schedule: str, steps: int) -> dict[str, Any]:
    return {"max_steps": steps} if schedule == "cosine" else {}


def test_a_rate_that_is_scaled_is_that_of_an_added_group_too() -> None:
    model = network()
    model[0].requires_grad_(False)
    added: list[float] = []

    def add(trainer: Trainer, step: int) -> None:
        if step == 1:
            optimizer = problems.optimizer_of(trainer)
            optimizer.add_param_group({"params": [model.get_parameter("0.weight")]})
            model.get_parameter("0.weight").requires_grad_(True)
            added.extend(group["lr"] for group in optimizer.param_groups)

    trainer = problems.trainer_of(
        problems.OnStep(add),
        model=model,
        optimizer=torch.optim.SGD(model[2:].parameters(), lr=0.01),
        scale_lr="linear",
        base_batch_size=1,
    )
    trainer.fit(classes(16, torch.float64))
    assert added == pytest.approx([0.04, 0.04])


def test_a_second_trainer_of_a_process_is_compared_anew(tmp_path: Path) -> None:
    """What ranks have told each other of the first one's changes is not taken for the second's."""
    for one, other in run_ranks(2, tmp_path, trained_twice):
        assert torch.equal(one, other)


def trained_twice(world: LocalWorld) -> list[Tensor]:
    trained(world, "unfrozen after a step")
    second = trained(world, "frozen after a step")
    alone = trained(world, "frozen after a step")
    return [second[0], alone[0]]


def test_an_average_and_another_module_are_refused() -> None:
    def replace(trainer: Trainer, step: int) -> None:
        assert isinstance(trainer.model, nn.Sequential)
        trainer.model[3] = nn.Linear(8, 4).double()

    trainer = problems.trainer_of(
        problems.OnStep(replace), model=network(), epochs=2, ema_decay=0.9
    )
    assert message(lambda: trainer.fit(classes(16, torch.float64))).startswith("ema_decay, and a")


# An optimizer's state belongs to parameters by their names.


class Layers(nn.Module):
    """The same two layers, made in one order or the other, so that their parameters are."""

    def __init__(self, *names: str) -> None:
        super().__init__()
        sizes = {"a": (8, 16), "b": (16, 8), "c": (16, 8)}
        for name in names:
            torch.manual_seed(ord(name))
            self.add_module(name, nn.Linear(*sizes[name], bias=False))
        self.double()

    def forward(self, inputs: Tensor) -> Tensor:
        last = self.get_submodule("b" if hasattr(self, "b") else "c")
        outputs: Tensor = last(self.get_submodule("a")(inputs))
        return outputs


def resumed(*names: str, folder: Path, epochs: int, fused: bool = True) -> nn.Module:
    model = Layers(*names)
    trainer = problems.trainer_of(
        model=model,
        optimizer=torch.optim.Adam(model.parameters(), lr=0.01),
        epochs=epochs,
        fused=fused,
        output_dir=str(folder),
        resume="auto",
    )
    trainer.fit(classes(32, torch.float64))
    return model


@pytest.mark.parametrize("fused", [True, False])
def test_layers_in_another_order_keep_their_own_state(fused: bool, tmp_path: Path) -> None:
    whole = resumed("a", "b", folder=tmp_path / "whole", epochs=4, fused=fused)
    resumed("a", "b", folder=tmp_path / "part", epochs=2, fused=fused)
    other = resumed("b", "a", folder=tmp_path / "part", epochs=4, fused=fused)
    for name in ("a.weight", "b.weight"):
        apart = whole.get_parameter(name) - other.get_parameter(name)
        assert apart.abs().max() < CLOSE


def test_renamed_parameters_are_refused_with_both_names(tmp_path: Path) -> None:
    resumed("a", "b", folder=tmp_path, epochs=1)
    with pytest.raises(CheckpointError) as caught:
        resumed("a", "c", folder=tmp_path, epochs=2)
    assert tells(str(caught.value), "model.b.weight", "model.c.weight")


# Modes.


def normalised() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 4))


class EvalOfBatchNorm(Callback):
    def __init__(self) -> None:
        self.means: list[Tensor] = []

    def on_epoch(self, trainer: Trainer, record: EpochRecord) -> None:
        trainer.model.get_submodule("1").eval()
        self.means.append(trainer.model.get_buffer("1.running_mean").clone())


def test_a_module_that_a_callback_puts_into_evaluation_stays_so() -> None:
    callback = EvalOfBatchNorm()
    trainer = problems.trainer_of(callback, model=normalised(), epochs=3)
    trainer.fit(classes(32), classes(16))
    first, second, third = callback.means
    assert torch.equal(first, second)
    assert torch.equal(first, third)
    assert trainer.model.training


@pytest.mark.parametrize("ema_decay", [None, 0.9])
@pytest.mark.parametrize("training", [True, False])
def test_evaluate_leaves_each_module_as_it_was(training: bool, ema_decay: float | None) -> None:
    trainer = problems.trainer_of(model=normalised(), ema_decay=ema_decay)
    trainer.model.train(training)
    trainer.model.get_submodule("2").train(not training)
    before = [module.training for module in trainer.model.modules()]
    trainer.evaluate(classes(16))
    assert [module.training for module in trainer.model.modules()] == before


class EvaluatesByItself(Callback):
    def on_epoch(self, trainer: Trainer, record: EpochRecord) -> None:
        trainer.model.eval()


def test_a_model_that_a_callback_leaves_in_evaluation_is_trained_on() -> None:
    """As that of from_pretrained is: nobody means to train without dropout after an epoch."""
    trainer = problems.trainer_of(EvaluatesByItself(), model=normalised(), epochs=2)
    modes = []
    dropout = trainer.model.get_submodule("2")
    dropout.register_forward_hook(lambda module, *_: modes.append(module.training))
    trainer.fit(classes(16))
    assert all(modes)


def test_modes_are_put_back_where_an_evaluation_fails() -> None:
    trainer = problems.trainer_of(model=normalised())
    data = classes(16)
    wrong = TensorDataset(data.tensors[0][:, :3], data.tensors[1])
    with pytest.raises(RuntimeError):
        trainer.evaluate(wrong)
    assert trainer.model.training


# A rank that leaves.


def leave(world: LocalWorld, ranks: list[int]) -> str:
    """How ``fit()`` ends where these ranks call sys.exit() in a callback."""

    def leaves(trainer: Trainer, step: int) -> None:
        if step == 2 and world.rank in ranks:
            sys.exit(0)

    trainer = problems.trainer_of(problems.OnStep(leaves), world=world, model=network())
    try:
        trainer.fit(classes(32, torch.float64))
    except SystemExit as error:
        return f"exit {error.code}"
    return "end"


def test_all_ranks_may_leave_by_sys_exit(tmp_path: Path) -> None:
    assert run_ranks(2, tmp_path, leave, [0, 1]) == ["exit 0"] * 2


def leave_alone(world: LocalWorld) -> str:
    store = _get_default_store()
    if world.rank == 0:
        # A rank that ends takes its connections with it, also from one that still makes its own.
        store.wait(["told"], timedelta(seconds=60))
        return ""
    told = message(lambda: check_all_leave(world, timedelta(seconds=0.5)))
    store.set("told", "1")
    return told


def test_a_rank_that_leaves_alone_fails(tmp_path: Path) -> None:
    """Else the others would wait for it until the time limit of a collective."""
    _, second = run_ranks(2, tmp_path, leave_alone)
    assert tells(second, "rank 1", "exit code 0", "rank 0", "not")


def test_patience_without_evaluations_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    trainer = problems.trainer_of(patience=2, evaluate_every_epochs=0)
    trainer.fit(classes(16), classes(16))
    assert "patience=2 has no effect" in capsys.readouterr().err
