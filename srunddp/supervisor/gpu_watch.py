"""The supervisor's side of the process that asks NVML whether this node's GPUs are healthy;
``gpu_watcher.py`` has the code of that process.

NVML reports an Xid only to processes that had registered before it happened. So with ``--monitor``
or ``--restarts`` the first rank of each node runs such a process until it ends. Without these
options the process is forked only after a failure, and finds only faults that have lasted until
then. Another process, forked at the start, reads the memory errors so far and ends; the errors
after a failure are compared with these.

The supervisor never asks NVML itself, so that only this process hangs if the driver does not answer
after a fault. On a node without GPUs the supervisor does not even import this module.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import field
from pathlib import Path
from typing import NoReturn

from srunddp.supervisor.clock import Clock
from srunddp.supervisor.failure import GpuFault
from srunddp.supervisor.gpu_messages import GpuFigures, GpuMessage, GpusAtStart, GpusSay
from srunddp.supervisor.limits import DEFAULT_LIMITS, Limits
from srunddp.supervisor.signals import die_with_parent
from srunddp.supervisor.worker_process import wait_for_child
from srunddp.util.descriptors import close_all, opened
from srunddp.util.quick_dataclass import dataclass

NAME = "srunddp-gpus"  # at most 15 characters, all that Linux keeps
_LONGEST = 1 << 16


@dataclass
class NodeGpus:
    """Asks a separate process, for the supervisor, about the health of this node's GPUs.

    Attributes:
        own: The process ids of the supervisor's own children, to which those forked here are added.
        limits: How long an answer may take.
        clock: The clock by which that time is measured.
        pid: The process that asks NVML; None if there is none now.
    """

    own: set[int] = field(default_factory=set)
    limits: Limits = DEFAULT_LIMITS
    clock: Clock = time.monotonic
    pid: int | None = None
    _socket: socket.socket | None = None
    _news: list[GpuFault] = field(default_factory=list)
    _at_start: tuple[GpuFigures, ...] = ()
    # Whether the process watches the GPUs, and answers each question. The others end after one
    # answer, or after the figures of the start.
    _is_watching: bool = False
    _answer: tuple[GpuFault, ...] | None = None
    _ends_at: float = 0.0

    def watch(self, record: Path | None) -> None:
        """Fork the process that registers for Xids. Call this before there are threads, with all
        signals blocked.

        Args:
            record: The file for the faults; None to write none.
        """
        self._fork(lambda end: _watch(end, record), is_watching=True)

    def note_start(self) -> None:
        """Fork the process that reads the figures of the start and ends, instead of :meth:`watch`.
        Nobody waits for it.
        """
        self._fork(_tell_figures)

    def in_worker(self) -> None:
        """Close the socket. Call this in a process that the supervisor has forked."""
        if self._socket is not None:
            self._socket.close()

    def ask(self) -> None:
        """Ask for the faults of the GPUs now. :meth:`look` returns the answer."""
        self._read()  # notices a process that has ended
        self._answer = None
        self._ends_at = self.clock() + self.limits.gpus_answer_within
        if self._socket is None or not self._is_watching:
            at_start = self._at_start
            self._fork(lambda end: _answer_once(end, at_start))
        if self._socket is None:
            self._answer = ()
            return
        try:
            self._socket.send(b"?")
        except OSError:  # the process has ended
            self._close()
            self._answer = ()

    def look(self) -> tuple[GpuFault, ...] | None:
        """Return the answer to :meth:`ask`; None if it may still come."""
        self._read()
        if self._answer is None and self.clock() >= self._ends_at:
            # The process may hang in the driver for ever.
            self._kill()
            self._answer = ()
        return self._answer

    def news(self) -> tuple[GpuFault, ...]:
        """Return the hardware faults that the process has reported since the last call, without
        waiting.
        """
        self._read()
        found = tuple(self._news)
        self._news.clear()
        return found

    def stop(self) -> None:
        """End the process, if there is one."""
        self._close()
        # Kill the process instead of waiting for its end: it may hang in the driver, and it writes
        # nothing that is still needed.
        self._kill()

    def _read(self) -> None:
        while self._socket is not None:
            try:
                data = self._socket.recv(_LONGEST, socket.MSG_DONTWAIT)
            except BlockingIOError:
                return
            except OSError:
                data = b""
            if not data:
                # If the process has not answered, it has found no NVML, or was killed.
                self._close()
                self._answer = self._answer or ()
                return
            match GpuMessage.decode(data):
                case GpusAtStart(gpus):
                    self._at_start = gpus
                case GpusSay(faults, is_answer=True):
                    self._answer = faults
                case GpusSay(faults):
                    self._news += faults

    def _fork(self, serve: Callable[[socket.socket], None], *, is_watching: bool = False) -> None:
        """Fork a process. If the kernel cannot create one now, do nothing.

        Args:
            serve: Does the work of the process, with its end of the socket.
            is_watching: Whether the process watches the GPUs, and answers each question.
        """
        # Reaps a process that has ended by itself. One that still reads the figures of the start
        # comes too late.
        self._kill()
        supervisor = os.getpid()
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            with warnings.catch_warnings():
                # Python warns of a fork while other threads run. If one of them holds a lock that
                # the child needs, the child hangs and is killed when its time is over.
                warnings.simplefilter("ignore")
                pid = os.fork()
        except OSError:
            ours.close()
            theirs.close()
            return
        if pid == 0:
            _run(supervisor, theirs, serve)
        theirs.close()
        self.own.add(pid)
        self.pid = pid
        self._is_watching = is_watching
        self._socket = ours

    def _close(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def _kill(self) -> None:
        self._close()
        # If the process has been reaped elsewhere, another process may have its id now: do not kill
        # it.
        if self.pid is not None and wait_for_child(self.pid, 0.0) is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)
            wait_for_child(self.pid, self.limits.gpus_killed_within)
        self.pid = None


def _run(supervisor: int, end: socket.socket, serve: Callable[[socket.socket], None]) -> NoReturn:
    """Do the work of the forked process, and exit."""
    try:
        die_with_parent(supervisor)
        # The launcher's signals go to the whole process group or job step, but are not meant for
        # this process.
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        with contextlib.suppress(OSError):
            Path("/proc/self/comm").write_text(NAME)
        nothing = os.open(os.devnull, os.O_RDWR)
        for standard in (0, 1, 2):
            os.dup2(nothing, standard)
        # Close the inherited descriptors: if this process hangs, its copy of a connection would
        # keep the connection open, and the process at the other end would not see it end.
        close_all([each for each in opened() if each > 2 and each != end.fileno()])
        serve(end)
    finally:
        # Never return into the supervisor's code: its exit handlers must not run twice.
        os._exit(0)


def _answer_once(end: socket.socket, at_start: Sequence[GpuFigures]) -> None:
    # Imported only in this process, because the supervisor needs nothing of it.
    from srunddp.supervisor import gpu_watcher

    gpu_watcher.answer_once(end, at_start)


def _tell_figures(end: socket.socket) -> None:
    from srunddp.supervisor import gpu_watcher

    gpu_watcher.tell_figures(end)


def _watch(end: socket.socket, record: Path | None) -> None:
    from srunddp.supervisor import gpu_watcher

    gpu_watcher.watch(end, record)
