"""The sampler of a node as its local rank 0's supervisor has it: forked before the worker, ended
before it leaves.

It takes one sample after the other, at fixed times. It never imports torch, asks the kernel and
NVML alone, and appends to files that are complete to the last sample whatever ends it.
"""

from __future__ import annotations

import contextlib
import gc
import math
import os
import select
import signal
import socket
import time
from dataclasses import dataclass
from pathlib import Path

from srunddp.monitor.config import MonitorConfig
from srunddp.monitor.sampler import gpu, node, process_tree
from srunddp.supervisor import signals
from srunddp.supervisor.worker_process import wait_for_child
from srunddp.util.atomic_file import append_whole
from srunddp.util.kernel_file import raise_open_files_limit
from srunddp.util.sample_files import OF_A_NODE, SampleFile

NAME = "srunddp-monitor"  # 15 letters, all that Linux keeps
_GONE_WITHIN = 0.2  # after SIGKILL; in a kernel call that does not return it cannot be killed
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
        launcher: process id of whose children the tasks of this node are; None or 0 where that is
            not known.
    """

    run: MonitorConfig
    interface: str
    rank_variable: str
    supervisor: int
    launcher: int | None


@dataclass(frozen=True)
class Sampler:
    """A running one; ``pid`` is its process id."""

    pid: int
    _end: socket.socket

    def in_worker(self) -> None:
        """Leave the sampler to the supervisor, in a process that it forks later."""
        self._end.close()

    def finish(self, limit: float) -> str:
        """In the supervisor: have a last sample written, and see the sampler end; after ``limit``
        seconds it is killed.

        Returns:
            Why it could not write its files, in one line; else nothing.
        """
        until = time.monotonic() + limit
        message = b""
        with self._end:
            with contextlib.suppress(OSError):
                # The sampler sees the end of the stream, and its own end stays open for what it may
                # have to say.
                self._end.shutdown(socket.SHUT_WR)
            with contextlib.suppress(OSError):
                while select.select([self._end], [], [], max(0.0, until - time.monotonic()))[0]:
                    if not (more := self._end.recv(4096)):
                        break
                    message += more
        if wait_for_child(self.pid, until - time.monotonic()) is None:
            # It has not been collected, so that the number is still its own.
            os.kill(self.pid, signal.SIGKILL)
            wait_for_child(self.pid, _GONE_WITHIN)
        return message.decode(errors="replace")


def start(config: SamplerConfig) -> Sampler:
    """Fork the sampler of a node. To be called in the main thread, whose end is the sampler's as
    well, with the signals blocked: those that Slurm sends to every process of a step are not for
    this one.
    """
    ours, theirs = socket.socketpair()
    pid = os.fork()
    if pid == 0:
        try:
            # Never back into the supervisor's code: its exit handlers and buffered output must not
            # run twice.
            _run_sampler(config, theirs)
        finally:
            os._exit(0)
    theirs.close()
    return Sampler(pid, ours)


def _run_sampler(config: SamplerConfig, end: socket.socket) -> None:
    signals.die_with_parent(config.supervisor)
    # Also those that no one has blocked.
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    with contextlib.suppress(OSError):
        Path("/proc/self/comm").write_text(NAME)
    _close_inherited(end.fileno())
    try:
        sample_until_closed(config, end)
    except Exception as error:
        if isinstance(error, OSError):
            reason = f"{error.filename}: {error.strerror}"
        else:
            reason = repr(error)
        end.sendall(f"the monitor of {config.run.node} ended: {reason}".encode())


def _close_inherited(kept: int) -> None:
    """Nobody is to wait for the end of a pipe or a line that this process happens to have."""
    nothing = os.open(os.devnull, os.O_RDWR)
    for standard in (0, 1, 2):
        if standard != kept:
            os.dup2(nothing, standard)
    for opened in map(int, os.listdir("/proc/self/fd")):
        if opened > 2 and opened != kept:
            with contextlib.suppress(OSError):  # the listing's own
                os.close(opened)


def sample_until_closed(config: SamplerConfig, end: socket.socket) -> None:
    """Write samples at once and every ``config.run.seconds``, and a last one when the other side of
    ``end`` is closed.

    Raises:
        OSError: a file cannot be written.
    """
    with contextlib.suppress(OSError, ValueError):
        raise_open_files_limit()  # four of each process are kept open, of maybe hundreds
    # Before the freeze below, as these objects live to the end.
    samples = Samples(config)
    gc.freeze()
    closed = select.poll()
    closed.register(end, select.POLLIN)
    due = time.monotonic()
    while True:
        samples.take()
        now = time.monotonic()
        # After a sample that took too long some times are left out, and the others stay as they
        # were.
        due += config.run.seconds * max(1, math.ceil((now - due) / config.run.seconds))
        # The only sleep, so that the end is noticed at once.
        if closed.poll(1000 * (due - now)):
            break
    samples.take(last=True)


class Samples:
    """The sources of a node and their files. What one of them stumbles over leaves the others as
    they are.

    Raises:
        OSError: a file cannot be written.
    """

    def __init__(self, config: SamplerConfig) -> None:
        self._run = config.run
        self._taken = 0
        self._thorough_at = 0.0
        self._tasks = process_tree.Tasks(
            config.run.rank, config.supervisor, config.launcher, config.rank_variable
        )
        self._node = node.Node(self._tasks, config.interface)
        self._gpus = gpu.Gpus(config.run.seconds)
        self._tables = [
            (self._open("node"), self._node.rows),
            (self._open("tasks"), self._tasks.rows),
            (self._open("links"), node.NetworkCounters(config.interface).rows),
        ]

    def _open(self, name: str) -> CsvWriter:
        path = self._run.folder / f"{self._run.node}.{name}.csv"
        return CsvWriter(path, OF_A_NODE[name])

    def take(self, *, last: bool = False) -> None:
        """Write a sample of each source."""
        thorough = last or self._taken < _THOROUGH_AT_FIRST or time.monotonic() >= self._thorough_at
        if thorough:
            self._thorough_at = time.monotonic() + _THOROUGH_EVERY
        self._taken += 1
        seconds, milliseconds = divmod(time.time_ns() // 1_000_000, 1000)
        has_gpus = False
        # Whatever a kernel or a driver says that no one has thought of.
        with contextlib.suppress(Exception):
            if self._tasks.look(thorough=thorough) or thorough:
                self._node.look()
                has_gpus = self._gpus.choose(self._tasks.visible)
        if has_gpus and len(self._tables) == 3:
            self._tables.append((self._open("gpus"), self._gpus.rows))
        for table, rows in self._tables:
            # A source may fail. A file that cannot be written ends the sampler instead, which says
            # so: add() is outside of the try.
            lines = ""
            with contextlib.suppress(Exception):
                lines = rows(f"{seconds}.{milliseconds:03}")
            if lines:
                table.add(lines)


class CsvWriter:
    """One file, emptied when it is opened. Each sample is one write, without a buffer.

    Raises:
        OSError: the file cannot be opened or written; it is named.
    """

    def __init__(self, path: Path, kind: SampleFile) -> None:
        self._path = path
        # With O_APPEND the next write begins at the new end after append_whole() has taken a
        # partial one back. At the descriptor's own offset it would leave a hole.
        self._file = os.open(
            path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_CLOEXEC, 0o666
        )
        self.add(kind.header)

    def add(self, lines: str) -> None:
        """Append whole lines.

        Raises:
            OSError: There is no room, or the file system fails; what was written is taken back.
        """
        try:
            append_whole(self._file, lines.encode())
        except OSError as error:
            error.filename = self._path
            raise
