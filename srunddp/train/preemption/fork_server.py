"""A module that multiprocessing's fork server imports if it is started for loader workers.

Such a server has inherited that the signals which Slurm sends to a job step are blocked, and each
process that it starts inherits it, too. But the script may start other processes by the same
server, and these must end on SIGTERM. So each process unblocks the signals after its start, unless
it is a loader worker.
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
