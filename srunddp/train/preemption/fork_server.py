"""What multiprocessing's fork server imports, when it is started for loader workers.

It is started with the signals of a step blocked, which its processes inherit. The script's own
processes come from the same server, and are to end by a SIGTERM.
"""

import signal
from multiprocessing import util

from srunddp.supervisor.signals import FORWARDED

_is_loader_worker = False


def keep_signals_blocked() -> None:
    """In a process that is about to begin: it is a loader worker."""
    global _is_loader_worker
    _is_loader_worker = True


def begin() -> None:
    """In the fork server: its processes get the signals again when they begin, unless they are
    loader workers.

    By then they have imported the script. A signal that came before comes then.
    """
    util.register_after_fork(_unblock_signals, _unblock_signals)


def _unblock_signals(_: object) -> None:
    if not _is_loader_worker:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, FORWARDED)
