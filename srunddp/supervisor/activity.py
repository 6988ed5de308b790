"""Whether a worker that is being ended does anything: runs Python, or writes files.

A worker that handles SIGTERM may be saving. But Python calls the handler only when the main thread
runs Python again, which it does not while it waits for another rank in a collective or for a GPU.
From outside the two look alike: both are inside one call of C, and which call that is, is unknown.
So the supervisor sends a second signal, which Python handles like SIGTERM, and the handler counts
in shared memory. A main thread that has not handled it runs no Python. If neither the process nor
one that it has started writes anything, and the stack shows no function that does, nothing is being
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
    """Have this process answer each :data:`PROBE`. Called in the worker, in its main thread.

    Args:
        answer: Counts an answer where the supervisor sees it.
    """
    # Not with SA_RESTART: Python shall call the handler also during a read that does not return.
    signal.signal(PROBE, lambda *_: answer())
    os.register_at_fork(after_in_child=_disarm)


def _disarm() -> None:
    # In a forked child: its answers would be taken for the worker's.
    signal.signal(PROBE, signal.SIG_DFL)


class _Snapshot(NamedTuple):
    """What a worker has done so far: how many probes it has answered, and the kernel's counts of
    what it has written, as text.
    """

    answers: int
    written: str


@dataclass
class WorkerActivity:
    """Tells from one look to the next whether a worker does anything.

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
        """Return whether the worker has run Python or written anything since the last look, and
        send it the next probe. If that cannot be told, it has.
        """
        before = self._last
        self._last = _Snapshot(self.answers(), _written(self.pid))
        # A program that the script has executed in its process has no handler, and would be killed.
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
        # Writing its stack is no work of the worker's, but the kernel counts it.
        self._last = self._last._replace(written=_written(self.pid))
        return is_saved


def _written(pid: int) -> str:
    """Return the kernel's counts of what a process and its descendants have written; empty if they
    cannot be read.

    A long write(2) shows only in the second of them before it returns. The kernel adds the counts
    of a child to its parent's only when the child has ended, and a handler may save by a command
    such as ``cp``, for which its main thread waits inside one call of C.
    """
    # Not the count of what was read: a wait for a socket may read.
    counts = text_of(Path(f"/proc/{pid}/io")).splitlines()
    own = [line for line in counts if line.startswith(("wchar:", "write_bytes:"))]
    return " ".join([*own, *map(_written, children_of(pid))])


def _is_in_disk_sleep(pid: int) -> bool:
    """Return whether the main thread waits for a file system inside the kernel."""
    with contextlib.suppress(OSError, IndexError):
        return stat_fields(pid)[0] == _IN_DISK_SLEEP
    return False
