"""The Python stacks of a worker, which faulthandler writes on a signal, without the GIL.

The worker writes into shared memory that the supervisor reads. So no pipe can be full, no file of
the user is needed, and the stacks that faulthandler writes at a crash are still there when the
worker has ended.
"""

import contextlib
import faulthandler
import os
import signal
import time

from srunddp.supervisor.limits import DEFAULT_LIMITS, Limits
from srunddp.supervisor.signals import handles, signal_main_thread
from srunddp.util.kernel_file import memory_file

# The signal that asks for stacks. Neither Python, torch, NCCL nor MPI uses it.
ASK = signal.SIGRTMAX - 3
_LONGEST = 12000  # characters of a dump
_OURS = 'srunddp/run/main_module.py", line'  # in the frame of srunddp that has called the script


class StackDump:
    """Shared memory into which the worker's faulthandler writes. Create it before the fork.

    Attributes:
        descriptor: The descriptor of the memory, which is a file without a name.
    """

    def __init__(self, descriptor: int | None = None, limits: Limits = DEFAULT_LIMITS) -> None:
        self.descriptor = memory_file() if descriptor is None else descriptor
        self._read = 0
        self._limits = limits
        # Ignore the signal, which would kill the worker, until arm() sets a handler. It is ignored
        # again when Python has shut down and the exit handlers of C run.
        signal.signal(ASK, signal.SIG_IGN)

    def arm(self) -> None:
        """Have faulthandler write the stacks of all threads here at a crash, and that of the main
        thread when the signal comes. Call this in the worker.

        If the user has switched faulthandler on (PYTHONFAULTHANDLER), the stacks of a crash still
        go to standard error. In processes that the worker forks, the signal has its default effect.
        """
        if not faulthandler.is_enabled():
            faulthandler.enable(self.descriptor)
        # Write only the stack of the thread that takes the signal. With all threads, faulthandler
        # would write only the newest 100, and the main thread is the oldest.
        faulthandler.register(ASK, self.descriptor, all_threads=False)
        os.register_at_fork(after_in_child=_disarm)

    def read(self) -> str:
        """Return the text written since the last call. Call this in the supervisor."""
        return _of_the_script(self._unread())

    def _unread(self) -> bytes:
        piece = os.pread(self.descriptor, 1 << 18, self._read)
        self._read += len(piece)
        return piece

    def request(self, worker: int) -> str:
        """Ask the worker for the stack of its main thread and return it; empty if the worker gives
        none in time, as when the thread blocks signals. Call this in the supervisor.

        Args:
            worker: The worker's process id.
        """
        self._unread()
        # If the script has replaced itself by another program with exec, that program has no
        # handler for the signal, which would kill it.
        if handles(worker, ASK):
            with contextlib.suppress(ProcessLookupError):
                signal_main_thread(worker, ASK)
        # faulthandler writes a line in several pieces. Wait until the text ends with a complete
        # line and nothing more comes.
        dumped = b""
        end = time.monotonic() + self._limits.stacks_within
        while time.monotonic() < end:
            time.sleep(self._limits.stacks_look)
            more = self._unread()
            if dumped.endswith(b"\n") and not more:
                break
            dumped += more
        return _of_the_script(dumped)[:_LONGEST]


def _of_the_script(dumped: bytes) -> str:
    """Return the text of a dump without the frames of srunddp that have called the script."""
    kept: list[str] = []
    ours = False
    for line in dumped.decode(errors="replace").strip().splitlines():
        ours = line.startswith("  File ") and (ours or _OURS in line)
        if not ours:
            kept.append(line)
    return "\n".join(kept)


def _disarm() -> None:
    # A forked child must not answer: its stack would be taken for the worker's.
    faulthandler.unregister(ASK)
    signal.signal(ASK, signal.SIG_DFL)
