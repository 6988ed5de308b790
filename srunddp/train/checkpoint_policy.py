"""What of a run stays: checkpoints at their times, and one more where all ranks agree to leave."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from srunddp.errors import PeerError
from srunddp.telemetry import heartbeat
from srunddp.train.checkpoint.file import CheckpointError
from srunddp.train.checkpoint.manager import CheckpointManager
from srunddp.train.config import Config
from srunddp.train.metrics.accumulator import MetricAccumulator
from srunddp.train.preemption.consensus import StopConsensus
from srunddp.train.preemption.requeue import stop_and_requeue
from srunddp.train.preemption.signals import Preemption, StopRequest
from srunddp.train.state import TrainingState
from srunddp.train.world import World


class StopTraining(Exception):  # noqa: N818 - it is no error
    """All ranks have agreed to stop after this step."""

    def __init__(self, wish: StopRequest, cause: int) -> None:
        super().__init__(wish, cause)
        self.agreed = (wish, cause)


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
        say: Callable[[str], None],
        written: Sequence[Callable[[Path], Any]],
    ) -> None:
        """Begin to note signals, until ``stack`` is closed.

        Args:
            say: a line to the user, on rank 0; written: called there with each checkpoint that is whole.
        """
        self.due = False
        self._world, self._state, self._written = world, state, written
        # First, so that a signal is noted rather than the end of a rank that loads its checkpoint.
        self._preemption = stack.enter_context(Preemption(config.preemption, world.rank))
        self._saving = CheckpointManager(config, world, state, say)
        self._agreement = StopConsensus(world)

    def restore(self, rehearse: Callable[[], None]) -> None:
        """Go on from a checkpoint where the configuration names or finds one.

        Args:
            rehearse: a step that changes nothing, called before. In its first step DistributedDataParallel adds
                gradients in another order than later, and a run that was not interrupted is past that.
        """
        if found := self._saving.found():
            rehearse()
            self._saving.restore(found)

    def begin(self) -> None:
        """Steps of another kind begin."""
        self._agreement.begin()

    def agree(self) -> None:
        """Hear what other ranks want, about once a second; all ranks call this equally often.

        Raises:
            Leave: all stop here.
        """
        if not self._agreement.due():
            return
        wish, cause = self._preemption.wish()
        agreed = self._agreement.reach(wish, cause, save=self._saving.due_by_clock())
        self.due |= agreed.save
        if agreed.wish:
            raise StopTraining(agreed.wish, agreed.cause)

    def after_step(self, sums: MetricAccumulator | None) -> None:
        """Write a checkpoint if one is due after this step, and leave if that is agreed on.

        Args:
            sums: of the epoch so far.
        """
        self._report()
        if self.due or self._saving.due():
            self.save(sums)
        self.agree()

    def after_epoch(self) -> None:
        """The same at an epoch's end."""
        if self.due or self._saving.due(epoch=self._state.epoch):
            self.save(None)

    def save(self, sums: MetricAccumulator | None) -> Path:
        """Begin to write a checkpoint, unless there is one of just this state; its path."""
        self.due = False
        self._state.sums = sums.by_rank() if sums else []
        return self._saving.save()

    def finish(self) -> None:
        """Have the last checkpoint written when this returns."""
        self.save(None)
        self._wait()

    def leave(self, agreed: StopTraining, sums: MetricAccumulator | None) -> None:
        """Write a checkpoint, and stop.

        Raises:
            Stopped: always.
        """
        heartbeat(last=True)
        self._preemption.ignore_interrupts()  # another rank may have got the signal
        path = self.save(sums)
        self._wait()
        stop_and_requeue(self._preemption, agreed.agreed, self._state.step, path, broadcast=self._of_rank_0)

    def _wait(self) -> None:
        """Until it is written, on all ranks: what follows may read it, or end this rank and with it rank 0."""
        failure = None
        try:
            self._saving.finish()
        except CheckpointError as error:
            failure = error
        failed = self._of_rank_0(int(failure is not None))
        self._report()
        if failure:
            raise failure
        if failed:
            raise PeerError("rank 0 could not write the last checkpoint", code=CheckpointError.exit_code)

    def _report(self) -> None:
        for path in self._saving.report():
            for call in self._written:
                call(path)

    def _of_rank_0(self, number: int) -> int:
        told = torch.tensor([number], device=self._world.device)
        if self._world.world_size > 1:
            dist.broadcast(told, src=0)
        return int(told)
