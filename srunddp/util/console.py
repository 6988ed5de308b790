"""Messages on standard error. Writing one waits at most half a second for a pipe nobody reads."""

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

PATIENCE = 0.5  # seconds to wait while a pipe is full: a reader that hangs must not stop a rank
_LEVELS = {"FAIL": 31, "WARN": 33, "ok": 32}  # red, yellow, green
_LEVEL = re.compile(r"^(?:FAIL|WARN|ok)(?=  )", re.MULTILINE)
# Matches "srunddp: error: ... -> hint", "FAIL  ... -> hint", and a report's indented hint lines.
_HINT = re.compile(r"^((?:(?:srunddp: |(?:FAIL|WARN)  ).* | {6,})-> )(.+)$", re.MULTILINE)


def coloured(text: str, stream: TextIO) -> str:
    """Colour the words FAIL, WARN and ok of a report or a message, and make its hints bold, if the
    text goes to a terminal.

    Args:
        text: The report or the message.
        stream: Where the text will be written.

    Returns:
        The text unchanged if the stream is no terminal, ``NO_COLOR`` is set, ``TERM`` is ``dumb``,
        or Open MPI has started this process.
    """
    # Open MPI gives rank 0 a pseudo-terminal even if mpirun writes to a file.
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
    """Write a text to standard error. If nobody reads for half a second or the write fails, the
    rest of the text is dropped without an error.
    """
    data = (coloured(text, sys.stderr) if sys.stderr else text).encode(errors="backslashreplace")
    with contextlib.suppress(OSError):
        # Ignore an OSError, because a missing reader or a full disk must not stop this process.
        # Write without Python's buffer, because Python would try to write buffered data again at
        # its exit. Write at most PIPE_BUF bytes at a time: if select() says that a pipe is
        # writable, it takes that many without blocking (pipe(7)). More could block, or be mixed
        # with the output of other ranks.
        while data and sys.stderr and select.select([], [sys.stderr.fileno()], [], PATIENCE)[1]:
            data = data[os.write(sys.stderr.fileno(), data[: select.PIPE_BUF]) :]


def say(line: str) -> None:
    """Tell the user something on standard error; the prefix sets it apart from the script's output.

    Args:
        line: The text. A line end or other control character in it is printed as an escape
            sequence, so that the output stays one line.
    """
    write_stderr(f"srunddp: {one_line(line)}\n")


def write_amid_output(text: str) -> None:
    """Write a text to standard error, beginning on a new line, because a script may have left a
    line unfinished, such as a progress bar.

    Nobody can tell whether a line is unfinished: what went into a pipe is gone, other ranks share
    it, and reading a file's last byte may hang with its file system. So if no line was unfinished,
    an empty line appears.

    Args:
        text: The text, without a line end before it.
    """
    write_stderr(f"\n{text}")


def say_amid_output(line: str) -> None:
    """Tell the user something, as :func:`say` does, while a script may have left a line unfinished.

    Args:
        line: The text. A line end or other control character in it is printed as an escape
            sequence, so that the output stays one line.
    """
    write_amid_output(f"srunddp: {one_line(line)}\n")


SAY_EVERY = 30.0  # seconds, for periodically()


@contextlib.contextmanager
def periodically(say: Callable[[str], None], line: str, every: float) -> Iterator[None]:
    """Print a line repeatedly while the ``with`` block runs, from a thread.

    Args:
        say: Prints the line.
        line: The line. ``{}`` in it is replaced by the seconds since the block began.
        every: The seconds before the first line, and between two lines.
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
        # Join the thread, so that its line cannot come after what the caller prints next.
        over.set()
        thread.join()
