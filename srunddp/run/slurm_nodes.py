"""The nodes that Slurm itself takes for down: asked for those of which nothing has been heard for a while."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterable

_WITHIN = 10.0


class DownNodes:
    """In a Slurm step, what ``sinfo`` says; where there is no such command, nothing.

    Attributes:
        names: of those that it has said so of.
    """

    def __init__(self) -> None:
        self.names: frozenset[str] = frozenset()
        self._thread: threading.Thread | None = None

    def ask(self, nodes: Iterable[str]) -> None:
        """Ask for these in a thread, unless one does so already."""
        if "SLURM_STEP_ID" in os.environ and not (self._thread and self._thread.is_alive()):
            self._thread = threading.Thread(target=self._ask, args=(",".join(sorted(nodes)),), daemon=True)
            self._thread.start()

    def _ask(self, nodes: str) -> None:
        import subprocess  # most runs need none of it, and here it delays nobody

        with contextlib.suppress(OSError, subprocess.SubprocessError):
            command = ["sinfo", "--noheader", "--Node", "--nodes", nodes, "--format", "%N %t"]
            said = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_WITHIN)
            states = [line.split() for line in said.stdout.splitlines()]
            self.names = frozenset(state[0] for state in states if len(state) == 2 and state[1].startswith("down"))
