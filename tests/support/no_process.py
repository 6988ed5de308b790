"""Notes, by an audit hook, each program that this process starts or becomes. The process itself is
not changed by it.
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
    """Call ``seen`` from now on before this process starts a process or becomes another program.

    Args:
        seen: Gets the audit event and its arguments as text.
    """

    def note(event: str, arguments: tuple[Any, ...]) -> None:
        if event in STARTS:
            seen(f"{event} {arguments!r:.200}")

    sys.addaudithook(note)
