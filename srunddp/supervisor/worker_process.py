"""The supervisor's view of the worker: whether the worker runs, is stopped or has ended, and how it
is ended.

No process of the worker survives it, see :mod:`srunddp.supervisor.descendants`.
"""

import contextlib
import os
import signal
import socket
import threading
import time

from srunddp.supervisor import signals
from srunddp.supervisor.limits import DEFAULT_LIMITS, Limits
from srunddp.supervisor.worker_messages import Unreadable, WorkerMessage
from srunddp.util.descriptors import move_high
from srunddp.util.kernel_file import stat_fields
from srunddp.util.quick_dataclass import dataclass


@dataclass
class WorkerProcess:
    """The worker, a child process of the supervisor.

    Attributes:
        pid: The worker's process id.
        stop_limit: Seconds for which the worker may be stopped before that is a failure; None for
            no limit.
        status: The worker's exit code, or minus the number of the signal that ended it; None while
            it runs.
        dumped_core: Whether the kernel wrote a core file when the worker ended.
        given_up: Whether the worker has not ended although it was killed.
        limits: How long the worker's end may take.
        stopped_by: The signal by which the worker is stopped; 0 if it is not.
    """

    pid: int
    stop_limit: float | None = DEFAULT_LIMITS.stopped_for
    status: int | None = None
    dumped_core: bool = False
    given_up: bool = False
    limits: Limits = DEFAULT_LIMITS
    stopped_by: int = 0
    _stopped_at: float = 0.0
    _kill_at: float | None = None

    @property
    def ended(self) -> bool:
        """Whether the worker has ended or has been given up."""
        return self.status is not None or self.given_up

    def collect(self, now: float) -> None:
        """Note whether the worker was stopped, was continued or has ended, and reap the orphans
        that we have adopted from it. Call this after SIGCHLD.
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
            self.stopped_by = os.WSTOPSIG(status)
            self._stopped_at = now
            if self._kill_at is not None:
                # A stopped worker does not handle SIGTERM until it goes on, so it cannot use the
                # time until SIGKILL: kill it now.
                self._kill_at = min(self._kill_at, now)
        elif os.WIFCONTINUED(status):
            self.stopped_by = 0
        else:
            self.stopped_by = 0
            self.status = os.waitstatus_to_exitcode(status)
            self.dumped_core = os.WIFSIGNALED(status) and os.WCOREDUMP(status)

    def is_stopped(self) -> bool:
        """Return whether the worker is stopped at this moment, as the kernel shows it."""
        with contextlib.suppress(OSError):
            return stat_fields(self.pid)[0] == "T"
        return False

    def overdue(self, now: float) -> tuple[str, int] | None:
        """Return the cause and the exit code of a failure if the worker has been stopped for too
        long; None if it has not, or if it is being ended.
        """
        limit = self._stop_ends_at
        if limit is None or self._kill_at is not None or now < limit:
            return None
        if not self.is_stopped():
            return None  # the worker goes on, but the SIGCHLD that says so has not been read yet
        return (
            f"stopped by {signals.signal_name(self.stopped_by)} for {self.stop_limit:g} s",
            128 + self.stopped_by,
        )

    @property
    def _stop_ends_at(self) -> float | None:
        if self.stopped_by and self.stop_limit is not None:
            return self._stopped_at + self.stop_limit
        return None

    def end(self, now: float, *, ask: bool, within: float | None) -> None:
        """Begin to end the worker. Another call can only bring SIGKILL forward.

        Args:
            now: The time.
            ask: Whether to send SIGTERM first; only the first call sends it.
            within: Seconds until SIGKILL, which a stopped worker gets at once; None to send no
                signal at all.
        """
        if self.ended or within is None:
            return
        first = self._kill_at is None
        kill_at = now if self.stopped_by else now + within
        if self._kill_at is None:
            self._kill_at = kill_at
        else:
            self._kill_at = min(self._kill_at, kill_at)
        if first and ask and not self.stopped_by:
            self.send(signal.SIGTERM)

    def tick(self, now: float) -> float | None:
        """Send SIGKILL or give the worker up if it is time. Return in how many seconds to call this
        again; None for not at all.
        """
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
        """Send the worker a signal; nothing happens if it has ended."""
        if self.status is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)


LONGEST = 1 << 16


class WorkerPipe:
    """One end of the pipe between a worker and its supervisor.

    A message has at most :data:`LONGEST` bytes, about half of what Linux takes at once.

    Attributes:
        end: The socket.
        open: Whether :meth:`read` may find more messages.
    """

    def __init__(self, end: socket.socket) -> None:
        self.end = end
        self.open = True

    def send(self, message: WorkerMessage) -> bool:
        """Send a message. If the other process is gone, nothing is sent, and no error is raised.

        Returns:
            Whether the message was sent; False also if the script has closed the worker's end.
        """
        try:
            self.end.send(message.encode())
        except OSError:
            return False
        return True

    def close(self) -> None:
        """Close this end, unless the script has closed it."""
        with contextlib.suppress(OSError):
            self.end.close()

    def receive(self) -> WorkerMessage | None:
        """Wait for the next message, and return it; None if the other side has closed or ended."""
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
                # The other side has ended before it has read all of our messages. The kernel
                # reports this once; the other side's own messages can still be read.
                continue
            except OSError:
                data = b""
            if data:
                messages.append(WorkerMessage.decode(data) or Unreadable())
            else:
                self.open = False  # the other side has closed or ended
        return messages


def pipe() -> tuple[WorkerPipe, WorkerPipe]:
    """Make the pipe, and return the supervisor's end and the worker's end."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    return WorkerPipe(ours), WorkerPipe(socket.socket(fileno=move_high(theirs.detach())))


def wait_for_child(pid: int, limit: float) -> int | None:
    """Wait for a child to end, and reap it.

    Args:
        pid: The child's process id.
        limit: How many seconds to wait at most.

    Returns:
        The exit code, or minus the number of the signal that ended the child; None if the child has
        not ended in time, -1 if it has been reaped elsewhere.
    """
    end = time.monotonic() + limit
    with contextlib.suppress(ChildProcessError):
        while not (found := os.waitpid(pid, os.WNOHANG))[0]:
            if time.monotonic() >= end:
                return None
            time.sleep(0.002)
        return os.waitstatus_to_exitcode(found[1])
    return -1


def kill_forks_on_exit(worker: int) -> None:
    """Have the processes that Python forks in the worker, such as DataLoader workers, end with the
    worker, even if the supervisor was killed.

    This holds only for forks of the main thread, because the kernel sends the signal when the
    *thread* that forked ends. It also holds only for the worker's own children: a grandchild that
    leaves its parent on purpose must not be killed.

    Args:
        worker: The process id of the worker, in which this is called.
    """
    ours = True

    def before() -> None:
        # Find out before the fork whether the worker's main thread forks: the worker may have ended
        # by the time the child could ask, and the child has to end in that case too.
        nonlocal ours
        ours = os.getpid() == worker and threading.current_thread() is threading.main_thread()

    def in_child() -> None:
        if ours:
            signals.die_with_parent(worker)

    os.register_at_fork(before=before, after_in_child=in_child)
