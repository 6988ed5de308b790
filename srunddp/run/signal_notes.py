"""Signals that arrive before the script can set a handler, and that would end it.

Users send SIGUSR1 and SIGUSR2 to all ranks to ask for a checkpoint, and cannot know which ranks are
still in the rendezvous or importing torch. Until the script can handle these signals the worker
notes them, and then its supervisor sends them again: see
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
    """Notes the signals of the worker.

    It sets handlers instead of blocking the signals: other threads, such as those of NumPy's BLAS,
    would not block them, and programs started in the meantime would inherit the block.
    """

    def __init__(self, supervisor: WorkerPipe) -> None:
        """Take the worker's end of the pipe to its supervisor."""
        self._supervisor = supervisor
        self._worker = os.getpid()
        self._handled: list[signal.Signals] = []
        self._noted: list[int] = []

    def set_handlers(self) -> None:
        """Begin to note the signals that have no handler and are not ignored."""
        self._handled = [
            number for number in FOR_HANDLERS if signal.getsignal(number) is signal.SIG_DFL
        ]
        for number in self._handled:
            signal.signal(number, self._note)
            # Restart system calls that such a signal interrupts, so that their callers notice
            # nothing.
            signal.siginterrupt(number, False)

    def _note(self, number: int, _: FrameType | None) -> None:
        if os.getpid() == self._worker:
            self._noted.append(number)
            return
        # The worker has forked this process: it has no supervisor that would send the signal again.
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)

    def remove_handlers(self) -> None:
        """Stop noting signals, and tell the supervisor which ones have arrived."""
        for number in self._handled:
            # This call lets Python run the handler for signals that have arrived but were not
            # handled yet. A handler that the script has set in the meantime stays.
            if signal.getsignal(number) == self._note:
                signal.signal(number, signal.SIG_DFL)
        self._handled.clear()
        self._supervisor.send(SignalsNoted(tuple(self._noted)))
        self._noted.clear()

    @contextlib.contextmanager
    def around_import(self) -> Iterator[None]:
        """Note the signals during an import that the script makes.

        Only the main thread can set handlers, and only the worker has a supervisor.
        """
        is_main = threading.current_thread() is threading.main_thread()
        if not is_main or os.getpid() != self._worker:
            yield
            return
        # Send this before setting the handlers: the supervisor must not take them for the script's.
        self._supervisor.send(NotesSignals())
        self.set_handlers()
        try:
            yield
        finally:
            self.remove_handlers()
