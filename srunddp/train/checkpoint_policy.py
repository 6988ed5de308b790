"""When checkpoints are written: at their times, and where all ranks agree to stop."""

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


# Which run of this process has its checkpoints in a folder, by the folder's real path.
_runs_of_this_process: dict[str, object] = {}


class StopTraining(Exception):  # noqa: N818 - it is no error
    """All ranks have agreed to stop after this step."""


class CheckpointPolicy:
    """Writes checkpoints and agrees on stops, for a run with an ``output_dir``.

    All ranks call its methods at the same steps.

    Attributes:
        due: A checkpoint is to be written after this step, whatever its number.
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
            config: Of the training.
            world: All of its ranks make this.
            state: Of the training.
            stack: Is closed when the training is over.
            log: Prints a line for the user, on rank 0.
            written: Called on rank 0 with the path of each checkpoint that is whole.

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
        # First, so that a signal is noted rather than the end of a rank that loads its checkpoint.
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

        A script that trains one model after the other, such as those of K folds, would else begin
        the second one with the first one's weights.
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
        """Go on from a checkpoint where there is one; and see that the state can be saved.

        Args:
            before: Called with the checkpoint before it is loaded.

        Raises:
            CheckpointError: It is not whole, or of another model or version.
            ConfigError: There are checkpoints, and the configuration says to begin anew.
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
        # What torch's load_state_dict() of models, optimizers and schedulers raises where something
        # has another shape or length.
        except (IndexError, KeyError, RuntimeError, ValueError, TypeError) as error:
            raise CheckpointError(
                (
                    "the checkpoint is not of this model and optimizer:"
                    f" {' '.join(str(error).split())[:300]}"
                ),
                expected="those of the script that wrote it",
                hint="start with another output_dir",
            ) from error
        # Scores of two figures cannot be compared: the best by the old one would stay for ever.
        if (found["monitor"], found["mode"]) != (state.monitor, state.mode):
            self._manager.scores.clear()
            self._log(
                f"the best so far was of {found['monitor']} ({found['mode']}); that of"
                f" {state.monitor} ({state.mode}) begins anew"
            )
        self._manager.restore_rng(found, self._config.seed)
        state.step_rng.restore(found["step_random"])
        # This state needs no second checkpoint, if the one that has it is in this folder. One that
        # was named by its path may be in another.
        if self._config.resume in ("never", "auto"):
            self._saved = self._position()
        if self._world.rank == 0:
            self._log(
                f"goes on from {self._manager.loaded}: epochs done: {state.epoch}, steps done:"
                f" {state.step}"
            )

    def begin(self) -> None:
        """Begin steps of another kind, as of an evaluation; all ranks call this."""
        self._preemption.restart_interval()

    def agree(self) -> None:
        """Agree with the other ranks, about once a second; all call this equally often.

        Raises:
            StopTraining: All stop here.
        """
        stop = self._preemption.should_stop(checkpoint_due=self._due_by_clock())
        if self._preemption.checkpoint_due:
            self.due = True
        if stop:
            raise StopTraining

    def after_step(self, sums: MetricAccumulator | None) -> None:
        """Write a checkpoint if one is due after this step; stop if that is agreed on.

        Args:
            sums: The figures of the epoch so far.

        Raises:
            StopTraining: All stop here, and a checkpoint is still to be written.
        """
        self._report()
        # Save before agreeing: a checkpoint that they agree on below is written after the next
        # step.
        self._save_if_due(self._config.checkpoint.every_steps, self._state.step, sums)
        self.agree()

    def after_epoch(self, sums: MetricAccumulator | None) -> None:
        """Write a checkpoint if one is due at an epoch's end.

        Args:
            sums: The figures of an epoch that ``max_steps`` cuts; None of one that is over.
        """
        self._save_if_due(self._config.checkpoint.every_epochs, self._state.epoch, sums)

    def _save_if_due(self, every: int, number: int, sums: MetricAccumulator | None) -> None:
        if self.due or (every and number % every == 0):
            self._save(sums)

    def finish(self, sums: MetricAccumulator | None) -> None:
        """Have the last checkpoint written when this returns.

        Args:
            sums: As in :meth:`after_epoch`.

        Raises:
            CheckpointError: It could not be written. PeerError on the other ranks.
        """
        self._save_and_wait(sums)

    def save_and_stop(self, sums: MetricAccumulator | None) -> None:
        """Write a checkpoint, and end this rank.

        Args:
            sums: The figures of the epoch so far.

        Raises:
            Stopped: Always, unless the checkpoint could not be written.
        """
        self._preemption.stop(self._state.step, self._save_and_wait(sums))

    def _save_and_wait(self, sums: MetricAccumulator | None) -> Path:
        """Write a checkpoint, and return its path when it is there.

        What follows may read it, or end this rank, and with it rank 0 that writes.
        """
        try:
            return self._save(sums, wait=True)
        finally:
            self._report()

    def _save(self, sums: MetricAccumulator | None, *, wait: bool = False) -> Path:
        """Begin to write a checkpoint, unless there is one of just this state; return its path."""
        self.due = False
        state = self._state
        position = self._position()
        # With ``wait`` it must be there, and the one of this state may have been left out, as
        # another was still being written. wait() tells the same to all ranks.
        if position == self._saved and (not wait or self._manager.wait()):
            return self._manager.path(state.step)
        self._saved = position
        self._saved_at = time.monotonic()
        # Without sums an epoch is over, or one that max_steps has cut stays as it was loaded.
        if sums:
            state.sums = sums.by_rank()
        self._manager.scores.update(state.scores)
        # What is saved is what was evaluated; a run that goes on begins by training.
        with state.optimizer_modes.evaluating(), state.step_rng.outside():
            state.step_random = state.step_rng.gather()
            return self._manager.save(state.step, state.state_dict(), wait=wait)

    def _position(self) -> tuple[int, ...]:
        """Return what tells this state from any other of the run.

        The step is not enough: an epoch's end, and an evaluation, change what is saved after it.
        """
        return self._state.step, self._state.epoch, self._state.evaluated

    def _due_by_clock(self) -> bool:
        """Return whether ``every_minutes`` are over, on rank 0; False on the others.

        The ranks' clocks differ, and all have to save after the same step: rank 0's counts, and
        ``should_stop()`` tells the others.
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
