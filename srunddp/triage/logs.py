"""Finds log files and reads their lines. Files that are no logs are ignored. Of a large log only
the beginning and the end are read, to bound memory.
"""

import itertools
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, BinaryIO

from srunddp.errors import ConfigError

WHOLE = 64 << 20  # bytes; a larger file is read only in its first HEAD and last TAIL bytes
HEAD = 16 << 20
TAIL = 32 << 20
GAP = 1_000_000_000  # line numbers after the part that was not read start here
MOST_FILES = 20_000  # files listed in a folder and its subfolders
LONGEST_RESULT = 200  # bytes; a file of --result is never longer
_LONGEST = 4000  # bytes; of a longer line only the beginning and the last _END bytes are read
_END = 800

# Names of text files that are not logs, and of binary files whose beginning may look like text.
_NO_LOG = re.compile(
    r"\.(?:py|csv|tsv|jsonl|yaml|yml|toml|ini|cfg|sh|sbatch|sql|html|svg|css|lock|md|rst|ipynb|pdf|safetensors|npy)$|"
    r"^(?!(?:(?:failure|preflight)(?:\.\w+)?|error|result)\.json$).*\.json$",
    re.IGNORECASE,
)
# The folder of --monitor, and its files about the run's end; see own_files.py.
_MONITOR = re.compile(r"monitor\.\d{1,9}(?:\.\d{1,9})?")
_OF_MONITOR = re.compile(r"run\.json|.+\.marks\.csv")
# Folders that may contain very many files, but no logs of ranks.
_FOLDERS = frozenset(
    {"__pycache__", ".git", "node_modules", "site-packages", ".venv", "wandb", "checkpoints"}
)
# Terminal sequences such as colours ("\x1b[31m") and window titles ("\x1b]0;...\x07"), and all
# control characters but tab, line feed and carriage return.
_INVISIBLE = re.compile(
    r"\x1b(?:\[[0-?]*["
    r" -/]*[@-~]|\][^\x07\x1b]{0,200}(?:\x07|\x1b\\)|[@-Z\\^_])|[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]"
)
# Matches a date with a time as in ISO 8601, also with ``/`` between the numbers of the date, and as
# in glog's ``I0302 12:00:10``.
_TIME = re.compile(
    r"(?:\b\d{4}[-/](?=\d\d[-/])|\b[IWEFD])(\d\d?)[-/]?(\d\d)[T_"
    r" ](\d\d):(\d\d):(\d\d)(?:[.,](\d{1,9}))?"
)


@dataclass
class Log:
    """A file that may be a log.

    Attributes:
        path: The path by which the file is opened.
        name: The path below the searched folder, which is shown to the user.
        size: The size in bytes.
        mtime: When the file was last written, in seconds since the epoch.
        begin: The number of the line at which the newest start begins; 0 to read all lines.
        notes: Sentences for the user on what could not be read.
        cut: Whether the last line that was read has no line end.
    """

    path: Path
    name: str
    size: int
    mtime: float = 0.0
    begin: int = 0
    notes: list[str] = field(default_factory=list)
    cut: bool = False

    def lines(self) -> Iterator[tuple[int, str]]:
        """Yield number and text of each line that is not empty, from line ``begin`` on.

        If the middle of a large file is left out, the numbers after it start at :data:`GAP`.
        """
        for number, line in self._read():
            self.cut = not line.endswith((b"\n", b"\r"))
            # A progress bar overwrites its line after "\r": yield each state as a text with the
            # same number.
            texts = map(_clean, line.splitlines() if number >= self.begin else ())
            yield from ((number, text) for text in texts if text)

    def whole(self) -> bytes:
        """Read the file without a limit on the length of its lines.

        Returns:
            The content; empty if the file cannot be read, which is added to ``notes``.

        Raises:
            ValueError: The file is larger than :data:`WHOLE`.
        """
        content = b""
        try:
            with open(self.path, "rb") as file:
                content = file.read(WHOLE + 1)
        except OSError as error:
            self.notes.append(f"{self.name}: {os.strerror(error.errno or 0)}")
        if len(content) > WHOLE:
            raise ValueError(f"{self.name} is larger than {WHOLE} bytes")
        return content

    def _read(self) -> Iterator[tuple[int, bytes]]:
        self.notes.clear()
        try:
            with open(self.path, "rb") as file:
                yield from enumerate(_upto(file, HEAD if self.size > WHOLE else WHOLE), 1)
                if self.size > WHOLE:
                    file.seek(self.size - TAIL)
                    self.notes.append(
                        f"{self.name}: {self.size >> 20} MiB, its middle was not read"
                    )
                    yield from enumerate(_upto(file, TAIL), GAP)
        except OSError as error:
            self.notes.append(f"{self.name}: {os.strerror(error.errno or 0)}")


def _upto(file: BinaryIO, limit: int) -> Iterator[bytes]:
    # The limit counts within a line too: a binary file may have gigabytes without a line end.
    while line := file.readline(limit):
        limit -= len(line)
        yield line


def _clean(line: bytes) -> str:
    if len(line) > _LONGEST:
        line = b"".join((line[: _LONGEST - _END], " … ".encode(), line[-_END:]))
    text = line.decode(errors="replace")
    return (text if text.isprintable() else _INVISIBLE.sub("", text)).rstrip()


def find(paths: Sequence[str]) -> list[Log]:
    """Find the logs among files and in folders.

    Args:
        paths: The files and folders.

    Returns:
        The logs, each once, sorted by name within each folder.

    Raises:
        ConfigError: There is no log, or a path does not exist.
    """
    missing = [path for path in paths if not os.path.exists(path)]
    if missing:
        raise _no_logs(f"no file or folder {', '.join(missing)}")
    logs = {log.path: log for path in paths for log in of_folder(path)}
    if not logs:
        raise _no_logs(f"no log in {', '.join(paths)}")
    return list(logs.values())


def _no_logs(found: str) -> ConfigError:
    return ConfigError(
        found,
        expected="log files, or a folder with some",
        hint="srunddp triage slurm-4711.out, or --log-dir's folder",
    )


def of_folder(folder: Path | str, *, deep: bool = True) -> list[Log]:
    """List the logs in a folder, sorted by name with numbers compared by value.

    Args:
        folder: A folder; or a file, which then is the only log.
        deep: Whether to search subfolders too.

    Returns:
        At most :data:`MOST_FILES`; empty if the folder does not exist.
    """
    if os.path.isfile(folder):
        return [_log(Path(folder), Path(folder).parent)]
    found = itertools.islice(_below(Path(folder), deep), MOST_FILES)
    return sorted(filter(_is_text, found), key=lambda log: natural(log.name))


def _below(folder: Path, deep: bool) -> Iterator[Log]:
    """Yield the files that may be logs, those with the highest numbers in their names first: if
    there are too many, the caller leaves out old ones.
    """
    for parent, folders, files in os.walk(folder):
        # Change the list in place: os.walk() does not enter folders that are removed from it.
        folders[:] = sorted(
            (name for name in folders if deep and name not in _FOLDERS), key=natural, reverse=True
        )
        if _MONITOR.fullmatch(os.path.basename(parent)):
            read = [each for each in files if _OF_MONITOR.fullmatch(each)]
        else:
            read = [
                each
                for each in files
                if not _NO_LOG.search(each) or _may_be_result(Path(parent, each))
            ]
        for name in sorted(read, key=natural, reverse=True):
            path = Path(parent, name)
            with suppress(OSError):  # the file may have been removed meanwhile
                # Skip named pipes, because opening one would block until somebody writes to it.
                # Skip links, because a link may lead to a file that is read anyway.
                if path.is_file() and not path.is_symlink():
                    yield _log(path, folder)


def _may_be_result(path: Path) -> bool:
    """Tell by its content whether a file may be the one that ``--result`` writes: the user chooses
    its name. False for a file whose name does not end with ``.json``.
    """
    if path.suffix.lower() != ".json":
        return False
    with suppress(OSError):
        if path.is_file() and path.stat().st_size <= LONGEST_RESULT:
            content = path.read_bytes()
            return b'"exit_code"' in content and b'"restarts"' in content
    return False


def _log(path: Path, folder: Path) -> Log:
    status = path.stat()
    return Log(path, str(path.relative_to(folder)), status.st_size, status.st_mtime)


def natural(name: str) -> list[Any]:
    """Split a name at its numbers, as a sort key: ``out.9`` comes before ``out.10``."""
    # re.split() puts text at even and digits at odd positions, so two keys always compare text with
    # text and numbers with numbers.
    return [int(part) if part.isdecimal() else part for part in re.split(r"(\d{1,18})", name)]


def _is_text(log: Log) -> bool:
    """Tell from a file's beginning whether it is text.

    Up to half of the beginning may be NULs, because a file system may leave them after a crash. A
    file that cannot be read counts as text.
    """
    head = b""  # stays empty if the file cannot be read; lines() reports that later
    with suppress(OSError), open(log.path, "rb") as file:
        head = file.read(8192)
    # Count control characters, but not 9 to 13 (tab and line ends) and 27 to 31 (27 is the escape
    # of a terminal's colours).
    odd = sum(byte < 9 or 13 < byte < 27 for byte in head.replace(b"\0", b""))
    return head.count(b"\0") * 2 <= len(head) and odd * 20 <= len(head)


def time_of(text: str) -> float | None:
    """Read the time at which a line was written, if the line contains one.

    Returns:
        Seconds, only to be compared with other results of this function: the year is ignored,
            because many lines leave it out. None if the line has no time.
    """
    # The nodes are assumed to have the same time and time zone.
    match = _TIME.search(text[:160])
    if not match:
        return None
    *clock, part = match.groups()
    month, day, hour, minute, second = map(int, clock)
    with suppress(ValueError):
        # 2024 is a leap year, so February 29 is valid whatever the log's year is.
        return datetime(2024, month, day, hour, minute, second, tzinfo=UTC).timestamp() + float(
            f"0.{part or 0}"
        )
    return None
