"""An audit hook that notes each process that this one starts or becomes; the rest of the program
runs as it would.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

STARTS = (
    "subprocess.Popen",
    "os.system",
    "os.exec",
    "os.posix_spawn",
    "os.spawn",
    "os.fork",
    "os.forkpty",
    "pty.spawn",
)


def watch(seen: Callable[[str], object]) -> None:
    """From now on each start is told to ``seen``, before it happens."""

    def note(event: str, arguments: tuple[Any, ...]) -> None:
        if event in STARTS:
            seen(f"{event} {arguments!r:.200}")

    sys.addaudithook(note)
