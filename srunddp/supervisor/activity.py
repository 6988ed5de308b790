"""Detects whether a worker that is being ended still does anything: runs Python or writes files.

A worker that handles SIGTERM may be saving. But Python calls the handler only when the main thread
runs Python again, which it does not while it waits for another rank in a collective or for a GPU.
From outside, a worker that saves and one that waits look alike: each is inside a call of C code,
and which call that is cannot be seen. So the supervisor sends a second signal, :data:`PROBE`, whose
Python handler increments a counter in shared memory. If the counter does not change, the main
thread is not running Python. If, in addition, neither the worker nor any process that it has
started writes anything, and the worker's stack shows no function that saves, nothing is being
saved.
"""

import contextlib
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from srunddp.supervisor.signals import handles, signal_main_thread
from srunddp.supervisor.stacks import StackDump
from srunddp.util.kernel_file import children_of, stat_fields, text_of
from srunddp.util.python_stack import is_saving, main_stack
from srunddp.util.quick_dataclass import dataclass

PROBE = signal.SIGRTMAX - 4
"""The signal whose handler shows that the main thread runs Python. Neither Python, torch, NCCL nor
MPI uses it.
"""

_IN_DISK_SLEEP = "D"


def arm(answer: Callable[[], None]) -> None:
    """Have this process answer each :data:`PROBE`. Call this in the worker, in its main thread.

    Args:
        answer: Counts an answer in a place that the supervisor can read.
    """
    # SA_RESTART is not set, so that Python calls the handler even during a read that does not
    # return.
    signal.signal(PROBE, lambda *_: answer())
    os.register_at_fork(after_in_child=_disarm)


def _disarm() -> None:
    # A forked child must not answer: its answers would be taken for the worker's.
    signal.signal(PROBE, signal.SIG_DFL)


class _Snapshot(NamedTuple):
    """What one look has found: the number of probes that the worker has answered so far, and the
    kernel's counters of what it has written, as the text that :func:`_written` returns.
    """

    answers: int
    written: str


@dataclass
class WorkerActivity:
    """Tells whether a worker has done anything since the last look.

    Attributes:
        pid: The worker's process id.
        answers: Returns how many probes the worker has answered.
        dump: The memory into which the worker writes its stack.
    """

    pid: int
    answers: Callable[[], int]
    dump: StackDump
    _last: _Snapshot | None = None

    def look(self) -> bool:
        """Return whether the worker has run Python or written anything since the previous look, or
        is writing now, and send the worker the next probe. Return True if this cannot be told, as
        at the first look.
        """
        before = self._last
        self._last = _Snapshot(self.answers(), _written(self.pid))
        # If the script has replaced itself by another program with exec, that program has no
        # handler for the probe, which would kill it.
        if not handles(self.pid, PROBE):
            self._last = None
            return True
        with contextlib.suppress(ProcessLookupError):
            signal_main_thread(self.pid, PROBE)
        if before is None or not self._last.written:
            return True
        if self._last != before or _is_in_disk_sleep(self.pid):
            return True
        is_saved = is_saving(main_stack(self.dump.request(self.pid)))
        # The kernel's counters include the stack that the worker has just written. Take them again,
        # so that the next look does not take the stack for the worker's own work.
        self._last = self._last._replace(written=_written(self.pid))
        return is_saved


def _written(pid: int) -> str:
    """Return the kernel's counters ``wchar`` and ``write_bytes`` of a process and its descendants,
    as text; empty if they cannot be read.

    The counter ``wchar`` does not include a long write(2) before the call returns; ``write_bytes``
    does. Descendants are read as well, because the kernel adds a child's counters to its parent's
    only when the child has ended, and a handler may save with a command such as ``cp``.
    """
    # Reads are not counted, because a process that waits for a socket may read.
    counts = text_of(Path(f"/proc/{pid}/io")).splitlines()
    own = [line for line in counts if line.startswith(("wchar:", "write_bytes:"))]
    return " ".join([*own, *map(_written, children_of(pid))])


def _is_in_disk_sleep(pid: int) -> bool:
    """Return whether the main thread waits for a disk or a file system inside the kernel (state D
    of ``/proc/PID/stat``); False if the process is gone.
    """
    with contextlib.suppress(OSError, IndexError):
        return stat_fields(pid)[0] == _IN_DISK_SLEEP
    return False
