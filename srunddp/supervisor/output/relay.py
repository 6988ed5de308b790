"""The thread that passes a worker's output on to its file and to the terminal, and never waits for
the terminal.

The terminal is the supervisor's standard output or error: a pipe to the launcher, a file or a tty.
It may be slow, full or gone.
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
_WAITING = 1 << 20  # bytes that may wait for the terminal, for each of standard output and error
_LONGEST_LINE = 1 << 16
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@dataclass
class OutputRelay:
    """A thread that reads the worker's pipes until every process has closed them, or until
    :meth:`finish` ends it.

    Attributes:
        streams: The terminal stream of each pipe, by the descriptor of the pipe's reading end.
        file: The descriptor of the file that gets all output in the order of its arrival; None for
            none.
        limits: How often the thread reads and looks, and how long it waits.
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
        """Start the thread, which inherits the caller's signal mask."""
        self._open = set(self.streams)
        self._end_event = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def finish(self, limit: float) -> None:
        """Pass on what is still in the pipes, and end the thread, within ``limit`` seconds."""
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
        """Return whether to stop reading. While the worker runs, the result is False. After its end
        it is True if the time of :meth:`finish` is over, or if the processes that still hold the
        pipes have printed nothing for a moment.
        """
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
        # Standard output comes first, so that the file has a script's last output above its
        # traceback.
        sources = [source for source in self.streams if source in self._open & ready]
        before = self._came
        self._came = time.monotonic() if sources else self._came
        size = sum(self._pass_on(source) for source in sources)
        for terminal in self.streams.values():
            terminal.flush()
        # If output comes line by line, pause, so that not each line wakes the thread.
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
        """Return for how many seconds not to read from the worker, because a terminal takes
        nothing.
        """
        # In the second half of the time that is left after the worker's end, do not wait for the
        # terminal any more, so that at least the file gets all output.
        if self.file is not None and now >= (self._ended + self._deadline) / 2:
            return 0.0
        return terminal.hold(now)

    def _pass_on(self, source: int) -> int:
        data = os.read(source, _READ)
        if not data:
            self._open.discard(source)
            return 0
        rest = memoryview(b"" if self.file is None else data)
        # If writing fails, as when the disk is full, the terminal still gets the output. Try again
        # with the next output, because there may be room then.
        with contextlib.suppress(OSError):
            while self.file is not None and rest:
                rest = rest[os.write(self.file, rest) :]
        self.streams[source].put(data)
        return len(data)


@dataclass
class LinePrefixer:
    """Puts a prefix before each line. A line ends with ``\\n``, or with ``\\r`` as a progress bar
    does.

    Attributes:
        prefix: The text before each line.
    """

    prefix: bytes
    _begun: bytes = b""
    _returned: bool = False

    def feed(self, data: bytes) -> bytes:
        """Take more output, and return the lines that are complete now, with their prefixes."""
        # If the two characters of a line end \r\n come in separate pieces, pass on the \n without a
        # prefix, because it does not begin another line.
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
        """Return the incomplete last line with its prefix and a line end; empty if there is none.
        Nothing of it is kept.
        """
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
        # tqdm begins each bar with \r. A \r alone is left out, because it would become a line that
        # has only the prefix.
        found = re.findall(rb"[^\r\n]*(?:\r\n|[\r\n])", lines)
        return b"".join(self.prefix + line for line in found if line != b"\r")


def _end_of_lines(text: bytes) -> int:
    return max(text.rfind(b"\n"), text.rfind(b"\r")) + 1


class NonBlockingStream:
    """The supervisor's standard output or error, which may be slow, full or gone.

    Attributes:
        descriptor: The descriptor to write to, and to poll while bytes are waiting.
        waiting: The bytes that the terminal has not taken yet.
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
        self._filled: float | None = None  # since when `waiting` is full; None if it is not
        self._left_out = 0  # bytes left out since the last note that said so
        self._last = b"\n"  # the last byte for the terminal; a note must begin a new line

    def hold(self, now: float) -> float:
        """Return for how many seconds not to read from the worker, because the terminal takes
        nothing.

        Without a file, this is as long as the terminal takes nothing, because the output must not
        be lost. With a file, it is only a moment, in which a reader that is only slower than a
        burst of output can catch up.
        """
        if self._filled is None or self._left_out:
            return 0.0
        if self._file:
            return max(0.0, self._filled + self._limits.relay_holds - now)
        return math.inf

    def put(self, data: bytes) -> None:
        """Take output of the worker, and write what can be written without waiting.

        The output is left out on the terminal if the terminal is gone, or if :attr:`waiting` is
        full and a file has everything.
        """
        text = self._lines.feed(data) if self._lines else data
        if self._gone or (self._file and self._filled is not None):
            self._left_out += len(data)
        else:
            self._note()
            self._append(text)
        self.flush()

    def end(self) -> None:
        """Note the end of the output: an incomplete last line is written with a line end."""
        if self._lines and not self._gone:
            self._append(self._lines.rest())
        self.flush()

    def flush(self) -> None:
        """Write until nothing is waiting or the terminal takes no more. If everything has been
        written, add a note about bytes that were left out.
        """
        self._write()
        if not self.waiting:
            self._note()
            self._write()

    def _write(self) -> None:
        while self.waiting and (
            self._never_blocks or select.select([], [self.descriptor], [], 0)[1]
        ):
            # A pipe takes up to PIPE_BUF bytes whole or not at all, so lines of ranks that share
            # the pipe do not mix.
            piece = bytes(self.waiting[: select.PIPE_BUF])
            if len(piece) != len(self.waiting):
                piece = piece[: _end_of_lines(piece)] or piece
            try:
                written = os.write(self.descriptor, piece)
                self._full = False
            except BlockingIOError:
                return
            except OSError as error:
                # A full disk may have room later. Any other error is final, for example one that
                # says that the reader has left.
                self._full = True
                self._gone = error.errno not in _FULL
                written = len(self.waiting) if self._gone else len(piece)
                self._left_out += written
            del self.waiting[:written]
            # Take output again only when half of the buffer is free, so that there is one long gap
            # in the output and not many short ones.
            if len(self.waiting) < _WAITING // 2:
                self._filled = None

    def close(self) -> None:
        """Close the descriptor if it was opened here; the inherited one stays open."""
        if self.descriptor != self._inherited:
            os.close(self.descriptor)

    def _append(self, text: bytes) -> None:
        """Add a text to :attr:`waiting`, and note since when that is full."""
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
    """Return a descriptor for the same file, pipe or tty, and whether its writes never block.

    A pipe or tty is opened again, because O_NONBLOCK on the inherited descriptor would hold for all
    processes that share it. Polling alone is not enough: a tty that is writable may have room for a
    single byte, and another process may have filled a pipe after the poll.
    """
    try:
        if not os.isatty(inherited) and not stat.S_ISFIFO(os.fstat(inherited).st_mode):
            return inherited, False
        return os.open(
            f"/proc/self/fd/{inherited}", os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
        ), True
    except OSError:
        # The pipe or tty belongs to another user, for example to a launcher that runs as root.
        # Then polling has to suffice.
        return inherited, False
