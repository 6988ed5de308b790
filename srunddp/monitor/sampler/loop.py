"""What the sampler does: one sample after the other, at fixed times, until its supervisor says that it is over."""

from __future__ import annotations

import contextlib
import gc
import math
import os
import resource
import select
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from srunddp.monitor.sampler import gpu, node, tasks

if TYPE_CHECKING:
    from srunddp.monitor.monitor import MonitorConfig

_THOROUGH_AT_FIRST = 5  # samples, while the tasks of a node start one after the other
_THOROUGH_EVERY = 60.0  # seconds


@dataclass(frozen=True)
class SamplerConfig:
    """What is to be watched on this node.

    Attributes:
        run: of the supervisor's own task; its folder exists.
        interface: the chosen network interface.
        rank_variable: that tells a task its rank; empty for a single process.
        supervisor: process id of who forks the sampler.
        launcher: process id of whose children the tasks of this node are; None or 0 where that is not known.
    """

    run: MonitorConfig
    interface: str
    rank_variable: str
    supervisor: int
    launcher: int | None


def sample_until_closed(site: SamplerConfig, end: socket.socket) -> None:
    """Write samples at once and every ``site.run.seconds``, and a last one when the other side of ``end`` is closed.

    Raises:
        UnwritableError: a file cannot be written.
    """
    _allow_many_files()
    samples = Samples(site)
    gc.freeze()
    closed = select.poll()
    closed.register(end, select.POLLIN)
    due = time.monotonic()
    while True:
        samples.take()
        now = time.monotonic()
        due += site.run.seconds * max(1, math.ceil((now - due) / site.run.seconds))
        if closed.poll(1000 * (due - now)):
            break
    samples.take(last=True)


def _allow_many_files() -> None:
    """Four of each process are kept open, and a node may have hundreds."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


class Samples:
    """The sources of a node and their files. What one of them stumbles over leaves the others as they are.

    Raises:
        UnwritableError: a file cannot be written.
    """

    def __init__(self, site: SamplerConfig) -> None:
        self._site = site
        self._taken, self._thorough_at = 0, 0.0
        self._tasks = tasks.Tasks(site.run.rank, site.supervisor, site.launcher, site.rank_variable)
        self._node = node.Node(self._tasks, site.interface)
        self._gpus = gpu.Gpus(site.run.seconds)
        links = node.NetworkCounters(site.interface)
        self._tables = [
            (self._open("node", node.COLUMNS), self._node.rows),
            (self._open("tasks", tasks.COLUMNS), self._tasks.rows),
            (self._open("links", node.LINK_COLUMNS), links.rows),
        ]

    def _open(self, name: str, columns: tuple[str, ...]) -> CsvWriter:
        return CsvWriter(self._site.run.folder / f"{self._site.run.node}.{name}.csv", columns)

    def take(self, *, last: bool = False) -> None:
        """Write a sample of each source."""
        thorough = last or self._taken < _THOROUGH_AT_FIRST or time.monotonic() >= self._thorough_at
        if thorough:
            self._thorough_at = time.monotonic() + _THOROUGH_EVERY
        self._taken += 1
        seconds, milliseconds = divmod(time.time_ns() // 1_000_000, 1000)
        stamp = f"{seconds}.{milliseconds:03}"
        self._look(thorough=thorough)
        for table, rows in self._tables:
            self._write(table, rows, stamp)

    def _look(self, *, thorough: bool) -> None:
        try:
            if self._tasks.look(thorough=thorough) or thorough:
                self._node.look()
                self._choose_gpus()
        except UnwritableError:
            raise
        except Exception:  # whatever a kernel or a driver says that no one has thought of
            return

    def _choose_gpus(self) -> None:
        if self._gpus.choose(self._tasks.visible) and len(self._tables) == 3:
            self._tables.append((self._open("gpus", gpu.COLUMNS), self._gpus.rows))

    def _write(self, table: CsvWriter, rows: Callable[[str], str], stamp: str) -> None:
        try:
            lines = rows(stamp)
        except Exception:
            return
        if lines:
            table.add(lines)


class UnwritableError(Exception):
    """A file cannot be written; the message names it and the reason."""


class CsvWriter:
    """One file, emptied when it is opened. Each sample is one write, without a buffer.

    Args:
        path: of the file; columns: their names, in order.

    Raises:
        UnwritableError: the file cannot be opened or written.
    """

    def __init__(self, path: Path, columns: tuple[str, ...]) -> None:
        self._path = path
        try:
            self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_CLOEXEC, 0o666)
        except OSError as error:
            raise self._unwritable(error) from error
        self._size = 0
        self.add(",".join(columns) + "\n")

    def add(self, lines: str) -> None:
        """Append whole lines.

        Raises:
            UnwritableError: there is no room, or the file system fails; what was written of them is taken back.
        """
        data = lines.encode()
        try:
            written = os.write(self._file, data)
            if written < len(data):  # the disk was full in between, and says so when asked again
                written += os.write(self._file, data[written:])
        except OSError as error:
            with contextlib.suppress(OSError):
                os.ftruncate(self._file, self._size)
            raise self._unwritable(error) from error
        self._size += written

    def _unwritable(self, error: OSError) -> UnwritableError:
        return UnwritableError(f"{self._path}: {error.strerror}")
