"""The processes that a worker leaves behind, and how they are ended.

The supervisor adopts the orphans of its worker, so all processes that the worker has left behind
are children of the supervisor. Not all children of the supervisor come from the worker, though. In
a wrapper such as ``helper & exec srunddp train.py``, the shell becomes the supervisor by ``exec``,
so the helper is a child of the supervisor. Such children are older than the worker, and are spared
(:class:`Earlier`).

A child that the supervisor did not have at first either comes from the worker or is an orphan that
such a helper has left: the kernel does not tell which. The child is spared only if it cannot come
from the worker:

- It was started before this process forked for the first time.
- It is in the session of a helper that is still running, and that is not the supervisor's own
  session. A process can create a session, but cannot join one.

Process groups and environments prove nothing, because a process of the worker may change both.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Collection, Iterable
from dataclasses import field, replace
from pathlib import Path

from srunddp.supervisor.launcher import REMOTE_STARTERS
from srunddp.supervisor.limits import DEFAULT_LIMITS, Limits
from srunddp.util.kernel_file import SESSION, STARTED, children_of, stat_fields, text_of
from srunddp.util.quick_dataclass import dataclass

_SHORTEST_LOOK = 0.002
_LONGEST_LOOK = 0.02


@dataclass(frozen=True)
class Process:
    """A process. Its id alone does not identify it, because another process may have the same id
    later.

    Attributes:
        pid: The process id.
        started: When the process started, in clock ticks since the boot.
    """

    pid: int
    started: int


@dataclass(frozen=True)
class Earlier:
    """The children that this process had before it forked for the first time. They do not come from
    the worker.

    Attributes:
        processes: These children.
        first_fork: When this process forked for the first time, in clock ticks since the boot; 0
            if that is not known.
    """

    processes: tuple[Process, ...] = ()
    first_fork: int = 0

    @classmethod
    def note(cls) -> Earlier:
        """Return the children that this process has now. Call this before the first fork."""
        found = [_identify(pid) for pid in children_of(os.getpid())]
        return cls(tuple(process for process in found if process))

    def with_first_fork(self, forked: Iterable[int]) -> Earlier:
        """Return a copy with the time of the first fork. Call this after the forks of the first
        start, and before any of these children is reaped. Once the time is known, calls have no
        effect.

        Args:
            forked: The process ids of the children that this process has forked. This process may
                have got other children since :meth:`note`: the orphans of a helper that has ended
                meanwhile.
        """
        if self.first_fork:
            return self
        found = [_identify(pid) for pid in forked]
        # Use the start time that the kernel reports for a child of our own, and not a clock: it is
        # counted in the same ticks as the times with which it is compared.
        times = [each.started for each in found if each]
        return replace(self, first_fork=min(times, default=0))

    def without(self, pids: Iterable[int]) -> list[int]:
        """Return those of our children that may come from the worker.

        Args:
            pids: The process ids of our children.
        """
        if not self.processes and not self.first_fork:
            return list(pids)
        sessions = {_session(process.pid) for process in self.processes if _is_there(process)}
        sessions -= {None, os.getsid(0)}
        return [pid for pid in pids if not self._has(pid, sessions)]

    def _has(self, pid: int, sessions: Collection[int | None]) -> bool:
        process = _identify(pid)
        if process is None:
            return False
        if process in self.processes or process.started < self.first_fork:
            return True
        return _session(pid) in sessions


@dataclass
class Descendants:
    """Ends the processes that the worker has left behind.

    A launcher, such as an ``srun`` that the script has started, gets SIGTERM before SIGKILL: after
    SIGKILL alone, the processes that it has started on other nodes would go on.

    Attributes:
        earlier: The children that do not come from the worker, as noted before the first fork.
        own: The process ids of other children, which this process has started itself and needs
            until the start ends: the sentinel, the sampler, the agent store. Only :meth:`kill`
            kills them.
        limits: How long the processes may take to end, and how often to look.
    """

    earlier: Earlier = Earlier()
    own: set[int] = field(default_factory=set)
    limits: Limits = DEFAULT_LIMITS
    _asked: set[Process] = field(default_factory=set)
    # When the launchers that have got SIGTERM are killed; None before the first one has got it.
    _launchers_end_at: float | None = None
    # Until when tick() looks for processes that are left; None while it does not look.
    _looks_until: float | None = None

    @property
    def not_of_worker(self) -> set[int]:
        """The process ids of our children that do not come from the worker."""
        return self.own | {process.pid for process in self.earlier.processes}

    def kill(self, given_up: Collection[int] = ()) -> set[int]:
        """Kill and reap every process that the worker has left behind, and every other process that
        this process has forked. Call this when the worker has ended.

        A process whose kernel call does not return cannot be killed, so this waits for
        :attr:`Limits.all_gone_within` at most.

        Args:
            given_up: The process ids of children that may hang, and for which this does not wait.

        Returns:
            The process ids of the children that are still there, without those that are spared.
        """
        end = time.monotonic() + self.limits.all_gone_within
        look = _SHORTEST_LOOK
        while True:
            children = self.earlier.without(children_of(os.getpid()))
            for child in children:
                self._end(child)
            has_reaped = False
            with contextlib.suppress(ChildProcessError):
                while os.waitpid(-1, os.WNOHANG)[0]:
                    has_reaped = True
            if set(children) <= set(given_up) or time.monotonic() >= end:
                return set(children)
            if has_reaped:
                continue  # look at once: the orphans of the reaped processes are our children now
            time.sleep(look)
            look = min(2 * look, _LONGEST_LOOK)

    def begin_to_kill(self) -> None:
        """Begin to kill the processes that the worker has left behind, while this process goes on:
        :meth:`tick` does so step by step. Call this when the worker has ended.
        """
        self._looks_until = time.monotonic() + self.limits.all_gone_within

    def tick(self, writers: Collection[int]) -> float | None:
        """Kill those processes that the worker has left behind and that exist now, without waiting
        for them to end. They are reaped on SIGCHLD, see :meth:`WorkerProcess.collect`.

        Args:
            writers: The process ids of those of our children that are writing a file about a
                failure. They are spared.

        Returns:
            In how many seconds to call this again. None if no such process is left, or if the time
            of :attr:`Limits.all_gone_within` is over because some cannot be killed.
        """
        if self._looks_until is None:
            return None
        # Orphans become children of the main thread. The children of other threads are our own,
        # such as the Slurm commands for which a thread waits.
        children = self.earlier.without(_children_of_main_thread())
        left = [pid for pid in children if pid not in self.own and pid not in writers]
        for child in left:
            self._end(child)
        if not left:
            self._launchers_end_at = None
        if not left or time.monotonic() >= self._looks_until:
            self._looks_until = None
            return None
        return self.limits.left_behind_looks

    def _end(self, pid: int) -> None:
        # Do not kill the processes that a launcher has started while it has time to end: it may
        # need them to end the processes on its other nodes.
        if _is_launcher(pid) and self._has_time(pid):
            return
        # Kill the children first. When the process has ended, children that it has started
        # meanwhile become our own children, and the next round finds them.
        for child in children_of(pid):
            self._end(child)
        _send(pid, signal.SIGKILL)

    def _has_time(self, pid: int) -> bool:
        """Return whether a process that is a launcher may still take time to end; False once its
        time is over or if it is gone. The first call sends it SIGTERM.
        """
        process = _identify(pid)
        if process is None:
            return False
        now = time.monotonic()
        if self._launchers_end_at is None:
            self._launchers_end_at = now + self.limits.launchers_end_within
        if now >= self._launchers_end_at:
            return False
        if process not in self._asked:
            self._asked.add(process)
            _send(pid, signal.SIGTERM)
            _send(pid, signal.SIGCONT)  # a stopped process would not handle it
        return True


def _is_launcher(pid: int) -> bool:
    return text_of(Path(f"/proc/{pid}/comm")) in REMOTE_STARTERS


def _send(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, number)


def _identify(pid: int) -> Process | None:
    """Return the process that has this id now; None if there is none."""
    with contextlib.suppress(OSError):
        return Process(pid, int(stat_fields(pid)[STARTED]))
    return None


def _is_there(process: Process) -> bool:
    return _identify(process.pid) == process


def _session(pid: int) -> int | None:
    """Return the session of a process; None if it has ended."""
    with contextlib.suppress(OSError):
        return int(stat_fields(pid)[SESSION])
    return None


def _children_of_main_thread() -> list[int]:
    pid = os.getpid()
    return [int(child) for child in text_of(Path(f"/proc/{pid}/task/{pid}/children")).split()]
