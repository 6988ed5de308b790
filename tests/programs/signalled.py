"""Write down what signals do to this process. ``signalled.py MODE FILE`` appends to FILE:

- ``record``: each signal that comes, until ``FILE.end`` exists.
- ``save``: that a KeyboardInterrupt has come, and that what it began to save is saved; then the
  exception goes on.
- ``group``: that it goes on after it has sent its group a SIGTERM that it ignores meanwhile.
- ``read``: a line of standard input.
- ``sleep``: nothing more, until ``FILE.end`` exists, with all handlers as they were.

Each begins with ``ready``.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

MODE = sys.argv[1]
FILE = Path(sys.argv[2])
END = FILE.with_name(f"{FILE.name}.end")
RECORDED = (
    signal.SIGTERM,
    signal.SIGINT,
    signal.SIGHUP,
    signal.SIGQUIT,
    signal.SIGUSR1,
    signal.SIGUSR2,
    signal.SIGCONT,
)


def say(what: str) -> None:
    with FILE.open("a") as file:
        file.write(f"{what}\n")


def wait() -> None:
    limit = time.monotonic() + 300.0
    while not END.exists() and time.monotonic() < limit:
        time.sleep(0.05)


if MODE == "record":
    for number in RECORDED:
        signal.signal(number, lambda got, _: say(signal.Signals(got).name))
    say("ready")
    wait()
elif MODE == "save":
    say("ready")
    try:
        wait()
    except KeyboardInterrupt:
        say("interrupted")
        time.sleep(1.0)
        say("saved")
        raise
elif MODE == "group":
    say("ready")
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    os.killpg(0, signal.SIGTERM)
    signal.signal(signal.SIGTERM, before)
    time.sleep(1.0)
    say("goes on")
elif MODE == "read":
    say("ready")
    say(f"read {input()}")
elif MODE == "sleep":
    say("ready")
    wait()
