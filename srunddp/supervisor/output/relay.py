"""The thread that passes a worker's output on, to its file and to the terminal."""

from __future__ import annotations

import math
import os
import select
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field

from srunddp.supervisor.output.nonblocking import NonBlockingStream

_READ = 1 << 16
_REST = 0.002  # seconds
_LOOK = 0.05  # seconds between two looks at the clock once the worker has ended
_QUIET = 0.2  # seconds without output, after which a process left behind is taken to be silent


@dataclass(frozen=True)
class DroppedBytes:
    """Bytes of output that did not reach the file, and that did not reach the terminal."""

    file: int = 0
    terminal: int = 0


@dataclass
class OutputRelay:
    """A thread that reads the worker's pipes until all who hold them have closed them, or :meth:`finish`.

    Attributes:
        streams: the terminal of each pipe, by the pipe's reading end.
        file: the descriptor that all is written to, in the order in which it comes; None for none.
    """

    streams: Mapping[int, NonBlockingStream]
    file: int | None
    _open: set[int] = field(default_factory=set)
    _bell: int = -1
    _deadline: float = math.inf
    _lost: int = 0
    _came: float = 0.0
    _ended: float = 0.0

    def start(self) -> None:
        """Start the thread; it has the signal mask of the caller."""
        self._open = set(self.streams)
        self._bell = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def finish(self, limit: float) -> DroppedBytes:
        """Pass on what is still in the pipes, within ``limit`` seconds, and say what was lost on the whole."""
        self._ended = time.monotonic()
        self._deadline = self._ended + limit
        os.eventfd_write(self._bell, 1)
        self._thread.join(limit)
        if not self._thread.is_alive():
            os.close(self._bell)
        unread = sum(len(terminal.waiting) for terminal in self.streams.values())
        return DroppedBytes(self._lost, sum(terminal.lost for terminal in self.streams.values()) + unread)

    def _run(self) -> None:
        while self._open and not self._is_over():
            self._turn()
        for terminal in self.streams.values():
            terminal.end()
        while any(terminal.waiting for terminal in self.streams.values()) and time.monotonic() < self._deadline:
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
        now, busy = time.monotonic(), any(terminal.waiting for terminal in self.streams.values())
        silent = now - max(self._came, self._ended)
        return now >= self._deadline or (silent >= _QUIET and not busy)

    def _turn(self) -> None:
        """Wait until something can be read or written, and do so."""
        ready = self._wait()
        # Standard output comes first: what a script printed before its traceback is then before it in the file.
        sources = [source for source in self.streams if source in self._open & ready]
        before, self._came = self._came, time.monotonic() if sources else self._came
        size = sum(self._pass_on(source) for source in sources)
        for terminal in self.streams.values():
            terminal.flush()
        # A script that prints line by line would wake us for each, at many times the cost.
        if 0 < size < _READ and self._came - before < 2 * _REST and self._deadline == math.inf:
            time.sleep(_REST)

    def _wait(self) -> set[int]:
        poller, now = select.poll(), time.monotonic()
        finishing = self._deadline < math.inf
        patience = min(_LOOK, max(0.0, self._deadline - now)) if finishing else math.inf
        if not finishing:
            poller.register(self._bell, select.POLLIN)
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
        urgent = self.file is not None and now >= (self._ended + self._deadline) / 2
        return 0.0 if urgent else terminal.hold(now)

    def _pass_on(self, source: int) -> int:
        data = os.read(source, _READ)
        if not data:
            self._open.discard(source)
            return 0
        if self.file is not None:
            self._append(self.file, data)
        self.streams[source].put(data)
        return len(data)

    def _append(self, file: int, data: bytes) -> None:
        rest = memoryview(data)
        try:
            while rest:
                rest = rest[os.write(file, rest) :]
        except OSError:  # the disk is full: the terminal still has it, and there may be room again
            self._lost += len(rest)
