"""Standard error, written to without waiting for a reader."""

import contextlib
import os
import re
import select
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import TextIO

from srunddp.errors import one_line

PATIENCE = 0.5  # seconds for a full pipe to be read: a stuck reader must not stop a rank
_LEVELS = {"FAIL": 31, "WARN": 33, "ok": 32}  # red, yellow, green
_LEVEL = re.compile(r"^(?:FAIL|WARN|ok)(?=  )", re.MULTILINE)
# "srunddp: error: … -> hint", "FAIL  … -> hint", or a line of a report that is indented as far.
_HINT = re.compile(r"^((?:(?:srunddp: |(?:FAIL|WARN)  ).* | {6,})-> )(.+)$", re.MULTILINE)


def coloured(text: str, stream: TextIO) -> str:
    """Colour the levels of a report or a message, and make its hints bold, for a terminal.

    Args:
        text: The report or the message.
        stream: Where it is to be written.

    Returns:
        The same text if the stream is no terminal, or if ``NO_COLOR`` is set.
    """
    # Open MPI gives rank 0 a terminal of its own, whatever mpirun writes to.
    plain = (
        os.environ.get("NO_COLOR")
        or os.environ.get("TERM") == "dumb"
        or "OMPI_COMM_WORLD_RANK" in os.environ
    )
    if plain or not stream.isatty():
        return text
    text = _HINT.sub("\\1\x1b[1m\\2\x1b[0m", text)
    return _LEVEL.sub(lambda level: f"\x1b[{_LEVELS[level[0]]}m{level[0]}\x1b[0m", text)


def write_stderr(text: str) -> None:
    """Write to standard error; what nobody takes within half a second is dropped."""
    data = (coloured(text, sys.stderr) if sys.stderr else text).encode(errors="backslashreplace")
    with contextlib.suppress(OSError):
        # Where nobody reads, that must not keep the others from ending; nor is a full disk below it
        # a reason to end. Unbuffered, since what cannot be written would be tried again when Python
        # ends.
        # A pipe that select() calls writable takes PIPE_BUF bytes without blocking, and in one
        # piece (pipe(7)): more could block, and be mixed with what other ranks write.
        while data and sys.stderr and select.select([], [sys.stderr.fileno()], [], PATIENCE)[1]:
            data = data[os.write(sys.stderr.fileno(), data[: select.PIPE_BUF]) :]


def say(line: str) -> None:
    """Write a line of srunddp's own to standard error, behind ``srunddp: ``."""
    write_stderr(f"srunddp: {one_line(line)}\n")


SAY_EVERY = 30.0


@contextlib.contextmanager
def periodically(say: Callable[[str], None], line: str, every: float) -> Iterator[None]:
    """Say a line again and again while something blocks.

    Args:
        say: prints it.
        line: with ``{}`` for the seconds so far.
        every: seconds between two.
    """
    over = threading.Event()
    began = time.monotonic()

    def repeat() -> None:
        while not over.wait(every):
            say(line.format(f"{time.monotonic() - began:.0f}"))

    thread = threading.Thread(target=repeat, daemon=True)
    thread.start()
    try:
        yield
    finally:
        # The thread is waited for, so that no line comes after what the block's end prints.
        over.set()
        thread.join()
