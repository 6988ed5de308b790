"""Write down each signal that this process and a child of its own get, until none has come for some
seconds.

``record_signals.py FOLDER [LINGER [SENDER]]`` makes ``FOLDER/RANK.script`` and
``FOLDER/RANK.child``: a line for each signal, its number and the time. It ends LINGER seconds after
the first signal that asks for an end, 2 unless given. Rank SENDER sends SIGUSR1 to its own process
group when there is a file ``FOLDER/go``.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
RECORDED = (
    *ENDING,
    signal.SIGQUIT,
    signal.SIGUSR1,
    signal.SIGUSR2,
    signal.SIGALRM,
    signal.SIGXCPU,
    signal.SIGCONT,
    signal.SIGTSTP,
    signal.SIGWINCH,
)
RANK = next(
    os.environ[name]
    for name in ("RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID")
    if name in os.environ
)


def record(who: str, parent: int) -> None:
    """Until so long after a signal, or until the process that started this one has ended."""
    file = os.open(
        Path(sys.argv[1], f"{RANK}.{who}"), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644
    )
    linger = float(sys.argv[2]) if len(sys.argv) > 2 else 2.0
    sends = who == "script" and sys.argv[3:] == [RANK]
    ends = time.monotonic() + 300
    os.write(file, f"ready {time.time():.3f}\n".encode())
    while time.monotonic() < ends and os.getppid() == parent:
        # Taken one by one: where two are pending a handler of Python's would be called in the order
        # of the numbers.
        received = signal.sigtimedwait(RECORDED, 0.2)
        if sends and Path(sys.argv[1], "go").exists():
            sends = False
            os.killpg(0, signal.SIGUSR1)
        if received is None:
            continue
        os.write(file, f"{signal.Signals(received.si_signo).name} {time.time():.3f}\n".encode())
        if received.si_signo in ENDING:
            ends = min(ends, time.monotonic() + linger)


signal.pthread_sigmask(signal.SIG_BLOCK, RECORDED)
launcher = os.getppid()
script = os.getpid()
if os.fork():
    record("script", launcher)
else:
    record("child", script)
    os._exit(0)
