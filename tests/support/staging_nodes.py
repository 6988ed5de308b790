"""Starts the program that staging runs on a node, without Slurm."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TypeVar

from srunddp.stage import slurm
from srunddp.stage.messages import Answer, CannotDo, Look, Looked, MarkedPlace, StageMessage
from srunddp.util.filesystem import mark

A = TypeVar("A", bound=Answer)
NODE = "node09"


class Node:
    """One task of a job step that stages folders. Its Python has only the standard library.

    Args:
        folder: The job's folder on the node.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", slurm.READ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={"PATH": os.environ["PATH"], "SLURMD_NODENAME": NODE},
        )
        self._write(slurm.first_line(str(folder)))

    def _write(self, line: bytes) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(line)
        self.process.stdin.flush()

    def ask(self, request: StageMessage, wanted: type[A]) -> A:
        """Send a request, and return the answer."""
        self.send(request)
        return self.answer(wanted)

    def send(self, request: StageMessage) -> None:
        """Send a request without waiting for the answer."""
        self._write(request.encode())

    def answer(self, wanted: type[A]) -> A:
        """Wait for the answer to the last request, and check its type, its node and its length."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert len(line) < 1024
        answer = StageMessage.decode(line)
        assert isinstance(answer, wanted), line
        assert answer.node == NODE
        return answer

    def look(self, *places: Path) -> None:
        """Ask the node to look for these folders, as this process sees them."""
        self.ask(self._look(places), Looked)

    def refuses(self, *places: Path) -> CannotDo:
        """Ask the node to look for these folders, and return why it cannot."""
        return self.ask(self._look(places), CannotDo)

    def _look(self, places: Iterable[Path]) -> Look:
        marked = tuple(MarkedPlace(str(place), mark(str(place))) for place in places)
        return Look(marked, python=sys.executable)

    def leave_alone(self) -> None:
        """End the requests, so that the task only keeps the job's folder."""
        assert self.process.stdin is not None
        self.process.stdin.close()


@contextlib.contextmanager
def node(folder: Path) -> Iterator[Node]:
    """Start a task on the node, and kill it at the end of the block."""
    started = Node(folder)
    with started.process:
        try:
            yield started
        finally:
            started.process.kill()
