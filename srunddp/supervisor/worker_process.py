"""A supervisor's view of its worker: running, stopped or ended, and how it is made to go.

No process is left: what a worker started ends with it, whoever has adopted it meanwhile.
"""

import contextlib
import os
import signal
import socket
import threading
import time
from collections.abc import Collection
from dataclasses import dataclass

from srunddp.supervisor import signals
from srunddp.supervisor.limits import DEFAULT_LIMITS, Limits
from srunddp.supervisor.worker_messages import Unreadable, WorkerMessage
from srunddp.util.kernel_file import children_of


@dataclass
class WorkerProcess:
    """One child process.

    Attributes:
        pid: its process id.
        stop_limit: seconds for which it may be stopped; None for as long as it likes.
        status: None while it is there; then its exit code, or minus the number of the signal that
            ended it.
        dumped_core: whether the kernel wrote its memory to a file.
        given_up: it did not go, not even when it was killed.
        limits: how long its end may take.
    """

    pid: int
    stop_limit: float | None = DEFAULT_LIMITS.stopped_for
    status: int | None = None
    dumped_core: bool = False
    given_up: bool = False
    limits: Limits = DEFAULT_LIMITS
    _stopped_by: int = 0
    _stopped_at: float = 0.0
    _kill_at: float | None = None

    @property
    def ended(self) -> bool:
        """Whether it is gone, or will never go."""
        return self.status is not None or self.given_up

    def collect(self, now: float) -> None:
        """After SIGCHLD: note what became of it, and collect the orphans that we adopted from
        it.
        """
        with contextlib.suppress(ChildProcessError):
            while True:
                pid, status = os.waitpid(-1, os.WNOHANG | os.WUNTRACED | os.WCONTINUED)
                if not pid:
                    return
                if pid == self.pid:
                    self._note(status, now)

    def _note(self, status: int, now: float) -> None:
        if os.WIFSTOPPED(status):
            self._stopped_by = os.WSTOPSIG(status)
            self._stopped_at = now
            if self._kill_at is not None:
                # It does nothing in the time that it was given: a signal would wait until it goes
                # on.
                self._kill_at = min(self._kill_at, now)
        elif os.WIFCONTINUED(status):
            self._stopped_by = 0
        else:
            self._stopped_by = 0
            self.status = os.waitstatus_to_exitcode(status)
            self.dumped_core = os.WIFSIGNALED(status) and os.WCOREDUMP(status)

    def overdue(self, now: float) -> tuple[str, int] | None:
        """The cause and exit code of one that has been stopped for too long, and is not being
        ended.
        """
        limit = self._stop_ends_at
        if limit is None or self._kill_at is not None or now < limit:
            return None
        return (
            f"stopped by {signals.signal_name(self._stopped_by)} for {self.stop_limit:g} s",
            128 + self._stopped_by,
        )

    @property
    def _stop_ends_at(self) -> float | None:
        if self._stopped_by and self.stop_limit is not None:
            return self._stopped_at + self.stop_limit
        return None

    def end(self, now: float, *, ask: bool, within: float | None) -> None:
        """Make it go: by SIGTERM where ``ask``, and by SIGKILL ``within`` some seconds; None leaves
        it its time.
        """
        if self.ended or within is None:
            return
        first = self._kill_at is None
        kill_at = now if self._stopped_by else now + within
        if self._kill_at is None:
            self._kill_at = kill_at
        else:
            self._kill_at = min(self._kill_at, kill_at)
        if first and ask and not self._stopped_by:
            self.send(signal.SIGTERM)

    def tick(self, now: float) -> float | None:
        """Do what is due; returns the seconds until something is, or None for nothing."""
        if self.ended:
            return None
        if self._kill_at is not None:
            give_up_at = self._kill_at + self.limits.gives_up_after
            if now >= give_up_at:
                self.given_up = True
            elif now >= self._kill_at:
                self.send(signal.SIGKILL)
                return give_up_at - now
            return max(0.0, self._kill_at - now)
        limit = self._stop_ends_at
        if limit is not None and now < limit:
            return min(self.limits.stopped_looks, limit - now)
        return None

    def send(self, number: int) -> None:
        """Send it a signal; nothing happens where it has ended."""
        if self.status is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)


LONGEST = 1 << 16


class WorkerPipe:
    """One end of the pipe between a worker and its supervisor.

    A message has at most ``LONGEST`` bytes, about half of what Linux takes at once.

    Attributes:
        end: the socket; open: whether :meth:`read` may find more.
    """

    def __init__(self, end: socket.socket) -> None:
        self.end = end
        self.open = True

    def send(self, message: WorkerMessage) -> None:
        """Send; a peer that is gone is noticed by whoever waits for it."""
        with contextlib.suppress(OSError):
            self.end.send(message.encode())

    def receive(self) -> WorkerMessage | None:
        """Wait for the next message; None when the other side has closed or ended."""
        with contextlib.suppress(OSError):
            if data := self.end.recv(LONGEST):
                return WorkerMessage.decode(data) or Unreadable()
        return None

    def read(self) -> list[WorkerMessage]:
        """Return the messages that are there, without waiting."""
        messages: list[WorkerMessage] = []
        while self.open:
            try:
                data = self.end.recv(LONGEST, socket.MSG_DONTWAIT)
            except BlockingIOError:
                break
            except ConnectionResetError:
                # It has ended before it has read all of ours. The kernel says so once; what it has
                # said itself is still there.
                continue
            except OSError:
                data = b""
            if data:
                messages.append(WorkerMessage.decode(data) or Unreadable())
            else:
                self.open = False  # the other side has closed or ended
        return messages


def pipe() -> tuple[WorkerPipe, WorkerPipe]:
    """The supervisor's end and the worker's."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    return WorkerPipe(ours), WorkerPipe(theirs)


def wait_for_child(pid: int, limit: float) -> int | None:
    """The exit code of a child; None where it has not ended in time, -1 where others have collected
    it.
    """
    end = time.monotonic() + limit
    with contextlib.suppress(ChildProcessError):
        while not (found := os.waitpid(pid, os.WNOHANG))[0]:
            if time.monotonic() >= end:
                return None
            time.sleep(0.002)
        return os.waitstatus_to_exitcode(found[1])
    return -1


def kill_descendants(within: float, given_up: Collection[int] = ()) -> set[int]:
    """Kill and collect every process that the worker has left, when it has ended.

    Args:
        within: Seconds that it takes at most: a process in a kernel call that does not return
            cannot be killed.
        given_up: Process ids of those that are known to be in such a call.

    Returns:
        The process ids of those that could not be killed.
    """
    end = time.monotonic() + within
    while True:
        children = children_of(os.getpid())
        for child in children:
            _kill_with_children(child)
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        if set(children) <= set(given_up) or time.monotonic() >= end:
            return set(children)
        time.sleep(0.002)


def _kill_with_children(pid: int) -> None:
    # Its children first become ours when it has ended, and are found in the next round; those that
    # are not killed yet may start more meanwhile, which that round finds as well.
    for child in children_of(pid):
        _kill_with_children(child)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, signal.SIGKILL)


def kill_forks_on_exit(worker: int) -> None:
    """In the worker: what Python forks here ends with this process, also where the supervisor was
    killed.

    Such are the DataLoader's workers. Only those of the main thread: the kernel's signal comes at
    the end of the *thread* that forked. And only our own children: one that leaves its parent on
    purpose would be killed by it.
    """
    ours = True

    def before() -> None:
        # Not asked in the child, whose parent may have ended by then: it is to end as well.
        nonlocal ours
        ours = os.getpid() == worker and threading.current_thread() is threading.main_thread()

    def in_child() -> None:
        if ours:
            signals.die_with_parent(worker)

    os.register_at_fork(before=before, after_in_child=in_child)
