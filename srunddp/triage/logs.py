"""Log files and their lines, with bounded memory: what is no log is ignored, what is too big is read in part."""

import itertools
import math
import os
import re
import stat
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import BinaryIO

from srunddp.errors import ConfigError

WHOLE = 64 << 20  # bytes of a file that is read whole; of a larger one HEAD and TAIL
HEAD, TAIL = 16 << 20, 32 << 20
GAP = 1_000_000_000
MOST_FILES = 20_000
_LONGEST = 4000  # characters of a line that are looked at: its beginning, and its end
_END = 800
_PIECE = 1 << 16
_SNIFF = 8192

# What monitoring, training and environments leave beside logs.
_NO_LOG = re.compile(
    r"\.(?:py|pyc|so|pt|pth|ckpt|safetensors|bin|npy|npz|h5|hdf5|zip|tar|gz|bz2|xz|zst|png|jpg|jpeg|pdf|svg|html|css|"
    r"csv|tsv|jsonl|onnx|lock|yaml|yml|toml|ini|cfg|sh|sbatch|sql|db|sqlite|parquet|arrow|pkl|pickle|nsys-rep|md|rst|ipynb)$"
    r"|^(?!(?:(?:failure|preflight)(?:\.\w+)?|error)\.json$).*\.json$",
    re.IGNORECASE,
)
_FOLDERS = frozenset({"__pycache__", ".git", "node_modules", "site-packages", ".venv", "wandb", "checkpoints"})
_ANSI = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]{0,200}(?:\x07|\x1b\\)|[@-Z\\^_])")
_CONTROL = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]")
_ISO = re.compile(r"\b(\d{4})[-/](\d\d)[-/](\d\d)[T_ ](\d\d):(\d\d):(\d\d)(?:[.,](\d{1,9}))?")
_GLOG = re.compile(r"\b[IWEFD](\d\d?)(\d\d) (\d\d):(\d\d):(\d\d)\.(\d{1,9})")
_MONTHS = ("Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec")
_SYSLOG = re.compile(rf"\b({'|'.join(_MONTHS)}) +(\d{{1,2}}) (\d\d):(\d\d):(\d\d)\b")
_TIME_WITHIN = 160  # characters from the line's beginning


@dataclass
class Log:
    """One file that may be a log.

    Attributes:
        path: to open; name: as it is shown; size: in bytes; mtime: of its last line, in seconds since the epoch.
        begin: the number of the first line of its newest start.
        notes: what of it could not be read; cut: its last line has no end.
    """

    path: Path
    name: str
    size: int
    mtime: float = 0.0
    begin: int = 0
    notes: list[str] = field(default_factory=list)
    cut: bool = False

    def lines(self) -> Iterator[tuple[int, str]]:
        """Number and text of each line from ``begin`` that is not empty."""
        yield from _texts(each for each in self.pieces() if each[0] >= self.begin)

    def pieces(self) -> Iterator[tuple[int, bytes]]:
        """Number and bytes of each line; after what was left out numbers begin at :data:`GAP`."""
        self.notes.clear()
        try:
            with open(_regular(self.path), "rb") as file:
                if self.size:
                    file.seek(-1, os.SEEK_END)
                    self.cut = file.read(1) not in b"\r\n"
                    file.seek(0)
                yield from enumerate(_pieces(file, HEAD if self.size > WHOLE else math.inf), 1)
                if self.size > WHOLE:
                    file.seek(self.size - TAIL)
                    file.readline(_PIECE)
                    self.notes.append(f"{self.name}: {self.size >> 20} MiB, its middle was not read")
                    yield from enumerate(_pieces(file), GAP)
        except OSError as error:
            self.notes.append(f"{self.name}: {os.strerror(error.errno or 0)}")


def find(paths: Iterable[str]) -> list[Log]:
    """The logs among these files and below these folders, in the order of their names.

    Raises:
        ConfigError: a path is not there, or there is nothing to read.
    """
    logs: list[Log] = []
    for given in paths:
        path = Path(given)
        try:
            status = os.stat(path)
        except (OSError, ValueError) as error:
            raise _nothing(f"{given}: {getattr(error, 'strerror', None) or error}") from None
        if stat.S_ISDIR(status.st_mode):
            logs += of_folder(path)
        elif stat.S_ISREG(status.st_mode):
            logs.append(Log(path, path.name, status.st_size, status.st_mtime))
        else:
            raise _nothing(f"{given} is neither a file nor a folder")
    if not logs:
        raise _nothing(f"no log in {', '.join(paths)}")
    return list({log.path: log for log in logs}.values())


def of_folder(folder: Path | str, *, deep: bool = True) -> list[Log]:
    """The logs in a folder, and below it unless ``deep`` is unset; none where there is no folder."""
    found = filter(_is_log, itertools.islice(_below(Path(folder), deep), MOST_FILES))
    return sorted(found, key=lambda log: _natural(log.name))


def _nothing(found: str) -> ConfigError:
    return ConfigError(
        found, expected="log files, or a folder with some", hint="srunddp triage slurm-4711.out, or --log-dir's folder"
    )


def _below(folder: Path, deep: bool) -> Iterator[Log]:
    """The newest jobs first, as far as numbers tell: of too many files the oldest are left out."""
    for parent, folders, files in os.walk(folder):
        folders[:] = sorted((name for name in folders if deep and name not in _FOLDERS), key=_natural, reverse=True)
        for name in sorted((each for each in files if not _NO_LOG.search(each)), key=_natural, reverse=True):
            path = Path(parent, name)
            with suppress(OSError):
                status = os.lstat(path)
                if stat.S_ISREG(status.st_mode):
                    yield Log(path, str(path.relative_to(folder)), status.st_size, status.st_mtime)


def _natural(name: str) -> list[tuple[int, str]]:
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in re.findall(r"\d{1,18}|\D+", name)]


def _is_log(log: Log) -> bool:
    """Text, by its beginning; a few NULs in it are no harm, as file systems leave them after a crash."""
    try:
        with open(_regular(log.path), "rb") as file:
            head = file.read(_SNIFF)
    except OSError:
        return True  # said when its lines are read
    if head.startswith((b"\x7fELF", b"PK\x03\x04", b"\x1f\x8b", b"\x89PNG")):
        return False
    odd = sum(byte < 9 or 13 < byte < 27 for byte in head.replace(b"\0", b""))
    return head.count(b"\0") * 2 <= len(head) and odd * 20 <= len(head)


def _regular(path: Path) -> int:
    """Opened, and no pipe even if one was put in its place."""
    return os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)


def _pieces(file: BinaryIO, limit: float = math.inf) -> Iterator[bytes]:
    """Lines, of the longest only their beginning and end."""
    read = 0
    while read < limit and (piece := file.readline(_PIECE)):
        read += len(piece)
        if len(piece) == _PIECE and not piece.endswith(b"\n"):
            last = b""
            while not last.endswith(b"\n") and (more := file.readline(_PIECE)):
                last, read = more if len(more) >= _END else last[-_END:] + more, read + len(more)
            piece += last
        yield piece


def _texts(pieces: Iterable[tuple[int, bytes]]) -> Iterator[tuple[int, str]]:
    for number, piece in pieces:
        text = piece.decode(errors="replace")
        for part in text.rstrip("\r\n").split("\r") if "\r" in text else (text,):
            if shown := _clean(part):
                yield number, shown


def _clean(text: str) -> str:
    if "\x1b" in text:
        text = _ANSI.sub("", text)
    text = text.rstrip()
    if len(text) > _LONGEST:
        text = f"{text[: _LONGEST - _END]} … {text[-_END:]}"
    return text if text.isprintable() else _CONTROL.sub("", text)


def time_of(text: str) -> float | None:
    """When the line was written, as far as it says so, in seconds since the beginning of a year, which many leave out.

    Clocks of nodes and their zones are taken to agree.
    """
    head = text[:_TIME_WITHIN]
    if ":" not in head:
        return None
    if match := _ISO.search(head):
        _, month, day, *clock = match.groups()
    elif match := _GLOG.search(head):
        month, day, *clock = match.groups()
    elif match := _SYSLOG.search(head):
        month, (day, *clock) = str(_MONTHS.index(match[1]) + 1), [*match.groups()[1:], None]
    else:
        return None
    try:
        then = datetime(2024, int(month), int(day), int(clock[0]), int(clock[1]), int(clock[2]))
    except ValueError:
        return None
    return (then - datetime(2024, 1, 1)).total_seconds() + float(f"0.{clock[3] or 0}")
