"""Decides when checkpoints are written: at their intervals, and when all ranks agree to stop."""

import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from srunddp.errors import ConfigError
from srunddp.train.checkpoint.file import CheckpointError
from srunddp.train.checkpoint.manager import CheckpointManager
from srunddp.train.config import Config
from srunddp.train.metrics.accumulator import MetricAccumulator
from srunddp.train.preemption.preemption import Preemption
from srunddp.train.state import VERSION, TrainingState
from srunddp.train.world import World

FOLDER = "checkpoints"


# The runs of this process, each by the real path of the folder of its checkpoints.
_runs_of_this_process: dict[str, object] = {}


class StopTraining(Exception):  # noqa: N818 - not an error
    """Ends the training loop on all ranks, which have agreed to stop after this step."""


class CheckpointPolicy:
    """Writes checkpoints and agrees on stops, for a run with an ``output_dir``.

    All ranks call its methods at the same steps.

    Attributes:
        due: Whether a checkpoint is to be written after this step, whatever its number.
    """

    def __init__(
        self,
        config: Config,
        world: World,
        state: TrainingState,
        stack: ExitStack,
        *,
        log: Callable[[str], None],
        written: Callable[[Path], None],
    ) -> None:
        """Begin to note signals, until ``stack`` is closed.

        Args:
            config: The settings of the training.
            world: The ranks, all of which create this.
            state: The state of the training.
            stack: Closed by the caller when the training is over.
            log: Prints a line for the user, on rank 0.
            written: Called on rank 0 with the path of each complete checkpoint.

        Raises:
            ConfigError: Rank 0 cannot write to the folder, or another Trainer of this process has
                used it. PeerError on the other ranks.
        """
        self.due = False
        self._config = config
        self._world = world
        self._state = state
        self._log = log
        self._written = written
        # Begin to note signals first, so that a signal does not end a rank that loads its
        # checkpoint.
        self._preemption = stack.enter_context(Preemption(world, config.preemption))
        keep = config.checkpoint
        folder = Path(config.output_dir or ".").absolute() / FOLDER
        self._check_folder(folder)
        self._manager = CheckpointManager(
            folder, world, keep_last=keep.keep_last, keep_best=keep.keep_best, log=log
        )
        self._saved: tuple[int, ...] = ()
        self._saved_at = time.monotonic()

    def _check_folder(self, folder: Path) -> None:
        """Refuse the folder of another Trainer of this process, unless a checkpoint is named.

        Otherwise a script that trains one model after another, such as for K folds, would begin the
        second one with the weights of the first.
        """
        run = self._state.identity
        other = _runs_of_this_process.setdefault(str(folder.resolve()), run)
        if other is not run and self._config.resume in ("never", "auto"):
            raise ConfigError(
                f"another Trainer of this process has used {folder.parent}",
                expected="an output_dir for each",
                hint=(
                    "name it by the fold or the phase; to go on with what the other has trained,"
                    " pass resume=PATH of a checkpoint"
                ),
            )

    def restore(self, before: Callable[[Mapping[str, Any]], None]) -> None:
        """Continue from a checkpoint if there is one, and check that the state can be saved.

        Args:
            before: Called with the checkpoint before it is loaded.

        Raises:
            CheckpointError: The checkpoint is not complete, or belongs to another model or version.
            ConfigError: There are checkpoints, and the configuration asks for a new run.
        """
        found = self._manager.load(self._config.resume)
        if found:
            if found.get("version") != VERSION:
                raise CheckpointError(
                    f"this checkpoint has the version {found.get('version', 'none')}",
                    expected=f"one that a Trainer wrote, of version {VERSION}",
                    hint="load its model in the script by srunddp.train.load_checkpoint() instead",
                    where=str(self._manager.loaded),
                )
            before(found)
            self._load(found)
        self._manager.check(self._state.state_dict())

    def _load(self, found: Mapping[str, Any]) -> None:
        state = self._state
        try:
            state.load_state_dict(found)
        # load_state_dict() of torch's models, optimizers and schedulers raises one of these errors
        # if something has another shape or length.
        except (IndexError, KeyError, RuntimeError, ValueError, TypeError) as error:
            raise CheckpointError(
                (
                    "the checkpoint is not of this model and optimizer:"
                    f" {' '.join(str(error).split())[:300]}"
                ),
                expected="those of the script that wrote it",
                hint="start with another output_dir",
            ) from error
        # Scores of different figures cannot be compared: the best checkpoint by the old figure
        # would be kept forever.
        if (found["monitor"], found["mode"]) != (state.monitor, state.mode):
            self._manager.scores.clear()
            self._log(
                f"the best so far was of {found['monitor']} ({found['mode']}); that of"
                f" {state.monitor} ({state.mode}) begins anew"
            )
        self._manager.restore_rng(found, self._config.seed)
        state.step_rng.restore(found["step_random"])
        # Note that this state is saved already, if the loaded checkpoint is in this folder. A
        # checkpoint that was named by its path may be in another folder.
        if self._config.resume in ("never", "auto"):
            self._saved = self._position()
        if self._world.rank == 0:
            self._log(
                f"goes on from {self._manager.loaded}: epochs done: {state.epoch}, steps done:"
                f" {state.step}"
            )

    def begin(self) -> None:
        """Note that steps of another duration begin, such as those of an evaluation.

        All ranks call this at the same step; the next call of :meth:`agree` is a collective.
        """
        self._preemption.restart_interval()

    def agree(self) -> None:
        """Agree with the other ranks, about once a second, whether to stop or to write a
        checkpoint; all ranks call this equally often.

        Raises:
            StopTraining: All ranks stop here.
        """
        stop = self._preemption.should_stop(checkpoint_due=self._due_by_clock())
        if self._preemption.checkpoint_due:
            self.due = True
        if stop:
            raise StopTraining

    def after_step(self, sums: MetricAccumulator | None) -> None:
        """Write a checkpoint if one is due after this step, then agree on a stop.

        Args:
            sums: The figures of the epoch so far.

        Raises:
            StopTraining: All ranks stop here, and a checkpoint is still to be written.
        """
        self._report()
        # Save before agreeing: if the ranks agree on a checkpoint below, they write it after the
        # next step.
        self._save_if_due(self._config.checkpoint.every_steps, self._state.step, sums)
        self.agree()

    def after_epoch(self, sums: MetricAccumulator | None) -> None:
        """Write a checkpoint if one is due at an epoch's end.

        Args:
            sums: The figures of an epoch that ``max_steps`` ends early; None after a full epoch.
        """
        self._save_if_due(self._config.checkpoint.every_epochs, self._state.epoch, sums)

    def _save_if_due(self, every: int, number: int, sums: MetricAccumulator | None) -> None:
        if self.due or (every and number % every == 0):
            self._save(sums)

    def finish(self, sums: MetricAccumulator | None) -> None:
        """Write the last checkpoint, and wait until it is written.

        Args:
            sums: The figures of an epoch that ``max_steps`` ends early; None after a full epoch.

        Raises:
            CheckpointError: The checkpoint could not be written. PeerError on the other ranks.
        """
        self._save_and_wait(sums)

    def save_and_stop(self, sums: MetricAccumulator | None) -> None:
        """Write a checkpoint, and end this rank; on rank 0, requeue the job if that was asked for.

        Args:
            sums: The figures of the epoch so far.

        Raises:
            Stopped: Always, unless the checkpoint could not be written.
        """
        self._preemption.stop(self._state.step, self._save_and_wait(sums))

    def _save_and_wait(self, sums: MetricAccumulator | None) -> Path:
        """Write a checkpoint, wait until it is written, and return its path.

        All ranks wait, although only rank 0 writes: the caller may read the file next, or end the
        rank.
        """
        try:
            return self._save(sums, wait=True)
        finally:
            self._report()

    def _save(self, sums: MetricAccumulator | None, *, wait: bool = False) -> Path:
        """Begin to write a checkpoint, unless this state was saved already; return its path.

        Args:
            sums: The figures of an epoch that is not over; None after a full epoch.
            wait: Wait until the checkpoint is written.
        """
        self.due = False
        state = self._state
        position = self._position()
        # With ``wait`` the file must exist. But the checkpoint of this state may have been skipped
        # because another one was still being written: then wait() returns False on all ranks.
        if position == self._saved and (not wait or self._manager.wait()):
            return self._manager.path(state.step)
        self._saved = position
        self._saved_at = time.monotonic()
        # Without sums the epoch is over, or the state keeps the sums that it was loaded with, of an
        # epoch that max_steps had ended early.
        if sums:
            state.sums = sums.by_rank()
        self._manager.scores.update(state.scores)
        # Save the weights for evaluation: a run that continues from them puts the optimizers into
        # training mode.
        with state.optimizer_modes.evaluating(), state.step_rng.outside():
            state.step_random = state.step_rng.gather()
            return self._manager.save(state.step, state.state_dict(), wait=wait)

    def _position(self) -> tuple[int, ...]:
        """Return values that identify this state among all states of the run.

        The step alone is not enough: the end of an epoch and an evaluation also change what is
        saved.
        """
        return self._state.step, self._state.epoch, self._state.evaluated

    def _due_by_clock(self) -> bool:
        """Return on rank 0 whether ``every_minutes`` have passed; False on other ranks.

        Clocks differ between ranks, and all have to save after the same step, so rank 0's clock
        decides, and ``should_stop()`` tells the others.
        """
        minutes = self._config.checkpoint.every_minutes
        return (
            self._world.rank == 0
            and bool(minutes)
            and time.monotonic() >= self._saved_at + 60 * minutes
        )

    def _report(self) -> None:
        for path in self._manager.report():
            self._written(path)
