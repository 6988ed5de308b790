"""What multiprocessing's fork server imports, when it is started for loader workers.

It is started with the signals of a step blocked, which its processes inherit. The script's own
processes come from the same server, and are to end by a SIGTERM.
"""

import multiprocessing
import signal
from multiprocessing import util

from srunddp.supervisor.signals import FORWARDED

_LOADER = "torch.utils.data."


def _unblock_signals(_: object) -> None:
    """In a process of the server, once it has imported the script: get the signals again, unless it
    is a loader worker.

    One that came before comes now.
    """
    process = multiprocessing.current_process()
    target = getattr(process, "_target", None)  # private; a test pins it
    if not getattr(target, "__module__", "").startswith(_LOADER):
        signal.pthread_sigmask(signal.SIG_UNBLOCK, FORWARDED)


util.register_after_fork(_unblock_signals, _unblock_signals)
