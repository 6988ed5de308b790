"""No process is left: what a worker started ends with it, whoever has adopted it meanwhile."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Collection

from srunddp.supervisor import signals
from srunddp.util.kernel_file import children_of

_WITHIN = 10.0


def wait_for_child(pid: int, limit: float) -> int | None:
    """The exit code of a child; None where it has not ended in time, -1 where others have collected it."""
    end = time.monotonic() + limit
    with contextlib.suppress(ChildProcessError):
        while not (found := os.waitpid(pid, os.WNOHANG))[0]:
            if time.monotonic() >= end:
                return None
            time.sleep(0.002)
        return os.waitstatus_to_exitcode(found[1])
    return -1


def kill_descendants(given_up: Collection[int] = ()) -> None:
    """In the supervisor, when the worker has ended: kill and collect every process that it left.

    Not without limit: one in a kernel call that does not return cannot be killed. ``given_up`` are known to be so.
    """
    end = time.monotonic() + _WITHIN
    while True:
        children = children_of(os.getpid())
        for child in children:
            _kill_with_children(child)
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        if set(children) <= set(given_up) or time.monotonic() >= end:
            return
        time.sleep(0.002)


def _kill_with_children(pid: int) -> None:
    # Its children first become ours when it has ended, and are found in the next round; those that are not killed
    # yet may start more meanwhile, which that round finds as well.
    for child in children_of(pid):
        _kill_with_children(child)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, signal.SIGKILL)


def kill_forks_on_exit(worker: int) -> None:
    """In the worker: what Python forks here ends with this process, also where the supervisor was killed.

    Such are the DataLoader's workers. Only those of the main thread: the kernel's signal comes at the end of the
    *thread* that forked. And only our own children: one that leaves its parent on purpose would be killed by it.
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
