"""The sentinel: a small process that shows whether a signal has reached the worker too.

A signal to a rank reaches its supervisor. Whether the worker has got the signal too depends on how
it was sent: to one process id; to the process group, as by a terminal, ``timeout``,
``kill -INT 0`` or Open MPI; or to all processes of a job step, as by Slurm with most kinds of
process tracking. Nothing that comes with a signal tells which. So the supervisor has a child, in
its own process group and job step, that only notes which signals it gets: the sentinel. Every
signal that the sentinel has got has reached the worker too. The supervisor passes on all others.

The sentinel is a fork without an ``exec``. It is forked before the worker and before any thread,
and blocks all signals.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import struct
import time
from collections import deque
from typing import NamedTuple, NoReturn

from srunddp.supervisor import signals
from srunddp.util.descriptors import close_all, opened

_LONGEST_ANSWER = 1 << 16
_MARK = struct.Struct("=Bd")  # a signal's number, and the time
_ANSWER = b"!"  # begins each answer, because an empty message would look like a closed socket
# The sentinel keeps only the latest marks, up to this number. Only a flood of signals makes more.
_MOST_MARKS = 1000


class Mark(NamedTuple):
    """A signal that the sentinel has got.

    Attributes:
        number: The signal.
        at: When the sentinel got it, by the system's monotonic clock.
    """

    number: int
    at: float


class Sentinel:
    """The supervisor's side of the sentinel.

    Attributes:
        pid: The sentinel's process id.
    """

    def __init__(self, pid: int, connection: socket.socket) -> None:
        """Take over the supervisor's end of the socket to the sentinel."""
        self.pid = pid
        self._socket = connection

    @classmethod
    def start(cls) -> Sentinel:
        """Fork the sentinel. Call it with the watched signals blocked and without threads."""
        parent = os.getpid()
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        pid = os.fork()
        if not pid:
            _run(theirs.fileno(), parent)
        theirs.close()
        ours.setblocking(False)
        return cls(pid, ours)

    def fileno(self) -> int:
        """Return the socket's descriptor, which is readable when there is an answer."""
        return self._socket.fileno()

    def ask(self) -> bool:
        """Ask which signals the sentinel has got since it was last asked.

        Returns:
            Whether the question was sent; False if the sentinel has ended.
        """
        try:
            self._socket.send(b"?")
        except OSError:
            return False
        return True

    def has_answered(self) -> bool:
        """Return whether an answer can be read, or the sentinel has ended."""
        return bool(select.select([self._socket], [], [], 0)[0])

    def answer(self) -> list[Mark] | None:
        """Return the signals of the sentinel's answer to :meth:`ask`, in their order; empty if
        there is no answer yet, None if the sentinel has ended.
        """
        try:
            data = self._socket.recv(_LONGEST_ANSWER)
        except BlockingIOError:
            return []
        except OSError:
            return None
        if not data:
            return None
        return [Mark(*each) for each in _MARK.iter_unpack(data[len(_ANSWER) :])]

    def close(self) -> None:
        """Close this process's copy of the socket. The sentinel ends when the supervisor's is
        closed; the worker calls this too, because it has inherited a copy.
        """
        self._socket.close()


def _run(connection: int, parent: int) -> NoReturn:
    """Note the signals that come, and answer until the supervisor closes its end or ends."""
    # Blocked signals wait until they are read. Only SIGKILL and SIGSTOP, which cannot be blocked,
    # still act on this process.
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    try:
        signals.die_with_parent(parent)
        # Close the inherited descriptors: while a copy is open here, other processes do not see
        # that the supervisor or the worker has closed the file, pipe or socket.
        close_all([each for each in opened() if each != connection])
        _serve(socket.socket(fileno=connection))
    finally:
        # Do not use sys.exit(): it would run the exit handlers that this process has inherited,
        # which are for the supervisor to run.
        os._exit(0)


def _serve(connection: socket.socket) -> None:
    """Note signals and answer questions, until the supervisor's end is closed."""
    seen = deque[Mark](maxlen=_MOST_MARKS)
    watched = signals.descriptor(signal.valid_signals())
    while True:
        ready, _, _ = select.select([connection.fileno(), watched], [], [])
        for received in signals.read(signal.valid_signals()):
            seen.append(Mark(received.si_signo, time.monotonic()))
        if connection.fileno() in ready:
            if not connection.recv(1):
                return
            connection.send(_ANSWER + b"".join(_MARK.pack(*mark) for mark in seen))
            seen.clear()
