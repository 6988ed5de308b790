"""A module that multiprocessing's fork server imports if it is started for loader workers.

The server starts with the signals of a step blocked, and its processes inherit that. The script's
own processes come from the same server, but must end on SIGTERM.
"""

import signal
from multiprocessing import util

from srunddp.supervisor.signals import REQUESTS

_is_loader_worker = False


def keep_signals_blocked() -> None:
    """Note that this process, which the fork server is about to start, is a loader worker."""
    global _is_loader_worker
    _is_loader_worker = True


def begin() -> None:
    """Let processes of the fork server get the signals again when they begin.

    Loader workers stay without them. By then a process has imported the script; signals that
    arrived before are delivered then.
    """
    # multiprocessing calls these in a new process after unpickling its target, which in a loader
    # worker calls keep_signals_blocked().
    util.register_after_fork(_unblock_signals, _unblock_signals)


def _unblock_signals(_: object) -> None:
    if not _is_loader_worker:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, REQUESTS)
