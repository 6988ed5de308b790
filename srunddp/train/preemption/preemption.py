"""Stops all ranks of a job that has to leave its nodes; for Trainer and for custom loops."""

import logging
import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NoReturn, Self

from torch.utils.data import DataLoader

from srunddp.errors import ConfigError, Scope
from srunddp.telemetry import heartbeat, is_supervised
from srunddp.train.config import PreemptionConfig
from srunddp.train.preemption.requeue import ask_for_requeue, stopped, wait_for_term
from srunddp.train.preemption.signals import StopRequest, StopRequests, iterate
from srunddp.train.world import World, all_reduce_max, on_rank_zero

# The most steps between two all-reduces. A limit is needed because steps may become slower, and a
# Slurm job often has only 30 s from SIGTERM to SIGKILL.
MOST_STEPS = 64
# Seconds between two all-reduces. One in each step would be too many, because a step may take less
# time than an all-reduce.
_EVERY = 1.0
# A request and the number of its signal are sent as one number, request * _SIGNALS + number. Linux
# has 64 signals.
_SIGNALS = 128
_log = logging.getLogger("srunddp")


class Preemption:
    """Stops all ranks after the same step when the job has to leave its nodes, and lets Slurm start
    it again.

    Use it as a context manager around the whole loop, including the loading of its checkpoint, in
    the main thread:

        with srunddp.init() as world, Preemption(world) as preemption:
            for step, batch in enumerate(preemption.iterate(loader), 1):
                train(batch)
                if preemption.should_stop():
                    preemption.stop(step, save(step))

    Within the block, signals and rank 0's clock request a stop instead of ending the process.
    Requests after the last call of ``should_stop()`` are kept for the next Preemption of this
    process, if any.

    Attributes:
        checkpoint_due: Whether any rank wanted a checkpoint in the latest call of
            ``should_stop()``; the same on all ranks.
    """

    def __init__(
        self,
        world: World,
        config: PreemptionConfig | None = None,
        *,
        environ: Mapping[str, str] = os.environ,
    ) -> None:
        """Check the settings.

        Args:
            world: The return value of ``srunddp.init()``.
            config: Which signals, how long before the job's end, and whether to requeue; None for
                the defaults.
            environ: The environment, with Slurm's variables of the job.

        Raises:
            ConfigError: A name is not that of a signal, or that signal does not reach the ranks.
        """
        self.checkpoint_due = False
        self._world = world
        self._requests = StopRequests(config or PreemptionConfig(), world.rank, environ)
        self._agreed: tuple[StopRequest, int] | None = None
        # Steps between two all-reduces, the same on all ranks, and the time of the last one.
        self._interval = 1
        self._last = 0.0
        self.restart_interval()

    def __enter__(self) -> Self:
        self._requests.__enter__()
        return self

    def __exit__(self, *raised: Any) -> None:
        self._requests.__exit__(*raised)

    def should_stop(self, *, checkpoint_due: bool = False) -> bool:
        """Return whether all ranks stop here; all ranks call this after the same steps, equally
        often.

        About once a second this is an all-reduce; otherwise it takes less than a microsecond. Once
        it has returned True, it returns True in all later calls, and Ctrl-C and ``--stall-timeout``
        no longer end a rank, because a checkpoint has to be written.

        Args:
            checkpoint_due: Whether this rank wants a checkpoint, for a reason that others cannot
                know, such as its clock. It has an effect only in calls with an all-reduce, so pass
                it in each call until the attribute ``checkpoint_due`` is True.
        """
        self.checkpoint_due = False
        self._steps_left -= 1
        if self._steps_left <= 0 and self._agreed is None:
            self._agree(checkpoint_due)
        return self._agreed is not None

    def _agree(self, checkpoint_due: bool) -> None:
        """Agree with all ranks, by an all-reduce, on the strongest request, on a checkpoint, and on
        the number of steps until the next all-reduce.
        """
        request, cause = self._requests.pending()
        now = time.perf_counter()
        seconds = (now - self._last) / self._interval
        self._last = now
        # Encode the request and its cause in one number, so that the maximum has the cause of the
        # strongest request, not the greatest signal number. The interval goes by the seconds per
        # step of the slowest rank, because it must be the same on all ranks.
        encoded, due, seconds = all_reduce_max(
            self._world, _SIGNALS * request + cause, checkpoint_due, seconds
        )
        # At most double the interval: the first steps, with torch's warm-up, or a short step among
        # long ones, do not show how long the next steps take.
        self._interval = max(
            1, min(2 * self._interval, int(_EVERY / max(seconds, 1e-6)), MOST_STEPS)
        )
        self._steps_left = self._interval
        self.checkpoint_due = bool(due)
        most_request, most_cause = divmod(int(encoded), _SIGNALS)
        if most_request:
            self._agreed = StopRequest(most_request), most_cause
            heartbeat(last=True)
            # Ignore Ctrl-C also on a rank that got no signal itself: another Ctrl-C in a terminal
            # would end this rank while the checkpoint is written.
            self._requests.ignore_interrupts()

    def restart_interval(self) -> None:
        """Note that steps of another duration begin, for example before and after an evaluation
        that calls ``should_stop()``.

        All ranks call this at the same step. The next call of ``should_stop()`` is an all-reduce:
        64 short steps may take a second, but 64 long ones a minute.
        """
        self._interval = 1
        self._steps_left = 1
        self._last = time.perf_counter()

    def stop(self, step: int, checkpoint: Path | str) -> NoReturn:
        """End this rank after ``should_stop()`` has returned True; all ranks call this once the
        checkpoint is complete.

        The other ranks wait for rank 0, which may still be writing. Rank 0 requeues the job, unless
        SIGTERM has arrived: its sender has decided what becomes of the job.

        Args:
            step: The number of steps done, for the message.
            checkpoint: The path of the checkpoint, for the message.

        Raises:
            Stopped: A SystemExit with code 143, or 75 if the job has yet to be requeued.
            ConfigError: The ranks have not agreed to stop.
        """
        if self._agreed is None:
            raise ConfigError(
                "stop() without an agreement of the ranks",
                expected="should_stop() to have returned True before",
                hint="call stop() only then; to end for another reason, leave the loop",
                scope=Scope.JOB,
            )
        request, cause = self._agreed
        asked = request is StopRequest.REQUEUE
        refused = on_rank_zero(
            self._world, lambda: ask_for_requeue(self._requests) if asked else None
        )
        # This all-reduce is a barrier. With mpirun, and with srun --kill-on-bad-exit, the first
        # rank that ends makes the launcher kill the others, one of which may still be writing its
        # part of a checkpoint.
        all_reduce_max(self._world, 0.0)
        error = stopped(cause, step, Path(checkpoint), refused)
        if self._world.rank == 0 and not is_supervised():
            _log.warning("srunddp: %s (exit code %d)", error, error.code)
        # An empty reason means that Slurm is about to end the job. If the rank ended now, the job
        # script would go on, with commands that are meant for a finished training.
        if refused == "":
            wait_for_term(self._requests)
        raise error

    def iterate(self, loader: DataLoader[Any]) -> Iterator[Any]:
        """Iterate over a loader whose workers do not get the signals.

        Slurm may send the signals to every process of a job step. If a worker died of SIGUSR1 or
        SIGTERM, the training would end before its checkpoint is written.

        Args:
            loader: A loader of torch; its ``worker_init_fn`` is called as usual.
        """
        return iterate(loader, self._requests.config.signals)
