"""A module that multiprocessing's fork server imports if it is started for loader workers.

Then the server blocks the signals that Slurm sends to a job step, and so do the processes that it
starts. But the script may start other processes by the same server, which must end on SIGTERM.
"""

import signal
from multiprocessing import util

from srunddp.supervisor.signals import REQUESTS

_is_loader_worker = False


def keep_signals_blocked() -> None:
    """Note that this process of the fork server is a loader worker, which keeps signals blocked.

    Call this before ``multiprocessing`` calls the functions that were registered by :func:`begin`.
    """
    global _is_loader_worker
    _is_loader_worker = True


def begin() -> None:
    """Let each process that the fork server starts unblock the signals, except loader workers.

    A process does so after it has imported the script; a signal that has arrived before is
    delivered then.
    """
    # multiprocessing calls registered functions in a new process after unpickling its target. In a
    # loader worker this unpickling calls keep_signals_blocked().
    util.register_after_fork(_unblock_signals, _unblock_signals)


def _unblock_signals(_: object) -> None:
    if not _is_loader_worker:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, REQUESTS)
