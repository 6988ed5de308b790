"""Read files of a folder in which somebody else may have put anything: a named pipe, a link to a
device, or a file with an endless line.
"""

import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

LONGEST_LINE = 1 << 20  # bytes; a longer line is left out
LONGEST_TEXT = 64 << 20  # bytes; the rest of a longer file is not read


class NotPlainError(OSError):
    """A path leads to a folder, a pipe, a device or the like, and not to a plain file."""


def open_plain(path: Path) -> BinaryIO:
    """Open a plain file for reading.

    Raises:
        NotPlainError: The path does not lead to a plain file.
        OSError: The file cannot be read.
    """
    # Without O_NONBLOCK, opening a named pipe would wait for a writer, maybe forever.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if stat.S_ISREG(os.fstat(descriptor).st_mode):
        return os.fdopen(descriptor, "rb")
    os.close(descriptor)
    raise NotPlainError(f"{path} is no plain file")


def lines_of(path: Path) -> Iterator[bytes]:
    """Yield the lines of a plain file with their line ends, which the last line may lack. Lines of
    more than 1 MiB are left out.

    Raises:
        OSError: As for :func:`open_plain`.
    """
    with open_plain(path) as file:
        while line := file.readline(LONGEST_LINE):
            if line.endswith(b"\n") or len(line) < LONGEST_LINE:
                yield line
                continue
            while (rest := file.readline(LONGEST_LINE)) and not rest.endswith(b"\n"):
                pass


def read_plain_text(path: Path) -> str:
    """Return the text of a plain file, or its first 64 MiB if it is larger.

    Raises:
        OSError: As for :func:`open_plain`.
    """
    with open_plain(path) as file:
        return file.read(LONGEST_TEXT).decode(errors="replace")
