"""When checkpoints are written: at their times, and where all ranks agree to stop."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from srunddp.errors import PeerError
from srunddp.train.checkpoint.file import CheckpointError
from srunddp.train.checkpoint.manager import CheckpointManager
from srunddp.train.config import Config
from srunddp.train.metrics.accumulator import MetricAccumulator
from srunddp.train.preemption.preemption import Preemption
from srunddp.train.state import TrainingState
from srunddp.train.world import World


class StopTraining(Exception):  # noqa: N818 - it is no error
    """All ranks have agreed to stop after this step."""


class CheckpointPolicy:
    """For a run with an ``output_dir``; all ranks call its methods at the same steps.

    Attributes:
        due: a checkpoint is to be written after this step, whatever its number.
    """

    def __init__(
        self,
        config: Config,
        world: World,
        state: TrainingState,
        stack: ExitStack,
        *,
        log: Callable[[str], None],
        written: Sequence[Callable[[Path], Any]],
    ) -> None:
        """Begin to note signals, until ``stack`` is closed.

        Args:
            log: a line to the user, on rank 0; written: called there with each checkpoint that is whole.
        """
        self.due = False
        self._world, self._state, self._written = world, state, written
        # First, so that a signal is noted rather than the end of a rank that loads its checkpoint.
        self._preemption = stack.enter_context(Preemption(world, config.preemption))
        self._manager = CheckpointManager(config, world, state, log)

    def restore(self, before: Callable[[Mapping[str, Any]], None]) -> None:
        """Go on from a checkpoint where the configuration names or finds one.

        Args:
            before: called with the checkpoint before it is loaded.
        """
        if found := self._manager.load_latest():
            before(found)
            self._manager.restore(found)

    def begin(self) -> None:
        """Steps of another kind begin."""
        self._preemption.restart_interval()

    def agree(self) -> None:
        """Agree with the other ranks, about once a second; all ranks call this equally often.

        Raises:
            StopTraining: all stop here.
        """
        stop = self._preemption.should_stop(checkpoint_due=self._manager.due_by_clock())
        self.due |= self._preemption.checkpoint_due
        if stop:
            raise StopTraining

    def after_step(self, sums: MetricAccumulator | None) -> None:
        """Write a checkpoint if one is due after this step, and stop if that is agreed on.

        Args:
            sums: of the epoch so far.
        """
        self._report()
        if self.due or self._manager.due():
            self.save(sums)
        self.agree()

    def after_epoch(self) -> None:
        """The same at an epoch's end."""
        if self.due or self._manager.due(epoch=self._state.epoch):
            self.save(None)

    def save(self, sums: MetricAccumulator | None) -> Path:
        """Begin to write a checkpoint, unless there is one of just this state; its path."""
        self.due = False
        self._state.sums = sums.by_rank() if sums else []
        return self._manager.save()

    def finish(self) -> None:
        """Have the last checkpoint written when this returns."""
        self.save(None)
        self._wait()

    def save_and_stop(self, sums: MetricAccumulator | None) -> None:
        """Write a checkpoint, and stop.

        Raises:
            Stopped: always.
        """
        path = self.save(sums)
        self._wait()
        self._preemption.stop(self._state.step, path)

    def _wait(self) -> None:
        """Until it is written, on all ranks: what follows may read it, or end this rank and with it rank 0."""
        failure = None
        try:
            self._manager.finish()
        except CheckpointError as error:
            failure = error
        failed = self._broadcast(int(failure is not None))
        self._report()
        if failure:
            raise failure
        if failed:
            raise PeerError("rank 0 could not write the last checkpoint", code=CheckpointError.exit_code)

    def _report(self) -> None:
        for path in self._manager.report():
            for call in self._written:
                call(path)

    def _broadcast(self, number: int) -> int:
        value = torch.tensor([number], device=self._world.device)
        if self._world.world_size > 1:
            dist.broadcast(value, src=0)
        return int(value)
