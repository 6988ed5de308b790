"""What the Trainer makes of the programs; these functions run in each rank of a world."""

from __future__ import annotations

import contextlib
import io
import traceback
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from torch import Tensor
from torch.optim import Optimizer

from srunddp.train import (
    Callback,
    CheckpointConfig,
    Config,
    DataLoaderConfig,
    EpochRecord,
    Trainer,
    load_checkpoint,
)
from tests.train.local_world import LocalWorld
from tests.train.referee.plain import Change, Figures, Outcome, Problem, weights_of
from tests.train.referee.programs import PROGRAMS, Program

Result = Outcome | str
"""What has come of a program, or the error that it ended in: empty where it was left to others."""


class Notes(Callback):
    """Notes the figures of all evaluations, also over a resume.

    Attributes:
        resumed_at: How many steps were done when this run began.
        by_step: The figures by step.
    """

    def __init__(self) -> None:
        self.resumed_at = 0
        self.by_step: dict[int, Figures] = {}

    def on_fit_start(self, trainer: Trainer) -> None:
        self.resumed_at = trainer.state.step

    def on_evaluation(self, trainer: Trainer, figures: Mapping[str, float]) -> None:
        self.by_step[trainer.state.step] = dict(figures)

    def state_dict(self) -> dict[str, Any]:
        return {"by_step": self.by_step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.by_step = state["by_step"]


class Changes(Callback):
    """Calls what a problem has to be called."""

    def __init__(self, problem: Problem) -> None:
        self._problem = problem

    def on_before_optimizer_step(self, trainer: Trainer) -> None:
        call(self._problem.before_step, trainer, trainer.state.step + 1)

    def on_step(self, trainer: Trainer, step: int, loss: Tensor | None) -> None:
        call(self._problem.after_step, trainer, step)

    def on_epoch(self, trainer: Trainer, record: EpochRecord) -> None:
        call(self._problem.after_epoch, trainer, record.epoch)


def call(change: Change | None, trainer: Trainer, number: int) -> None:
    if change is not None:
        change(trainer.model, optimizers_of(trainer), number)


class Crash(Callback):
    """Ends a training in the step after this one."""

    def __init__(self, last_step: int) -> None:
        self._last_step = last_step

    def on_step(self, trainer: Trainer, step: int, loss: Tensor | None) -> None:
        if step > self._last_step:
            raise CrashError


class CrashError(Exception):
    """The end that was asked for."""


def optimizers_of(trainer: Trainer) -> Sequence[Optimizer]:
    if isinstance(trainer.optimizer, Optimizer):
        return [trainer.optimizer]
    return trainer.optimizer


class Run:
    """One run of a program on the ranks of a world, in a folder that the next one goes on from.

    Args:
        world: The ranks.
        program: What is trained.
        folder: Of this training.
        last_step: Where these ranks leave it to others; None to train to the end.
    """

    def __init__(
        self, world: LocalWorld, program: Program, folder: Path, last_step: int | None = None
    ) -> None:
        problem = program.problem
        self._program = program
        self._folder = folder
        self._last_step = last_step
        self._notes = Notes()
        self._loss_function = self._made_loss_function()
        model = problem.model()
        optimizers = problem.optimizers(model, self._loss_function)
        self._trainer = Trainer(
            model,
            optimizers if len(optimizers) > 1 else optimizers[0],
            self._loss_function,
            self._config(world.world_size),
            world=world,
            step=program.step,
            weight=program.weight,
            metrics=program.metrics,
            val_metrics=program.val_metrics,
            scheduler=[schedule.make for schedule in program.schedules],
            callbacks=self._callbacks(),
        )

    def _made_loss_function(self) -> Any:
        if self._program.step is not None or self._program.returns_loss:
            return None
        return self._program.problem.loss_function()

    def _config(self, world_size: int) -> Config:
        """The program's settings, and what the problem says; a step has the same samples on any
        number of ranks.
        """
        program = self._program
        problem = program.problem
        micro_batches = world_size * program.config.gradient_accumulation_steps
        assert problem.step_samples % micro_batches == 0
        mode: Literal["min", "max"]
        if problem.greater_is_better:
            mode = "max"
        else:
            mode = "min"
        if program.cut_by_max_steps and self._last_step is not None:
            max_steps: int | None = self._last_step
        else:
            max_steps = problem.max_steps
        return replace(
            program.config,
            epochs=problem.epochs,
            max_steps=max_steps,
            batch_size=problem.step_samples // micro_batches,
            max_grad_norm=problem.max_grad_norm,
            ema_decay=problem.ema_decay,
            evaluate_every_steps=problem.evaluate_every_steps,
            monitor=problem.monitor,
            mode=mode,
            patience=problem.patience,
            output_dir=str(self._folder),
            resume="auto",
            log_every=0,
            tensorboard=False,
            dataloader=DataLoaderConfig(num_workers=program.workers, drop_last=problem.drop_last),
            checkpoint=CheckpointConfig(every_steps=self._last_step or 0),
        )

    def _callbacks(self) -> list[Callback]:
        problem = self._program.problem
        found: list[Callback] = [self._notes]
        if problem.before_step or problem.after_step or problem.after_epoch:
            found.append(Changes(problem))
        if self._last_step is not None and not self._program.cut_by_max_steps:
            found.append(Crash(self._last_step))
        return found

    def fit(self) -> Outcome:
        """Train to the end, or until it is left to others.

        Raises:
            CrashError: It was left amid the training.
        """
        program = self._program
        problem = program.problem
        if program.data is None:
            data = problem.train
        else:
            data = program.data()
        self._trainer.fit(
            data,
            problem.val,
            order=program.order,
            collate=problem.collate,
            val_collate=problem.collate,
        )
        return self._outcome()

    def _outcome(self) -> Outcome:
        trainer = self._trainer
        problem = self._program.problem
        best = load_checkpoint(self._folder / "checkpoints" / "best.pt")
        if problem.ema_decay is None:
            best_weights = best["model"]
        else:
            best_weights = best["ema"]
        if problem.val is None:
            last = {}
        else:
            last = trainer.evaluate(problem.val, collate=problem.collate)
        groups = [group for each in optimizers_of(trainer) for group in each.param_groups]
        records = trainer.state.records
        return Outcome(
            weights=weights_of(trainer.model, self._loss_function, trainer.averaged),
            rates=[float(group["lr"]) for group in groups],
            train={record.epoch: dict(record.train) for record in records},
            val={record.epoch: dict(record.val) for record in records if record.val},
            evaluations=self._notes.by_step,
            last=last,
            resumed_at=self._notes.resumed_at,
            steps=trainer.state.step,
            best_step=best["step"],
            best_weights=best_weights,
        )


def train_whole(world: LocalWorld, folder: Path, names: Sequence[str]) -> dict[str, Result]:
    """Train these programs to the end, each in a folder of its own."""
    return {name: result(world, folder, name) for name in names}


def train_first_part(world: LocalWorld, folder: Path, cuts: Mapping[str, int]) -> dict[str, Result]:
    """Train each program to a step, and leave the rest to other ranks."""
    return {name: result(world, folder, name, step) for name, step in cuts.items()}


def result(world: LocalWorld, folder: Path, name: str, last_step: int | None = None) -> Result:
    """What comes of one program; an error ends this program alone."""
    program = PROGRAMS[name]()
    own_folder = folder / str(list(PROGRAMS).index(name))
    with silence():
        try:
            return Run(world, program, own_folder, last_step).fit()
        except CrashError:
            return ""
        except Exception:
            return traceback.format_exc()


@contextlib.contextmanager
def silence() -> Iterator[None]:
    """The lines of so many epochs are of no use."""
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        yield
