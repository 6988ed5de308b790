"""The program that staging runs on a node, started without Slurm."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from srunddp.stage import slurm
from srunddp.util.filesystem import mark

NODE = "node09"


class Node:
    """One task of a staging step, with this folder for the job, and a Python that has its standard
    library alone.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", slurm.READ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={"PATH": os.environ["PATH"], "SLURMD_NODENAME": NODE},
        )
        self._send(slurm.first_message(str(folder)))

    def _send(self, message: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(message).encode() + b"\n")
        self.process.stdin.flush()

    def ask(self, do: str, **request: Any) -> dict[str, Any]:
        """What it answers."""
        self.send(do, **request)
        return self.answer()

    def send(self, do: str, **request: Any) -> None:
        """Without waiting for the answer."""
        self._send({"do": do, **request})

    def answer(self) -> dict[str, Any]:
        """To what was sent."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert len(line) < 1024
        return dict(json.loads(line))

    def look(self, *places: Path) -> dict[str, Any]:
        """Ask for these places as they are here."""
        named = [{"path": str(place), "mark": mark(str(place))} for place in places]
        return self.ask("look", places=named, python=sys.executable)

    def leave_alone(self) -> None:
        """No more requests: it keeps the folder."""
        assert self.process.stdin is not None
        self.process.stdin.close()


@contextlib.contextmanager
def node(folder: Path) -> Iterator[Node]:
    """One that is ended at the end."""
    started = Node(folder)
    with started.process:
        try:
            yield started
        finally:
            started.process.kill()
