"""Requests to stop a job before it is done: by a signal, or by the known end of its time."""

from __future__ import annotations

import contextlib
import difflib
import logging
import math
import multiprocessing
import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from multiprocessing import resource_tracker
from types import FrameType
from typing import Any, Self

from torch.utils.data import DataLoader

from srunddp import telemetry
from srunddp.bootstrap.environment import child_processes
from srunddp.bootstrap.process_group.world import wait_for_gloo_threads
from srunddp.errors import ConfigError, Scope, Stopped
from srunddp.supervisor.signals import REQUESTS
from srunddp.train.config import PreemptionConfig
from srunddp.train.preemption import fork_server
from srunddp.train.preemption.handlers import RankHandlers
from srunddp.util import slurm_command

_QUERY_TIMEOUT = 10.0
_PARENT_POLL_SECONDS = 1.0
# The most seconds until a job's end that are believed: for a job without a time limit, Slurm
# reports an end that is farther away.
_LONGEST_JOB = 10 * 366 * 86400.0
_DIGITS = re.compile(r"[0-9]{1,18}")


# Requests on which a Preemption did not act before it ended. The next Preemption of the process
# acts on them, for example in a script that trains one fold after another.
_pending_requests: list[tuple[StopRequest, int]] = []
_log = logging.getLogger("srunddp")


class StopRequest(IntEnum):
    """What the ranks are asked to do. Of several requests, that with the greatest value counts."""

    NONE = 0
    REQUEUE = 1  # write a checkpoint, and let Slurm start the job again
    STOP = 2  # write a checkpoint and end: the sender of SIGTERM has decided about the job


class StopRequests:
    """Notes signals and the end of the job's time within a ``with`` block; :meth:`pending` returns
    them.

    Outside the main thread no signals are noted, and rank 0 logs a warning.
    """

    def __init__(
        self, config: PreemptionConfig, rank: int, environ: Mapping[str, str] = os.environ
    ) -> None:
        """Check the settings; nothing is noted yet.

        Args:
            config: Which signals, and how long before the job's end.
            rank: This rank; only rank 0 asks Slurm.
            environ: The environment, with Slurm's variables of the job.

        Raises:
            ConfigError: There is no such signal, or it would not reach this rank.
        """
        self.config = config
        self.rank = rank
        self.environ = environ
        self._requests = dict.fromkeys(numbers(config.signals), StopRequest.REQUEUE)
        self._requests[signal.SIGTERM] = StopRequest.STOP
        self._handlers = RankHandlers()
        self._noted: list[tuple[StopRequest, int]] = []
        self._stop_at = math.inf

    def __enter__(self) -> Self:
        self._noted = list(_pending_requests)
        _pending_requests[:] = []
        if threading.current_thread() is threading.main_thread():
            for number in self._requests:
                # A signal may be ignored since before Python began, as under nohup: whoever started
                # this process does not want it handled.
                if signal.getsignal(number) is not signal.SIG_IGN:
                    self._handlers.set(number, self._note)
        elif self.rank == 0:
            _log.warning(
                "srunddp: signals end the ranks, as preemption is watched for outside the main"
                " thread"
            )
        if self.rank == 0 and self.config.lead_seconds > 0:
            self._find_end()
        return self

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        # Another signal must not kill a rank that is about to report that it has stopped.
        if isinstance(error, Stopped):
            return
        self._handlers.put_all_back()
        _pending_requests.extend(self._noted)

    def ignore_interrupts(self) -> None:
        """Ignore Ctrl-C from now on, because a checkpoint has to be written first."""
        if (
            threading.current_thread() is threading.main_thread()
            and signal.SIGINT not in self._handlers
        ):
            self._handlers.set(signal.SIGINT, _do_nothing)

    def pending(self) -> tuple[StopRequest, int]:
        """Return the strongest request, and the number of its signal.

        The number is 0 for the end of the job's time, and if nothing is requested.
        """
        if self._noted:
            return max(self._noted, key=lambda noted: noted[0])
        if time.monotonic() >= self._stop_at:
            return StopRequest.REQUEUE, 0
        return StopRequest.NONE, 0

    def _note(self, number: int, _: FrameType | None) -> None:
        if number == signal.SIGTERM and telemetry.is_terminating():
            # The supervisor ends this rank: no checkpoint can be written, because the others end
            # too. Use the previous handler, so that the process dies of the signal, which the
            # supervisor sees.
            self._handlers.put_back(signal.SIGTERM)
            os.kill(os.getpid(), number)
        else:
            # list.append is a single call into C, which no other signal's handler can interrupt.
            self._noted.append((self._requests[signal.Signals(number)], number))
            self.ignore_interrupts()

    def _find_end(self) -> None:
        # Newer versions of Slurm set SLURM_JOB_END_TIME. Without it ask squeue, in a thread,
        # because a busy controller may take seconds to answer.
        end = self.environ.get("SLURM_JOB_END_TIME", "")
        if not self._lead_from(end) and _DIGITS.fullmatch(self.environ.get("SLURM_JOB_ID", "")):
            threading.Thread(
                target=lambda: self._lead_from(query_end_time(self.environ)), daemon=True
            ).start()

    def _lead_from(self, end: str) -> bool:
        """Set when to stop, by the end of the job.

        Args:
            end: The end of the job in seconds since the epoch; or any other text.

        Returns:
            Whether the time to stop was set; False if ``end`` is not a time in the future, or too
            far away.
        """
        left = 0.0
        if _DIGITS.fullmatch(end):
            left = float(end) - time.time()
        if not 0.0 < left < _LONGEST_JOB:
            return False
        # Use at most half of the remaining time: otherwise a job of a few minutes would stop at its
        # first step, and be requeued forever.
        self._stop_at = time.monotonic() + left - min(self.config.lead_seconds, left / 2)
        return True


def _do_nothing(number: int, frame: FrameType | None) -> None:
    """Handle a signal that must not end anything.

    SIG_IGN would not do, because programs that this process starts would inherit it.
    """


def numbers(names: Sequence[str]) -> list[signal.Signals]:
    """Return the signals of these names, in the same order.

    Args:
        names: The names, without SIG.

    Raises:
        ConfigError: A name is not that of a signal, or that signal does not reach the ranks.
    """
    known = {each.name.removeprefix("SIG"): each for each in REQUESTS if each != signal.SIGTERM}
    for name in names:
        if name not in known:
            nearest = difflib.get_close_matches(
                name.upper().removeprefix("SIG"), known, n=1, cutoff=0.0
            )[0]
            found = f"preemption.signals has {name!r}"
            if name == "TERM":
                hint = "leave it out, it always counts"
            else:
                hint = f"write {nearest}"
            raise ConfigError(
                found, expected=f"names among {', '.join(known)}", hint=hint, scope=Scope.JOB
            )
    return [known[name] for name in names]


def query_end_time(environ: Mapping[str, str], limit: float = _QUERY_TIMEOUT) -> str:
    """Ask Slurm when the job ends.

    Args:
        environ: The environment, with ``SLURM_JOB_ID``.
        limit: The time limit of squeue in seconds.

    Returns:
        Seconds since the epoch, as text; another text, or an empty one, if Slurm does not know.
    """
    command = ("squeue", "--noheader", f"--jobs={environ['SLURM_JOB_ID']}", "--format=%e")
    return slurm_command.output(*command, environ=environ, timeout=limit).strip()


@contextlib.contextmanager
def signals_blocked(signals: Sequence[str], method: str = "fork") -> Iterator[None]:
    """Keep these signals and SIGTERM from all processes that are started within the block.

    Slurm sends signals to every process of a job step. Within the block they are blocked in this
    thread, and a process that is started inherits this. A signal that arrives for this process
    meanwhile is delivered at the end of the block.

    Args:
        signals: Names without SIG.
        method: How ``multiprocessing`` starts processes.
    """
    blocked = [*numbers(signals), signal.SIGTERM]
    before = signal.pthread_sigmask(signal.SIG_BLOCK, blocked)
    try:
        if method != "fork":
            # Start multiprocessing's resource tracker, and block the signals again afterwards:
            # multiprocessing would start it with the first process that is not forked, and it then
            # unblocks SIGTERM and SIGINT, whatever was blocked before.
            resource_tracker.ensure_running()
            signal.pthread_sigmask(signal.SIG_BLOCK, blocked)
        if method == "forkserver":
            # If the fork server starts now, the signals stay blocked in it and in all processes
            # that it forks. Processes other than loader workers have to unblock them.
            child_processes.call_in_fork_server(fork_server.__name__, fork_server.begin.__name__)
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def iterate(loader: DataLoader[Any], signals: Sequence[str]) -> Iterator[Any]:
    """Begin to iterate over a loader whose workers do not get signals; only their rank ends them.

    Args:
        loader: A loader of torch, whose workers start now.
        signals: Names without SIG.
    """
    if not loader.num_workers:
        return iter(loader)
    method = (loader.multiprocessing_context or multiprocessing).get_start_method()
    init = loader.worker_init_fn
    if method == "fork":
        # Do not fork while one of Gloo's threads, which run some Python after a collective, starts
        # or ends: the child might wait forever for a lock of the interpreter that no thread of the
        # child holds.
        wait_for_gloo_threads()
    loader.worker_init_fn = _WorkerInit(signals, init)
    try:
        with signals_blocked(signals, method):
            return iter(loader)
    finally:
        loader.worker_init_fn = init


@dataclass
class _WorkerInit:
    """The ``worker_init_fn`` of loader workers: keeps signals from a worker, then calls the
    script's own.

    Attributes:
        signals: Names without SIG.
        then: The script's ``worker_init_fn``; None if it has none.
    """

    signals: Sequence[str]
    then: Callable[[int], None] | None

    def __call__(self, worker_id: int) -> None:
        # A forked worker has inherited the rank's handlers. Keep SIGTERM blocked, so that the
        # thread below receives it and can see its sender.
        for number in numbers(self.signals):
            signal.signal(number, signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
        threading.Thread(target=_end_with_rank, daemon=True).start()
        if self.then:
            self.then(worker_id)

    def __setstate__(self, state: dict[str, Any]) -> None:
        # A process of a fork server unpickles its target before it begins. So a loader worker notes
        # here what it is.
        vars(self).update(state)
        fork_server.keep_signals_blocked()


def _end_with_rank() -> None:
    """End this worker when its rank sends SIGTERM, or is gone.

    torch and ``multiprocessing`` send SIGTERM to a worker that hangs. torch's workers also watch
    their parent, but under a fork server that is useless, because the server lives as long as its
    workers.
    """
    rank = multiprocessing.parent_process()
    while rank is None or rank.is_alive():
        received = signal.sigtimedwait([signal.SIGTERM], _PARENT_POLL_SECONDS)
        # Slurm's SIGTERM comes from another process, and must not end workers: the rank may need
        # their batches for the steps until its checkpoint.
        if rank and received and received.si_pid == rank.pid:
            break
    # sys.exit() would end only this thread.
    os._exit(0)
