"""What makes a job stop before it is done: a signal, or the known end of its time."""

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
from srunddp.supervisor.signals import FORWARDED
from srunddp.train.config import PreemptionConfig
from srunddp.train.preemption import fork_server
from srunddp.train.preemption.handlers import RankHandlers
from srunddp.util import slurm_command

_QUERY_TIMEOUT = 10.0
_PARENT_POLL_SECONDS = 1.0
_LONGEST_JOB = 10 * 366 * 86400.0  # an end that is farther away is none
_DIGITS = re.compile(r"[0-9]{1,18}")


# That nothing came of; the next loop takes them up.
_pending_requests: list[tuple[StopRequest, int]] = []
_log = logging.getLogger("srunddp")


class StopRequest(IntEnum):
    """What is asked of the ranks; the greater goes before the less."""

    NONE = 0
    REQUEUE = 1  # write a checkpoint, and have the job started again
    STOP = 2  # write a checkpoint and end: whoever sent SIGTERM has decided about the job


class StopRequests:
    """Notes signals and the end of the job's time while it is entered; :meth:`pending` tells of
    them.

    Outside the main thread no signal is noted, which is said.
    """

    def __init__(
        self, config: PreemptionConfig, rank: int, environ: Mapping[str, str] = os.environ
    ) -> None:
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
        if isinstance(error, Stopped):
            return  # another signal must not kill a rank that is about to say that it has stopped
        self._handlers.put_all_back()
        _pending_requests.extend(self._noted)

    def ignore_interrupts(self) -> None:
        """Ctrl-C ends nothing from now on: a checkpoint is to be written, and this rank is about to
        end.
        """
        if (
            threading.current_thread() is threading.main_thread()
            and signal.SIGINT not in self._handlers
        ):
            self._handlers.set(signal.SIGINT, _do_nothing)

    def pending(self) -> tuple[StopRequest, int]:
        """What is requested, and the number of the signal that said so; 0 for the end of the job's
        time.
        """
        if self._noted:
            return max(self._noted, key=lambda noted: noted[0])
        return (StopRequest.REQUEUE if time.monotonic() >= self._stop_at else StopRequest.NONE), 0

    def _note(self, number: int, _: FrameType | None) -> None:
        if number == signal.SIGTERM and telemetry.is_terminating():
            # The supervisor ends this rank: no checkpoint can come of it, as the others end too.
            self._handlers.put_back(signal.SIGTERM)
            os.kill(os.getpid(), number)
        else:
            # One call, which nothing interrupts.
            self._noted.append((self._requests[signal.Signals(number)], number))
            self.ignore_interrupts()

    def _find_end(self) -> None:
        end = self.environ.get("SLURM_JOB_END_TIME", "")
        if not self._lead_from(end) and _DIGITS.fullmatch(self.environ.get("SLURM_JOB_ID", "")):
            threading.Thread(
                target=lambda: self._lead_from(query_end_time(self.environ)), daemon=True
            ).start()

    def _lead_from(self, end: str) -> bool:
        """Take the end of the job, in seconds since the epoch; False where it is none."""
        left = float(end) - time.time() if _DIGITS.fullmatch(end) else 0.0
        if not 0.0 < left < _LONGEST_JOB:
            return False
        self._stop_at = time.monotonic() + left - min(self.config.lead_seconds, left / 2)
        return True


def _do_nothing(number: int, frame: FrameType | None) -> None:
    """Handle a signal that is to end nothing, and that programs started by this process get as
    usual.
    """


def numbers(names: Sequence[str]) -> list[signal.Signals]:
    """Of signals by their names without SIG; a ConfigError where there is none, or it would not
    reach this rank.
    """
    known = {each.name.removeprefix("SIG"): each for each in FORWARDED if each != signal.SIGTERM}
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
    """When the job ends, in seconds since the epoch; something else, or nothing, where Slurm does
    not tell.
    """
    command = ("squeue", "--noheader", f"--jobs={environ['SLURM_JOB_ID']}", "--format=%e")
    return slurm_command.output(*command, environ=environ, timeout=limit).strip()


@contextlib.contextmanager
def signals_blocked(signals: Sequence[str], method: str = "fork") -> Iterator[None]:
    """What is started within never gets these signals nor SIGTERM: Slurm sends them to every
    process of a step.

    They are blocked, which children inherit; one that comes meanwhile is noted at the end.
    """
    blocked = [*numbers(signals), signal.SIGTERM]
    before = signal.pthread_sigmask(signal.SIG_BLOCK, blocked)
    try:
        if method != "fork":
            # It is started with the others, and unblocks SIGTERM in doing so.
            resource_tracker.ensure_running()
            signal.pthread_sigmask(signal.SIG_BLOCK, blocked)
        if method == "forkserver":
            # If the server starts now, which blocks them in the script's own processes as well.
            child_processes.call_in_fork_server(fork_server.__name__, fork_server.begin.__name__)
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def iterate(loader: DataLoader[Any], signals: Sequence[str]) -> Iterator[Any]:
    """``iter(loader)``, whose workers do not get these signals; only their own rank ends them."""
    if not loader.num_workers:
        return iter(loader)
    method = (loader.multiprocessing_context or multiprocessing).get_start_method()
    init = loader.worker_init_fn
    if method == "fork":
        # A fork amid a thread's beginning or end, as Gloo's do in Python after a collective, may
        # leave the child waiting for ever for a lock of the interpreter's that nobody holds.
        wait_for_gloo_threads()
    loader.worker_init_fn = _WorkerInit(signals, init)
    try:
        with signals_blocked(signals, method):
            return iter(loader)
    finally:
        loader.worker_init_fn = init


@dataclass
class _WorkerInit:
    """What a loader worker calls first: it gets none of these signals, and then calls the script's
    own.
    """

    signals: Sequence[str]
    then: Callable[[int], None] | None

    def __call__(self, worker_id: int) -> None:
        for number in numbers(self.signals):
            signal.signal(number, signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
        threading.Thread(target=_end_with_rank, daemon=True).start()
        if self.then:
            self.then(worker_id)

    def __setstate__(self, state: dict[str, Any]) -> None:
        # Read in a process that has not begun, it tells that this will be a loader worker.
        vars(self).update(state)
        fork_server.keep_signals_blocked()


def _end_with_rank() -> None:
    """By its SIGTERM, which torch and ``multiprocessing`` send to a worker that hangs, or when it
    is gone.

    torch looks for that as well, but in vain below a fork server, which lives as long as its
    workers.
    """
    rank = multiprocessing.parent_process()
    while rank is None or rank.is_alive():
        received = signal.sigtimedwait([signal.SIGTERM], _PARENT_POLL_SECONDS)
        if rank and received and received.si_pid == rank.pid:
            break
    os._exit(0)
