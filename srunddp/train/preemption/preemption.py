"""The end of a job that has to leave its nodes, for Trainer and for loops of one's own."""

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

# Steps from one all-reduce to the next, at most: steps may become slower, and a Slurm job often has
# 30 s from SIGTERM to SIGKILL.
MOST_STEPS = 64
# Seconds from one all-reduce to the next: a step may take less time than an all-reduce.
_EVERY = 1.0
# A request and the number of its signal are sent as one number. Linux has 64 signals.
_SIGNALS = 128
_log = logging.getLogger("srunddp")


class Preemption:
    """Stops all ranks after the same step when the job has to leave its nodes, and has Slurm start
    it again.

    A context manager around the whole loop, the loading of its checkpoint included, entered in the
    main thread:

        with srunddp.init() as world, Preemption(world) as preemption:
            for step, batch in enumerate(preemption.iterate(loader), 1):
                train(batch)
                if preemption.should_stop():
                    preemption.stop(step, save(step))

    While it is entered, signals and rank 0's clock request a stop rather than end the process. What
    is requested after the last call of ``should_stop()`` is for the next Preemption of this
    process, if any.

    Attributes:
        checkpoint_due: whether one of the ranks wanted a checkpoint in the latest call of
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
            world: from ``srunddp.init()``.
            config: which signals, how long before the job's end, and whether to requeue; None for
                the defaults.
            environ: the job's variables of Slurm.

        Raises:
            ConfigError: no such signal, or one that cannot be noted.
        """
        self.checkpoint_due = False
        self._world = world
        self._requests = StopRequests(config or PreemptionConfig(), world.rank, environ)
        self._agreed: tuple[StopRequest, int] | None = None
        # Steps from one all-reduce to the next, the same on all ranks, and when the last one was.
        self._interval = 1
        self._last = 0.0
        self.restart_interval()

    def __enter__(self) -> Self:
        self._requests.__enter__()
        return self

    def __exit__(self, *raised: Any) -> None:
        self._requests.__exit__(*raised)

    def should_stop(self, *, checkpoint_due: bool = False) -> bool:
        """Return whether all ranks stop here; they call this after the same steps, equally often.

        About once a second it is an all-reduce, and else costs less than a microsecond. Once it is
        True it stays so; Ctrl-C and ``--stall-timeout`` then no longer end a rank, as a checkpoint
        is to be written.

        Args:
            checkpoint_due: this rank wants a checkpoint, for a reason that the others cannot know,
                such as its clock. Only what is passed in the call of an all-reduce counts: pass it
                until the attribute is set.
        """
        self.checkpoint_due = False
        self._steps_left -= 1
        if self._steps_left <= 0 and self._agreed is None:
            self._agree(checkpoint_due)
        return self._agreed is not None

    def _agree(self, checkpoint_due: bool) -> None:
        """Agree on the strongest request of all ranks, and on the steps until the next time."""
        request, cause = self._requests.pending()
        now = time.perf_counter()
        seconds = (now - self._last) / self._interval
        self._last = now
        # In one number, so that the greatest has the cause of the strongest request, and not the
        # greatest signal number. The slowest rank's seconds count, as all must do with one
        # interval.
        encoded, due, seconds = all_reduce_max(
            self._world, _SIGNALS * request + cause, checkpoint_due, seconds
        )
        # At most twice as many steps as before: the first ones, with torch's warm-up, or a short
        # step among long ones, say little on how long the next take.
        self._interval = max(
            1, min(2 * self._interval, int(_EVERY / max(seconds, 1e-6)), MOST_STEPS)
        )
        self._steps_left = self._interval
        self.checkpoint_due = bool(due)
        most_request, most_cause = divmod(int(encoded), _SIGNALS)
        if most_request:
            self._agreed = StopRequest(most_request), most_cause
            heartbeat(last=True)
            # On a rank that has got no signal itself, too: Ctrl-C in a terminal, pressed again,
            # would end it while the checkpoint is written.
            self._requests.ignore_interrupts()

    def restart_interval(self) -> None:
        """Begin steps of another duration, as before and after an evaluation that calls
        ``should_stop()``.

        All ranks call this at the same step. The next all-reduce is at once: 64 short steps may be
        one second, and as many long ones a minute.
        """
        self._interval = 1
        self._steps_left = 1
        self._last = time.perf_counter()

    def stop(self, step: int, checkpoint: Path | str) -> NoReturn:
        """End this rank, after ``should_stop()`` was True; all ranks call it, when the checkpoint
        is whole.

        The others wait for rank 0, also where it is still writing. Rank 0 requeues the job, unless
        SIGTERM has come: whoever sent that has decided about the job.

        Args:
            step: how many are done, for the message.
            checkpoint: what was written, for the message.

        Raises:
            Stopped: a SystemExit with the code 143, or 75 where the job has yet to be requeued.
            ConfigError: the ranks have not agreed to stop.
        """
        if self._agreed is None:
            raise ConfigError(
                "stop() without an agreement of the ranks",
                expected="should_stop() to have returned True before",
                hint="call stop() only then; to end for another reason leave the loop",
                scope=Scope.JOB,
            )
        request, cause = self._agreed
        asked = request is StopRequest.REQUEUE
        refused = on_rank_zero(
            self._world, lambda: ask_for_requeue(self._requests) if asked else None
        )
        # A barrier. With mpirun and srun --kill-on-bad-exit the first rank that ends takes the
        # others along, one that still writes its part of a checkpoint among them.
        all_reduce_max(self._world, 0.0)
        error = stopped(cause, step, Path(checkpoint), refused)
        if self._world.rank == 0 and not is_supervised():
            _log.warning("srunddp: %s (exit code %d)", error, error.code)
        # Slurm is about to end the job. A rank that ended now would have the job script go on, to
        # what is meant for a training that is over.
        if refused == "":
            wait_for_term(self._requests)
        raise error

    def iterate(self, loader: DataLoader[Any]) -> Iterator[Any]:
        """Iterate over a loader whose workers do not get the signals.

        Slurm may send them to every process of a step.

        A worker that died of USR1 or SIGTERM would end the training that is about to be saved.

        Args:
            loader: torch's own; its ``worker_init_fn`` is called as always.
        """
        return iterate(loader, self._requests.config.signals)
