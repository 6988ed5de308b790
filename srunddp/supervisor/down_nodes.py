"""The nodes that Slurm itself takes for down: asked for those of which nothing has been heard for a while."""

from __future__ import annotations

import os
import re
import threading

_WITHIN = 10.0


class DownNodes:
    """In a Slurm step, those that ``sinfo`` says are down; where there is no such command, none."""

    def __init__(self) -> None:
        self.names: frozenset[str] = frozenset()
        self._thread = threading.Thread()

    def ask(self, nodes: set[str]) -> None:
        """Ask for these in a thread, unless one does so already."""
        if "SLURM_STEP_ID" in os.environ and not self._thread.is_alive():
            self._thread = threading.Thread(target=self._ask, args=(",".join(sorted(nodes)),), daemon=True)
            self._thread.start()

    def _ask(self, nodes: str) -> None:
        from srunddp.util import slurm_command  # most runs need none of it, and here it delays nobody

        command = ("sinfo", "--noheader", "--Node", "--nodes", nodes, "--format", "%N %t")
        shown = slurm_command.output(*command, timeout=_WITHIN, any_status=True)
        self.names = frozenset(re.findall(r"^(\S+) down", shown, re.MULTILINE))
