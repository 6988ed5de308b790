"""The thread that passes a worker's output on, to its file and to the terminal, without ever
waiting for the latter.

The terminal is what the supervisor has as standard output or error: a pipe of the launcher's, a
file or a tty. It may be slow, full or gone.
"""

from __future__ import annotations

import contextlib
import errno
import math
import os
import re
import select
import stat
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from srunddp.supervisor.limits import DEFAULT_LIMITS, Limits

_READ = 1 << 16
_WAITING = 1 << 20  # bytes that may wait, each for standard output and error
_LONGEST_LINE = 1 << 16
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@dataclass
class OutputRelay:
    """A thread that reads the worker's pipes until all who hold them have closed them, or
    :meth:`finish`.

    Attributes:
        streams: the terminal of each pipe, by the pipe's reading end.
        file: the descriptor that all is written to, in the order in which it comes; None for none.
    """

    streams: Mapping[int, NonBlockingStream]
    file: int | None
    limits: Limits = DEFAULT_LIMITS
    _open: set[int] = field(default_factory=set)
    _end_event: int = -1
    _deadline: float = math.inf
    _came: float = 0.0
    _ended: float = 0.0

    def start(self) -> None:
        """Start the thread; it has the signal mask of the caller."""
        self._open = set(self.streams)
        self._end_event = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def finish(self, limit: float) -> None:
        """Pass on what is still in the pipes, within ``limit`` seconds."""
        self._ended = time.monotonic()
        self._deadline = self._ended + limit
        os.eventfd_write(self._end_event, 1)
        self._thread.join(limit)
        if not self._thread.is_alive():
            os.close(self._end_event)

    def _run(self) -> None:
        while self._open and not self._is_over():
            self._turn()
        for terminal in self.streams.values():
            terminal.end()
        while (
            any(terminal.waiting for terminal in self.streams.values())
            and time.monotonic() < self._deadline
        ):
            self._turn()
        for source, terminal in self.streams.items():
            os.close(source)
            terminal.close()
        if self.file is not None:
            os.close(self.file)

    def _is_over(self) -> bool:
        """After the worker's end: time is up, or whoever still holds the pipes is silent."""
        if self._deadline == math.inf:
            return False
        now = time.monotonic()
        busy = any(terminal.waiting for terminal in self.streams.values())
        return now >= self._deadline or (
            now - max(self._came, self._ended) >= self.limits.relay_quiet and not busy
        )

    def _turn(self) -> None:
        """Wait until something can be read or written, and do so."""
        ready = self._wait()
        # Standard output comes first: what a script printed before its traceback is then before it
        # in the file.
        sources = [source for source in self.streams if source in self._open & ready]
        before = self._came
        self._came = time.monotonic() if sources else self._came
        size = sum(self._pass_on(source) for source in sources)
        for terminal in self.streams.values():
            terminal.flush()
        # A script that prints line by line would wake us for each, at many times the cost.
        rest = self.limits.relay_rests
        if 0 < size < _READ and self._came - before < 2 * rest and self._deadline == math.inf:
            time.sleep(rest)

    def _wait(self) -> set[int]:
        poller = select.poll()
        now = time.monotonic()
        finishing = self._deadline < math.inf
        if finishing:
            patience = min(self.limits.relay_looks, max(0.0, self._deadline - now))
        else:
            patience = math.inf
        if not finishing:
            poller.register(self._end_event, select.POLLIN)
        for source, terminal in self.streams.items():
            if source in self._open and not (hold := self._hold(terminal, now)):
                poller.register(source, select.POLLIN)
            elif source in self._open:
                patience = min(patience, hold)
            if terminal.waiting:
                poller.register(terminal.descriptor, select.POLLOUT)
        return {found for found, _ in poller.poll(1000 * patience if patience < math.inf else None)}

    def _hold(self, terminal: NonBlockingStream, now: float) -> float:
        # Half of the last seconds are the file's, whatever the terminal does.
        if self.file is not None and now >= (self._ended + self._deadline) / 2:
            return 0.0
        return terminal.hold(now)

    def _pass_on(self, source: int) -> int:
        data = os.read(source, _READ)
        if not data:
            self._open.discard(source)
            return 0
        rest = memoryview(b"" if self.file is None else data)
        # The disk is full: the terminal still has it, and there may be room again.
        with contextlib.suppress(OSError):
            while self.file is not None and rest:
                rest = rest[os.write(self.file, rest) :]
        self.streams[source].put(data)
        return len(data)


@dataclass
class LinePrefixer:
    """Puts a prefix before each line; a line ends with ``\\n``, or as a progress bar's with
    ``\\r``.
    """

    prefix: bytes
    _begun: bytes = b""
    _returned: bool = False

    def feed(self, data: bytes) -> bytes:
        """The lines that are complete now, each with its prefix."""
        # The second half of a \r\n that came in two parts is no line.
        if self._returned and data.startswith(b"\n"):
            half = b"\n"
        else:
            half = b""
        text = self._begun + data[len(half) :]
        end = _end_of_lines(text)
        lines = self._prefixed(text[:end])
        self._begun = text[end:]
        while len(self._begun) > _LONGEST_LINE:
            lines += self.prefix + self._begun[:_LONGEST_LINE] + b"\n"
            self._begun = self._begun[_LONGEST_LINE:]
        self._returned = lines.endswith(b"\r")
        return half + lines

    def rest(self) -> bytes:
        """The last line, if it has no end, with one."""
        begun = self._begun
        self._begun = b""
        if begun:
            return self.prefix + begun + b"\n"
        return b""

    def _prefixed(self, lines: bytes) -> bytes:
        if not lines:
            return b""
        if b"\r" not in lines:
            return self.prefix + lines[:-1].replace(b"\n", b"\n" + self.prefix) + b"\n"
        # tqdm begins each bar with \r: alone it would make a line of the prefix and nothing else.
        found = re.findall(rb"[^\r\n]*(?:\r\n|[\r\n])", lines)
        return b"".join(self.prefix + line for line in found if line != b"\r")


def _end_of_lines(text: bytes) -> int:
    return max(text.rfind(b"\n"), text.rfind(b"\r")) + 1


class NonBlockingStream:
    """The supervisor's standard output or error, which may be slow, full or gone.

    ``descriptor`` is to be polled for when something is ``waiting``, which it has not taken yet.
    """

    def __init__(
        self, inherited: int, prefix: bytes, file: Path | None, limits: Limits = DEFAULT_LIMITS
    ) -> None:
        self.descriptor, self._never_blocks = _without_blocking(inherited)
        self.waiting = bytearray()
        self._inherited = inherited
        self._file = file
        self._limits = limits
        self._lines = LinePrefixer(prefix) if prefix else None
        self._gone = self._full = False
        self._filled: float | None = None  # since when there is no room
        self._left_out = 0  # bytes that it never will take, and that no note has told of
        self._last = b"\n"

    def hold(self, now: float) -> float:
        """For how many seconds the worker is to wait for room; without a file for as long as it
        takes.

        With a file it waits a moment only: that is enough for a reader that is merely slower than a
        burst of output.
        """
        if self._filled is None or self._left_out:
            return 0.0
        if self._file:
            return max(0.0, self._filled + self._limits.relay_holds - now)
        return math.inf

    def put(self, data: bytes) -> None:
        """Take what the worker wrote, and write what can be written without waiting; what has no
        room is left out.
        """
        text = self._lines.feed(data) if self._lines else data
        if self._gone or (self._file and self._filled is not None):
            self._left_out += len(data)
        else:
            self._note()
            self._append(text)
        self.flush()

    def end(self) -> None:
        """No more will come: the last line, if it has no end, is one all the same."""
        if self._lines and not self._gone:
            self._append(self._lines.rest())
        self.flush()

    def flush(self) -> None:
        """Write until nothing is waiting, or the terminal takes no more."""
        self._write()
        if not self.waiting:
            self._note()
            self._write()

    def _write(self) -> None:
        while self.waiting and (
            self._never_blocks or select.select([], [self.descriptor], [], 0)[1]
        ):
            # A pipe takes this much whole or not at all: ranks that share it do not mix within a
            # line.
            piece = bytes(self.waiting[: select.PIPE_BUF])
            if len(piece) != len(self.waiting):
                piece = piece[: _end_of_lines(piece)] or piece
            try:
                written = os.write(self.descriptor, piece)
                self._full = False
            except BlockingIOError:
                return
            except OSError as error:
                # A full disk may have room again; all else, as a reader that has left, is for good.
                self._full = True
                self._gone = error.errno not in _FULL
                written = len(self.waiting) if self._gone else len(piece)
                self._left_out += written
            del self.waiting[:written]
            # Rather one long gap than many short ones.
            if len(self.waiting) < _WAITING // 2:
                self._filled = None

    def close(self) -> None:
        """Give back what was opened for it; the inherited descriptor stays."""
        if self.descriptor != self._inherited:
            os.close(self.descriptor)

    def _append(self, text: bytes) -> None:
        self.waiting += text
        self._last = text[-1:] or self._last
        if len(self.waiting) >= _WAITING and self._filled is None:
            self._filled = time.monotonic()

    def _note(self) -> None:
        if not self._left_out or self._full:
            return
        if self._lines:
            prefix = self._lines.prefix
        else:
            prefix = b""
        if self._file:
            where = f"; {self._file} has them"
        else:
            where = ""
        note = (
            f"srunddp: {self._left_out} bytes left out here, which were not taken in time{where}\n"
        )
        self._left_out = 0
        self._append(
            (b"" if self._last in b"\r\n" else b"\n")
            + prefix
            + note.encode(errors="backslashreplace")
        )


def _without_blocking(inherited: int) -> tuple[int, bool]:
    """A descriptor for the same pipe or tty whose writes never wait, where there can be one; and
    whether there is.

    O_NONBLOCK on the inherited one would change it for all processes that share it. A tty that says
    it is writable may have room for a single byte, and a pipe that others write to may be full
    again: polling alone does not do.
    """
    try:
        if not os.isatty(inherited) and not stat.S_ISFIFO(os.fstat(inherited).st_mode):
            return inherited, False
        return os.open(
            f"/proc/self/fd/{inherited}", os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
        ), True
    except OSError:  # another user's, as of a launcher that runs as root: then polling has to do
        return inherited, False
