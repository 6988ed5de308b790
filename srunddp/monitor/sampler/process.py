"""Forks, runs and ends the sampler of a node. The supervisor of local rank 0 forks it before the
worker and ends it before leaving.

The sampler takes a reading at fixed times. It never imports torch and asks only the kernel and
NVML. Whatever ends it, its files are complete up to the last reading.
"""

from __future__ import annotations

import contextlib
import gc
import math
import os
import select
import signal
import socket
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

from srunddp.monitor.config import MonitorConfig
from srunddp.monitor.sampler import gpu, node, process_tree
from srunddp.monitor.sampler.slow_ranks import SlowRankLooks
from srunddp.supervisor import signals
from srunddp.supervisor.worker_process import wait_for_child
from srunddp.util.atomic_file import append_whole
from srunddp.util.kernel_file import raise_open_files_limit
from srunddp.util.sample_files import OF_A_NODE, SampleFile

NAME = "srunddp-monitor"  # 15 characters: Linux keeps no more of a process's name
# Seconds to wait after SIGKILL: a process in an uninterruptible system call does not end.
_GONE_WITHIN = 0.2
# A thorough reading looks for new tasks, and reads even processes that have not run. The first few
# readings are thorough because the tasks of a node start one after another.
_THOROUGH_AT_FIRST = 5
_THOROUGH_EVERY = 60.0  # seconds


@dataclass(frozen=True)
class SamplerConfig:
    """The processes and the interface that the sampler of this node watches.

    Attributes:
        run: How the supervisor's own task is monitored. The folder exists already.
        interface: Name of the network interface that the run uses.
        rank_variable: The environment variable that holds a task's rank; empty for a single
            process.
        supervisor: The pid of the supervisor that forks the sampler.
        launcher: The pid of the process whose children are this node's tasks; None or 0 if unknown.
    """

    run: MonitorConfig
    interface: str
    rank_variable: str
    supervisor: int
    launcher: int | None


@dataclass(frozen=True)
class Sampler:
    """A running sampler, and the supervisor's end of the socket between the two.

    Attributes:
        pid: The sampler's process id.
    """

    pid: int
    _end: socket.socket
    # Two threads of the supervisor read from the socket.
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def in_worker(self) -> None:
        """Close the socket to the sampler, in a process that the supervisor forks later."""
        self._end.close()

    def notes(self) -> list[str]:
        """Return, without waiting, the lines for the user that the sampler has sent since the last
        call.
        """
        with self._lock, contextlib.suppress(OSError):
            waiting = self._end.recv(4096, socket.MSG_PEEK | socket.MSG_DONTWAIT)
            # Text without a newline says why the sampler has ended. finish() reads it.
            whole = waiting[: waiting.rfind(b"\n") + 1]
            if whole:
                return self._end.recv(len(whole)).decode(errors="replace").splitlines()
        return []

    def finish(self, limit: float) -> str:
        """Make the sampler take a last reading and end; kill it if that takes too long. Call this
        in the supervisor.

        Args:
            limit: How many seconds the sampler may take.

        Returns:
            The line in which the sampler said why it ended early; empty if it did not end early.
        """
        until = time.monotonic() + limit
        message = b""
        with self._lock, self._end:
            with contextlib.suppress(OSError):
                # The end of the stream makes the sampler take its last reading. The other direction
                # stays open, so that the sampler can still report an error.
                self._end.shutdown(socket.SHUT_WR)
            with contextlib.suppress(OSError):
                while select.select([self._end], [], [], max(0.0, until - time.monotonic()))[0]:
                    if not (more := self._end.recv(4096)):
                        break
                    message += more
        if wait_for_child(self.pid, until - time.monotonic()) is None:
            # The child has not been waited for yet, so its pid cannot belong to another process.
            os.kill(self.pid, signal.SIGKILL)
            wait_for_child(self.pid, _GONE_WITHIN)
        # Drop lines about slow ranks, each of which ends with a newline: now only the report can
        # name these ranks. Text after the last newline says why the sampler has ended.
        return message.decode(errors="replace").rpartition("\n")[2]


def start(config: SamplerConfig) -> Sampler:
    """Fork the sampler of a node.

    Call this in the main thread, because the kernel ends the sampler together with the thread that
    forked it. The supervisor must have blocked the signals that it watches, because a signal that
    Slurm sends to every process of a job step must not end the sampler.
    """
    ours, theirs = socket.socketpair()
    pid = os.fork()
    if pid == 0:
        try:
            # Never return into the supervisor's code: its exit handlers and buffered output must
            # not run twice.
            _run_sampler(config, theirs)
        finally:
            os._exit(0)
    theirs.close()
    return Sampler(pid, ours)


def _run_sampler(config: SamplerConfig, end: socket.socket) -> None:
    signals.die_with_parent(config.supervisor)
    # Block also the signals that the supervisor does not watch.
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
    """Close all inherited descriptors but ``kept``, because another process may wait until a pipe
    or socket is closed. The standard streams lead to /dev/null from then on.
    """
    nothing = os.open(os.devnull, os.O_RDWR)
    for standard in (0, 1, 2):
        if standard != kept:
            os.dup2(nothing, standard)
    for opened in map(int, os.listdir("/proc/self/fd")):
        if opened > 2 and opened != kept:
            with contextlib.suppress(OSError):  # the directory listing's own descriptor
                os.close(opened)


def sample_until_closed(config: SamplerConfig, end: socket.socket) -> None:
    """Take a reading now, then another every ``config.run.seconds``, and a last reading when the
    supervisor closes its side of the socket.

    Args:
        config: What the sampler of this node watches.
        end: The sampler's end of the socket to the supervisor.

    Raises:
        OSError: A file cannot be written.
    """
    with contextlib.suppress(OSError, ValueError):
        # The sampler keeps four files open for each process of the tasks, and there may be hundreds
        # of processes.
        raise_open_files_limit()
    # Create the samples before gc.freeze(), which takes all present objects out of garbage
    # collection: the samples exist until the sampler ends.
    samples = Samples(config)
    gc.freeze()
    looks = SlowRankLooks(config.run, end)
    closed = select.poll()
    closed.register(end, select.POLLIN)
    due = time.monotonic()
    while True:
        samples.take()
        looks.tick()
        now = time.monotonic()
        # If a reading took longer than the interval, skip the times that have passed meanwhile. The
        # later readings are still taken at whole intervals after the first.
        due += config.run.seconds * max(1, math.ceil((now - due) / config.run.seconds))
        # The sampler sleeps only in this poll(), so it notices at once when the supervisor closes
        # its side.
        if closed.poll(1000 * (due - now)):
            break
    samples.take(last=True)


class Samples:
    """The sources of a node's readings, and the files of the readings. If a source fails, only its
    rows are missing.

    Args:
        config: What the sampler of this node watches.

    Raises:
        OSError: A file cannot be written.
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
        """Take one reading: read every source, and append its rows to its file.

        Args:
            last: Whether this is the last reading, which is always thorough.

        Raises:
            OSError: A file cannot be written.
        """
        thorough = last or self._taken < _THOROUGH_AT_FIRST or time.monotonic() >= self._thorough_at
        if thorough:
            self._thorough_at = time.monotonic() + _THOROUGH_EVERY
        self._taken += 1
        seconds, milliseconds = divmod(time.time_ns() // 1_000_000, 1000)
        has_gpus = False
        # The kernel or a driver may answer in an unexpected way, which must not end the sampler.
        with contextlib.suppress(Exception):
            if self._tasks.look(thorough=thorough) or thorough:
                self._node.look()
                has_gpus = self._gpus.choose(self._tasks.visible)
        if has_gpus and len(self._tables) == 3:
            self._tables.append((self._open("gpus"), self._gpus.rows))
        for table, rows in self._tables:
            # If a source fails in rows(), only its rows are missing. An error of add() is not
            # suppressed: if a file cannot be written, the sampler ends and reports it.
            lines = ""
            with contextlib.suppress(Exception):
                lines = rows(f"{seconds}.{milliseconds:03}")
            if lines:
                table.add(lines)


class CsvWriter:
    """A CSV file that is emptied when it is opened. The rows of each reading are written at once,
    without a buffer.

    Args:
        path: The file.
        kind: What the file contains, which gives its header.

    Raises:
        OSError: The file cannot be opened or written; the exception names it.
    """

    def __init__(self, path: Path, kind: SampleFile) -> None:
        self._path = path
        # append_whole() removes a partial write. With O_APPEND the next write begins at the new end
        # of the file. Without O_APPEND it would begin at the old offset and leave a hole before it.
        self._file = os.open(
            path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_CLOEXEC, 0o666
        )
        self.add(kind.header)

    def add(self, lines: str) -> None:
        """Append complete lines to the file.

        Raises:
            OSError: The disk is full or the file system fails; a partial write has been removed.
        """
        try:
            append_whole(self._file, lines.encode())
        except OSError as error:
            error.filename = self._path
            raise
