"""A CSV file that is complete to its last line whatever ends the process that writes it."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path


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
