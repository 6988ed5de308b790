"""The supervisor's side of the process that asks NVML whether this node's GPUs are healthy;
``gpu_watcher.py`` has the code of that process.

NVML reports an Xid only to processes that had registered before it happened. So with ``--monitor``
or ``--restarts`` the first rank of each node has such a process from its start to its end. Without
these options a process is forked at a failure, and finds only the faults that last. Another one,
forked at the start, reads the figures with which those of the failure are compared, and ends.

The supervisor never asks NVML itself: after a fault the driver may not answer, and then only this
process hangs. Nor does the supervisor import this module on a node without GPUs.
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
    """Asks a process of its own about the health of this node's GPUs, for the supervisor.

    Attributes:
        own: The process ids of the supervisor's own children, to which those forked here are added.
        limits: How long an answer may take.
        clock: The clock of these limits.
        pid: The process that answers; None if there is none now.
    """

    own: set[int] = field(default_factory=set)
    limits: Limits = DEFAULT_LIMITS
    clock: Clock = time.monotonic
    pid: int | None = None
    _socket: socket.socket | None = None
    _news: list[GpuFault] = field(default_factory=list)
    _at_start: tuple[GpuFigures, ...] = ()
    _answers: bool = False  # whether the process answers questions
    _answer: tuple[GpuFault, ...] | None = None
    _ends_at: float = 0.0

    def watch(self, record: Path | None) -> None:
        """Fork the process that registers for Xids. Call this before there are threads, with all
        signals blocked.

        Args:
            record: The file for the faults; None to write none.
        """
        self._fork(lambda end: _watch(end, record))

    def note_start(self) -> None:
        """Fork the process that reads the figures of the start and ends, instead of :meth:`watch`.
        Nobody waits for it.
        """
        self._fork(_tell_figures, answers=False)

    def in_worker(self) -> None:
        """Close the socket. Call this in a process that the supervisor has forked."""
        if self._socket is not None:
            self._socket.close()

    def ask(self) -> None:
        """Ask for the faults of the GPUs now. :meth:`look` returns the answer."""
        self._read()  # notices a process that has ended
        self._answer = None
        self._ends_at = self.clock() + self.limits.gpus_answer_within
        if self._socket is None or not self._answers:
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
        """Return the hardware faults since the last call, without waiting."""
        self._read()
        found = tuple(self._news)
        self._news.clear()
        return found

    def stop(self) -> None:
        """End the process, if there is one."""
        self._close()
        # The process writes nothing that is still needed, and it may hang in the driver.
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

    def _fork(self, serve: Callable[[socket.socket], None], *, answers: bool = True) -> None:
        """Fork a process. If the kernel cannot create one now, do nothing.

        Args:
            serve: Does the work of the process, with its end of the socket.
            answers: Whether the process answers questions.
        """
        # Reaps a process that has ended by itself. One that still reads the figures of the start
        # comes too late.
        self._kill()
        supervisor = os.getpid()
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            with warnings.catch_warnings():
                # Python warns of a fork while other threads run. If the child waits for a lock of
                # theirs, it is killed when its time is over.
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
        self._answers = answers
        self._socket = ours

    def _close(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def _kill(self) -> None:
        self._close()
        # The process may have been reaped, and then another process may have its id.
        if self.pid is not None and wait_for_child(self.pid, 0.0) is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)
            wait_for_child(self.pid, self.limits.gpus_killed_within)
        self.pid = None


def _run(supervisor: int, end: socket.socket, serve: Callable[[socket.socket], None]) -> NoReturn:
    """Do the work of the forked process, and exit."""
    try:
        die_with_parent(supervisor)
        # Launchers send signals to the whole process group or job step.
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        with contextlib.suppress(OSError):
            Path("/proc/self/comm").write_text(NAME)
        nothing = os.open(os.devnull, os.O_RDWR)
        for standard in (0, 1, 2):
            os.dup2(nothing, standard)
        # Close what was inherited: if this process hangs, its copy of a connection must not hide
        # the connection's end from others.
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
