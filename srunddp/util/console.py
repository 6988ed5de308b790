"""Standard error, written to without waiting for a reader."""

from __future__ import annotations

import contextlib
import os
import select
import sys
import threading
import time
from collections.abc import Callable, Iterator

PATIENCE = 0.5


def write_stderr(text: str) -> None:
    """Write to standard error; what nobody takes within half a second is dropped."""
    data = text.encode(errors="backslashreplace")
    with contextlib.suppress(OSError):
        # Where nobody reads, that must not keep the others from ending; nor is a full disk below it a reason to end.
        # Unbuffered, since what cannot be written would be tried again when Python ends.
        while data and sys.stderr and select.select([], [sys.stderr.fileno()], [], PATIENCE)[1]:
            data = data[os.write(sys.stderr.fileno(), data[: select.PIPE_BUF]) :]


SAY_EVERY = 30.0


@contextlib.contextmanager
def periodically(say: Callable[[str], None], line: str, every: float) -> Iterator[None]:
    """Say the line again and again while something blocks; ``{}`` in it is the time so far in seconds."""
    over, began = threading.Event(), time.monotonic()

    def repeat() -> None:
        while not over.wait(every):
            say(line.format(f"{time.monotonic() - began:.0f}"))

    thread = threading.Thread(target=repeat, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
