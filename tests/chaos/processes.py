"""The processes of one run on all nodes, found by a mark in their environment, and the moment each
of them ended.
"""

from __future__ import annotations

import os
import select
import signal
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Self

_EVERY = 0.005
# A process that was just forked shows its mark only after exec.
_YOUNG = 2.0
# Of the launchers, not of the ranks; their end is measured apart.
_LAUNCHERS = (
    "srun",
    "sbatch",
    "salloc",
    "slurm_script",
    "nsenter",
    "mpirun",
    "mpiexec",
    "hydra_pmi_proxy",
    "orted",
    "prted",
    "prterun",
    "mpirun.openmpi",
    "mpiexec.hydra",
    "orterun",
    "prte",
)


@dataclass
class Marked:
    """A process of the run; its moments are time.monotonic()."""

    pid: int
    name: str
    seen: float
    ended: float | None = None

    @property
    def is_launcher(self) -> bool:
        return self.name in _LAUNCHERS


class Watch:
    """A thread that sees every process with the mark come and go.

    The nodes share the machine's process ids. An end is noticed by a pidfd, at once; a zombie has
    ended.
    """

    def __init__(self, mark: str) -> None:
        self.all: dict[int, Marked] = {}
        self._mark = mark.encode()
        self._first_seen: dict[int, float] = {}
        self._descriptors: dict[int, Marked] = {}
        self._poll = select.poll()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        for descriptor in self._descriptors:
            os.close(descriptor)

    def living(self, *, launchers: bool = True) -> list[Marked]:
        found = [process for process in list(self.all.values()) if process.ended is None]
        return [process for process in found if launchers or not process.is_launcher]

    def kill(self) -> None:
        """End what is left of the run."""
        for process in self.living():
            with suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGKILL)

    def _watch(self) -> None:
        while not self._stop.is_set():
            self._look()
            for descriptor, _ in self._poll.poll(_EVERY * 1000):
                self._ended(descriptor)

    def _look(self) -> None:
        now = time.monotonic()
        there = {int(name) for name in os.listdir("/proc") if name.isdigit()}
        self._first_seen = {pid: self._first_seen.get(pid, now) for pid in there}
        for pid, first in self._first_seen.items():
            if now - first < _YOUNG:
                self._read(pid, now)

    def _read(self, pid: int, now: float) -> None:
        with suppress(OSError):
            known = self.all.get(pid)
            if known and known.ended is None:
                known.name = Path(f"/proc/{pid}/comm").read_text().strip()
            elif self._mark in Path(f"/proc/{pid}/environ").read_bytes():
                descriptor = os.pidfd_open(pid)
                self._descriptors[descriptor] = self.all[pid] = Marked(pid, "", now)
                self._poll.register(descriptor, select.POLLIN)

    def _ended(self, descriptor: int) -> None:
        self._descriptors.pop(descriptor).ended = time.monotonic()
        self._poll.unregister(descriptor)
        os.close(descriptor)
