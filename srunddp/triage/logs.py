"""Log files and their lines, with bounded memory: what is no log is ignored, what is too big is
read in part.
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

WHOLE = 64 << 20  # bytes of a file that is read whole; of a larger one HEAD and TAIL
HEAD = 16 << 20
TAIL = 32 << 20
GAP = 1_000_000_000  # numbers of lines behind the part that was not read
MOST_FILES = 20_000
_LONGEST = 4000  # bytes of a line that are looked at: its beginning, and its end
_END = 800

# Text that is no log, and what may begin with text.
_NO_LOG = re.compile(
    r"\.(?:py|csv|tsv|jsonl|yaml|yml|toml|ini|cfg|sh|sbatch|sql|html|svg|css|lock|md|rst|ipynb|pdf|safetensors|npy)$|"
    r"^(?!(?:(?:failure|preflight)(?:\.\w+)?|error)\.json$).*\.json$",
    re.IGNORECASE,
)
# Folders that may have very many files, but no logs of ranks.
_FOLDERS = frozenset(
    {"__pycache__", ".git", "node_modules", "site-packages", ".venv", "wandb", "checkpoints"}
)
# Colours and other sequences of a terminal ("\x1b[31m"), its titles ("\x1b]0;…\x07"), and control
# characters but tab and the ends of lines.
_INVISIBLE = re.compile(
    r"\x1b(?:\[[0-?]*["
    r" -/]*[@-~]|\][^\x07\x1b]{0,200}(?:\x07|\x1b\\)|[@-Z\\^_])|[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]"
)
# ISO 8601's, and glog's ``I0302 12:00:10``.
_TIME = re.compile(
    r"(?:\b\d{4}[-/](?=\d\d[-/])|\b[IWEFD])(\d\d?)[-/]?(\d\d)[T_"
    r" ](\d\d):(\d\d):(\d\d)(?:[.,](\d{1,9}))?"
)


@dataclass
class Log:
    """One file that may be a log.

    Attributes:
        path: to open.
        name: as it is shown.
        size: in bytes.
        mtime: of its last line, in seconds since the epoch.
        begin: the number of the first line of its newest start.
        notes: what of it could not be read.
        cut: its last line has no end.
    """

    path: Path
    name: str
    size: int
    mtime: float = 0.0
    begin: int = 0
    notes: list[str] = field(default_factory=list)
    cut: bool = False

    def lines(self) -> Iterator[tuple[int, str]]:
        """Yield number and text of each line from ``begin`` that is not empty.

        Numbers after the part of a large file that is left out begin at :data:`GAP`.
        """
        for number, line in self._read():
            self.cut = not line.endswith((b"\n", b"\r"))
            # A bar of progress overwrites its line with "\r": each state is a text of the same
            # number.
            texts = map(_clean, line.splitlines() if number >= self.begin else ())
            yield from ((number, text) for text in texts if text)

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
    # The limit holds within a line too: a binary file may have no end of line in gigabytes.
    while line := file.readline(limit):
        limit -= len(line)
        yield line


def _clean(line: bytes) -> str:
    if len(line) > _LONGEST:
        line = b"".join((line[: _LONGEST - _END], " … ".encode(), line[-_END:]))
    text = line.decode(errors="replace")
    return (text if text.isprintable() else _INVISIBLE.sub("", text)).rstrip()


def find(paths: Sequence[str]) -> list[Log]:
    """Find the logs among files and below folders.

    Args:
        paths: of the files and folders.

    Returns:
        The logs, each once, in the order of the names in each folder.

    Raises:
        ConfigError: there is none, or a path leads nowhere.
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
    """List the logs in a folder, in the order of the numbers in their names.

    Args:
        folder: Or a file, which is the only log then.
        deep: Look into the folders below it as well.

    Returns:
        At most :data:`MOST_FILES`; none where there is no such folder.
    """
    if os.path.isfile(folder):
        return [_log(Path(folder), Path(folder).parent)]
    found = itertools.islice(_below(Path(folder), deep), MOST_FILES)
    return sorted(filter(_is_text, found), key=lambda log: natural(log.name))


def _below(folder: Path, deep: bool) -> Iterator[Log]:
    """The newest jobs first, as far as numbers tell: of too many files the oldest are left out."""
    for parent, folders, files in os.walk(folder):
        # In place: os.walk() goes down by this list, so that what is left out is not entered.
        folders[:] = sorted(
            (name for name in folders if deep and name not in _FOLDERS), key=natural, reverse=True
        )
        for name in sorted(
            (each for each in files if not _NO_LOG.search(each)), key=natural, reverse=True
        ):
            path = Path(parent, name)
            with suppress(OSError):  # one that was removed meanwhile
                # To open a named pipe would block until somebody writes to it; a link may lead to a
                # file that is read already.
                if path.is_file() and not path.is_symlink():
                    yield _log(path, folder)


def _log(path: Path, folder: Path) -> Log:
    status = path.stat()
    return Log(path, str(path.relative_to(folder)), status.st_size, status.st_mtime)


def natural(name: str) -> list[Any]:
    """Split a name at the numbers in it, as a key to sort by: ``out.9`` comes before ``out.10``."""
    # The split leaves text at even places and digits at odd ones, so that two names compare like
    # with like.
    return [int(part) if part.isdecimal() else part for part in re.split(r"(\d{1,18})", name)]


def _is_text(log: Log) -> bool:
    """By its beginning; NULs in up to half of it are no harm, as file systems leave them after a
    crash.
    """
    head = b""  # of what cannot be read, which is said when its lines are
    with suppress(OSError), open(log.path, "rb") as file:
        head = file.read(8192)
    # Control characters but tab, the ends of lines and the escape of a terminal's colours.
    odd = sum(byte < 9 or 13 < byte < 27 for byte in head.replace(b"\0", b""))
    return head.count(b"\0") * 2 <= len(head) and odd * 20 <= len(head)


def time_of(text: str) -> float | None:
    """Read when a line was written, as far as it says so.

    Returns:
        Seconds from an arbitrary begin: the year is ignored, as many lines leave it out. None where
        the line has no time.
    """
    # Clocks of nodes and their zones are taken to agree.
    match = _TIME.search(text[:160])
    if not match:
        return None
    *clock, part = match.groups()
    month, day, hour, minute, second = map(int, clock)
    with suppress(ValueError):
        # 2024 has a 29th of February, whatever the year of the log is.
        return datetime(2024, month, day, hour, minute, second, tzinfo=UTC).timestamp() + float(
            f"0.{part or 0}"
        )
    return None
