"""Keeps signals that arrive before the script has set its handlers from ending the worker.

Users send SIGUSR1 and SIGUSR2 to all ranks to ask for a checkpoint, and cannot know which ranks are
still in the rendezvous or importing torch. Until the script can handle these signals, the worker
only notes which of them have arrived. Afterwards the supervisor sends them again, see
:class:`srunddp.supervisor.forwarding.HeldSignals`.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from types import FrameType

from srunddp.supervisor.signals import FOR_HANDLERS
from srunddp.supervisor.worker_messages import NotesSignals, SignalsNoted
from srunddp.supervisor.worker_process import WorkerPipe


class SignalNotes:
    """Notes which signals have arrived in the worker, by handlers that do nothing else.

    The signals are not blocked instead, because other threads, such as those of NumPy's BLAS, would
    not block them, and programs that are started in the meantime would inherit the signal mask.
    """

    def __init__(self, supervisor: WorkerPipe) -> None:
        """Take the worker's end of the pipe to its supervisor."""
        self._supervisor = supervisor
        self._worker = os.getpid()
        self._handled: list[signal.Signals] = []
        self._noted: list[int] = []

    def set_handlers(self) -> None:
        """Begin to note signals, by a handler for each of ``FOR_HANDLERS`` that has no handler and
        is not ignored.
        """
        self._handled = [
            number for number in FOR_HANDLERS if signal.getsignal(number) is signal.SIG_DFL
        ]
        for number in self._handled:
            signal.signal(number, self._note)
            # Let the kernel restart a system call that the signal interrupts, so that C code which
            # has made the call notices nothing.
            signal.siginterrupt(number, False)

    def _note(self, number: int, _: FrameType | None) -> None:
        if os.getpid() == self._worker:
            self._noted.append(number)
            return
        # This process is a child that the worker has forked. No supervisor would send it the signal
        # again, so let the signal have its default effect.
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)

    def remove_handlers(self) -> None:
        """Stop noting signals, and tell the supervisor which ones have arrived."""
        for number in self._handled:
            # During getsignal() Python calls the handlers of signals that have arrived before, so
            # that these are noted too. A handler that the script has set in the meantime stays.
            if signal.getsignal(number) == self._note:
                signal.signal(number, signal.SIG_DFL)
        self._handled.clear()
        self._supervisor.send(SignalsNoted(tuple(self._noted)))
        self._noted.clear()

    @contextlib.contextmanager
    def around_import(self) -> Iterator[None]:
        """Note the signals during an import that the script makes.

        In other threads than the main thread this does nothing, because they cannot set handlers,
        and neither in processes that the worker has forked, because these have no supervisor.
        """
        is_main = threading.current_thread() is threading.main_thread()
        if not is_main or os.getpid() != self._worker:
            yield
            return
        # Tell the supervisor before setting the handlers, so that it does not take them for
        # handlers of the script.
        self._supervisor.send(NotesSignals())
        self.set_handlers()
        try:
            yield
        finally:
            self.remove_handlers()
