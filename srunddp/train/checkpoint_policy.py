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


# The run of this process that has its checkpoints in a folder, by the folder's real path.
_runs_of_this_process: dict[str, object] = {}


class StopTraining(Exception):  # noqa: N818 - not an error
    """All ranks have agreed to stop after this step."""


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
        # Do this first, so that a signal is noted instead of ending a rank that loads its
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
        # load_state_dict() of torch's models, optimizers and schedulers raises these if something
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
        # Scores of different figures cannot be compared: the best by the old figure would stay
        # forever.
        if (found["monitor"], found["mode"]) != (state.monitor, state.mode):
            self._manager.scores.clear()
            self._log(
                f"the best so far was of {found['monitor']} ({found['mode']}); that of"
                f" {state.monitor} ({state.mode}) begins anew"
            )
        self._manager.restore_rng(found, self._config.seed)
        state.step_rng.restore(found["step_random"])
        # This state needs no second checkpoint if the loaded one is in this folder. A checkpoint
        # that was named by its path may be in another folder.
        if self._config.resume in ("never", "auto"):
            self._saved = self._position()
        if self._world.rank == 0:
            self._log(
                f"goes on from {self._manager.loaded}: epochs done: {state.epoch}, steps done:"
                f" {state.step}"
            )

    def begin(self) -> None:
        """Begin steps of another kind, such as those of an evaluation; all ranks call this."""
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
        """Write a checkpoint if one is due after this step; stop if that is agreed on.

        Args:
            sums: The figures of the epoch so far.

        Raises:
            StopTraining: All ranks stop here, and a checkpoint is still to be written.
        """
        self._report()
        # Save before agreeing: a checkpoint that the ranks agree on below is written after the next
        # step.
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
        """Write a checkpoint, wait until it is written, and return its path.

        The caller may read the file next, or end this rank; and rank 0 is the one that writes.
        """
        try:
            return self._save(sums, wait=True)
        finally:
            self._report()

    def _save(self, sums: MetricAccumulator | None, *, wait: bool = False) -> Path:
        """Begin to write a checkpoint, unless this state has one already; return its path."""
        self.due = False
        state = self._state
        position = self._position()
        # With ``wait`` the file must exist, but that of this state may have been skipped because
        # another was still being written. wait() returns the same on all ranks.
        if position == self._saved and (not wait or self._manager.wait()):
            return self._manager.path(state.step)
        self._saved = position
        self._saved_at = time.monotonic()
        # Without sums the epoch is over, or an epoch that max_steps ended early stays as it was
        # loaded.
        if sums:
            state.sums = sums.by_rank()
        self._manager.scores.update(state.scores)
        # Save the weights that were evaluated; a run that continues begins in training mode.
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
