"""Checkpoint files that are whole or not there.

A file is what ``torch.save`` wrote, and then a line that tells its length and its SHA-256. Plain
``torch.load`` reads such a file too; ``head -c LENGTH FILE | sha256sum`` checks it.
"""

import errno
import hashlib
import io
import os
import pickle
import re
import stat
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from mmap import MAP_PRIVATE
from pathlib import Path
from secrets import token_hex
from typing import Any

import torch
from torch.serialization import get_unsafe_globals_in_checkpoint, set_default_mmap_options

from srunddp.errors import ConfigError

_LINE = "\nsrunddp checkpoint: {length:020} bytes, SHA-256 {digest}\n"
_PARSED = re.compile(rb"\nsrunddp checkpoint: ([0-9]{20}) bytes, SHA-256 ([0-9a-f]{64})\n")
_LINE_LENGTH = len(_LINE.format(length=0, digest="0" * 64))
_PIECE = 1 << 20  # bytes that are read at once
OWN = "srunddp"  # CheckpointManager's key in a checkpoint


class CheckpointError(ConfigError):
    """A checkpoint cannot be read, or cannot be written: which, why, and the hint."""


def save_checkpoint(path: str | os.PathLike[str], state: Mapping[str, Any]) -> None:
    """Replace ``path`` by ``state``; a kill or a power cut at any moment leaves the old file or the
    new.

    One process alone may write ``path``. When this returns, the new file is on the disk and was
    read back.

    Args:
        path: of the file; its folder exists.
        state: tensors and plain values, which do not change meanwhile.

    Raises:
        CheckpointError: ``state`` holds something that ``load_checkpoint()`` would refuse.
        OSError: the folder is missing or not writable, or the disk is full or broken. With that,
            and with the error above, the old file stays.
    """
    path = Path(path)
    remove_temporaries(path.parent, path.name)
    write_checkpoint(path, state, lambda: None)


def write_checkpoint(path: Path, state: Mapping[str, Any], check: Callable[[], None]) -> None:
    """The same; ``check`` is called just before the file gets its name, and where it raises nothing
    has changed.
    """
    # In the same folder, since a rename is atomic within one file system only; and of a name of its
    # own, so that two jobs that write by mistake to one folder do not mix their bytes.
    temporary = path.with_name(f"{path.name}.{token_hex(4)}.tmp")
    try:
        _write(temporary, path, state)
        check()
        os.replace(temporary, path)
    except BaseException:
        with suppress(OSError):  # of the two errors the first tells more
            temporary.unlink()
        raise
    sync_folder(path.parent)


def check_savable(state: Mapping[str, Any], where: str | os.PathLike[str]) -> None:
    """Raise in memory what :func:`save_checkpoint` would of a state; its tensors may be empty
    ones.
    """
    _save(io.BytesIO(), where, state)


def load_checkpoint(path: str | os.PathLike[str], *, mmap: bool = False) -> dict[str, Any]:
    """What ``save_checkpoint()`` wrote, with its tensors on the CPU.

    On the CPU, since a GPU number saved by rank 0 would fill that GPU from every rank. Nothing in
    the file is executed: torch refuses all but tensors and plain values.

    Args:
        path: of the file.
        mmap: leave the tensors in the file until they are used, as ``torch.load(mmap=True)``; what
            is written to them stays in memory. Where another node may delete the file, copy what is
            used later.

    Raises:
        CheckpointError: it is missing, damaged or cut short, or it holds something else.
    """
    with _opened(path) as file:
        return load_open(file, path, MAP_PRIVATE if mmap else None)


def load_open(file: io.FileIO, path: str | os.PathLike[str], flags: int | None) -> dict[str, Any]:
    """The same of an open file, which has the name ``path`` in errors; ``flags``: of mmap, or None
    to read it.
    """
    _check(file, path)
    try:
        state = _torch_load(file, flags)
    except (MemoryError, OSError):
        raise
    except pickle.UnpicklingError as error:
        raise _broken(path, "it holds something else than tensors and plain values") from error
    except Exception as error:  # whatever a made-up pickle brings torch to
        raise _broken(path, f"torch cannot read it: {_first_line(error)}") from error
    if not isinstance(state, dict):
        raise _broken(path, f"it holds a {type(state).__name__}, not a dict")
    return state


def last_line(path: str | os.PathLike[str]) -> str:
    """The line with the length and the SHA-256; whole files that have the same are the same."""
    with _opened(path) as file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - _LINE_LENGTH))
        return file.read(_LINE_LENGTH).decode(errors="replace")


def generation_of(path: Path) -> int:
    """The generation in a file, of which no tensor is read or checked; 0 where it has none, or is
    damaged.
    """
    with suppress(Exception), _opened(path) as file:  # torch raises anything on damaged files
        return int(_torch_load(file, MAP_PRIVATE)[OWN]["generation"])
    return 0


def verify(path: str | os.PathLike[str]) -> None:
    """Raise what :func:`load_checkpoint` would of a file that is missing, damaged or cut short,
    without loading it.
    """
    with _opened(path) as file:
        _check(file, path)


def remove_temporaries(folder: Path, name: str) -> None:
    """Delete what killed saves left of files called ``name``, a pattern of :func:`Path.glob`."""
    for temporary in folder.glob(f"{name}.*.tmp"):
        with suppress(OSError):  # it is in nobody's way
            temporary.unlink()


def sync_folder(folder: Path) -> None:
    """Bring renames in this folder to the disk: they get there only with the folder itself."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class _HashedFile:
    """What ``torch.save`` writes to: hashes it on the way, and keeps the disk's error, which torch
    replaces.
    """

    def __init__(self, file: io.FileIO | io.BytesIO) -> None:
        self.length = 0
        self.error: OSError | None = None
        self._file = file
        self._hash = hashlib.sha256()

    def write(self, data: bytes | memoryview) -> int:
        try:
            write_all(self._file, data)
        except OSError as error:
            self.error = error
            raise
        self._hash.update(data)
        self.length += len(data)
        return len(data)

    def flush(self) -> None:
        """Nothing is kept back."""

    def line(self) -> bytes:
        return _LINE.format(length=self.length, digest=self._hash.hexdigest()).encode()


def _write(temporary: Path, path: Path, state: Mapping[str, Any]) -> None:
    with open(temporary, "xb+", buffering=0) as file:
        line = _save(file, path, state)
        file.seek(0, os.SEEK_END)
        write_all(file, line)
        file.flush()
        os.fsync(file.fileno())
        # Else it would be read back from memory, which says nothing about the disk.
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        with suppress(CheckpointError):
            if _check(file, temporary) == line:
                return
        raise OSError(errno.EIO, "it reads back as something else than was written", str(temporary))


def _save(
    file: io.FileIO | io.BytesIO, path: str | os.PathLike[str], state: Mapping[str, Any]
) -> bytes:
    """Returns the last line, which is still to be written."""
    hashed = _HashedFile(file)
    try:
        torch.save(dict(state), hashed)  # type: ignore[arg-type]
    except (AttributeError, TypeError, ValueError, RuntimeError, pickle.PicklingError) as error:
        if hashed.error is not None:
            raise hashed.error from None
        raise _unfit(path, _first_line(error)) from error
    file.seek(0)
    # Now, rather than in the job that is to go on from it.
    if refused := get_unsafe_globals_in_checkpoint(file):
        raise _unfit(path, f"it holds {', '.join(sorted(refused))}")
    return hashed.line()


def _unfit(path: str | os.PathLike[str], found: str) -> CheckpointError:
    return CheckpointError(
        f"this state cannot be a checkpoint: {found}",
        expected="tensors and plain values, such as numbers, strings, lists and dicts",
        hint="convert it, for instance a NumPy number by float(), or leave it out",
        where=str(path),
    )


def write_all(file: io.FileIO | io.BytesIO, data: bytes | memoryview) -> None:
    """Write all of it."""
    rest = memoryview(data)
    while rest:
        rest = rest[file.write(rest) :]  # a write may be short, as at the end of the space


@contextmanager
def _opened(path: str | os.PathLike[str]) -> Iterator[io.FileIO]:
    """The open file, which is then a regular one; its errors are CheckpointErrors."""
    try:
        # O_NONBLOCK: opening a pipe would wait for a writer.
        with open(
            path, "rb", buffering=0, opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)
        ) as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise _broken(path, "it is not a regular file")
            yield file
    except FileNotFoundError as error:
        raise CheckpointError(
            "there is no such file", expected="a checkpoint", hint="check the path", where=str(path)
        ) from error
    except OSError as error:
        raise _broken(path, f"it cannot be read: {error.strerror or error}") from error


def _check(file: io.FileIO, path: str | os.PathLike[str]) -> bytes:
    """The file's last line, which is right about all that comes before it."""
    size = os.fstat(file.fileno()).st_size
    length = max(0, size - _LINE_LENGTH)
    file.seek(0)
    digest = hashlib.sha256()
    left = length
    while left > 0 and (piece := file.read(min(_PIECE, left))):
        digest.update(piece)
        left -= len(piece)
    line = file.read(_LINE_LENGTH)
    if line == _LINE.format(length=length, digest=digest.hexdigest()).encode():
        return line
    said = _PARSED.fullmatch(line)
    if said is None:
        raise _broken(path, f"it ends after {size} bytes without the line that ends a checkpoint")
    if int(said[1]) != length:
        raise _broken(path, f"it has {length} of {int(said[1])} bytes")
    raise _broken(path, "its SHA-256 is not that of its content")


def _torch_load(file: io.FileIO, flags: int | None) -> Any:
    if flags is not None:
        # Some file systems cannot map.
        with suppress(RuntimeError), set_default_mmap_options(flags):
            return torch.load(
                f"/proc/self/fd/{file.fileno()}", map_location="cpu", weights_only=True, mmap=True
            )
    file.seek(0)
    return torch.load(file, map_location="cpu", weights_only=True)


def _first_line(error: BaseException) -> str:
    return (str(error) or type(error).__name__).splitlines()[0]


def _broken(path: str | os.PathLike[str], found: str) -> CheckpointError:
    hint = "use another one"
    return CheckpointError(
        found, expected="a checkpoint as srunddp wrote it", hint=hint, where=os.fspath(path)
    )
