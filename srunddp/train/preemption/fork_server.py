"""What multiprocessing's fork server imports, when it is started for loader workers.

It is started with the signals of a step blocked, which its processes inherit. The script's own
processes come from the same server, and are to end by a SIGTERM.
"""

import signal
from multiprocessing import util

from srunddp.supervisor.signals import REQUESTS

_is_loader_worker = False


def keep_signals_blocked() -> None:
    """Note, in a process of the fork server that is about to begin, that it is a loader worker."""
    global _is_loader_worker
    _is_loader_worker = True


def begin() -> None:
    """Have the fork server's processes get the signals again when they begin.

    Loader workers do not. By then they have imported the script; a signal that came before comes
    then.
    """
    # multiprocessing calls these in a new process after it has read what the process is to run, by
    # which keep_signals_blocked() was called.
    util.register_after_fork(_unblock_signals, _unblock_signals)


def _unblock_signals(_: object) -> None:
    if not _is_loader_worker:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, REQUESTS)
