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
# Bytes that are read at once: to hash a file of 100 GB takes no more memory.
_PIECE = 1 << 20
OWN = "srunddp"  # CheckpointManager's key in a checkpoint


class CheckpointError(ConfigError):
    """A checkpoint cannot be read, or cannot be written: which, why, and the hint."""


class AnotherRunError(CheckpointError):
    """Another run has begun to write checkpoints into this run's folder.

    A restart would load that run's checkpoint and take the folder from it, and that run, if it may
    restart as well, would take it back.
    """

    final = True


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
    """Write a file as :func:`save_checkpoint` does, but leave killed saves' files alone.

    Args:
        path: Of the file.
        state: What it is to hold.
        check: Called just before the file gets its name; where it raises, nothing has changed.

    Raises:
        CheckpointError, OSError: As there; and what ``check`` raises.
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
    # Last: until the folder itself is on the disk, a power cut may bring the old name back.
    sync_folder(path.parent)


def check_savable(state: Mapping[str, Any], where: str | os.PathLike[str]) -> None:
    """Raise what :func:`save_checkpoint` would of a state, without a disk.

    Args:
        state: Its tensors may be without elements.
        where: What an error calls the place.

    Raises:
        CheckpointError: It cannot be saved.
    """
    _save(io.BytesIO(), where, state)


def load_checkpoint(path: str | os.PathLike[str], *, mmap: bool = False) -> dict[str, Any]:
    """Return what ``save_checkpoint()`` wrote, with its tensors on the CPU.

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
    """Return what an open file holds, as :func:`load_checkpoint` does.

    Args:
        file: Opened to be read.
        path: Its name in errors.
        flags: Of mmap, as ``mmap.MAP_SHARED``; None to read it.

    Raises:
        CheckpointError: It is damaged or cut short, or it holds something else.
    """
    # The whole file is hashed before torch reads a byte: what is damaged must not reach pickle.
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
    """Return the line with the length and the SHA-256.

    Whole files that have the same are the same.

    Args:
        path: Of the file.

    Raises:
        CheckpointError: The file cannot be read.
    """
    with _opened(path) as file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - _LINE_LENGTH))
        return file.read(_LINE_LENGTH).decode(errors="replace")


def generation_of(path: Path) -> int:
    """Return the generation in a file; 0 where it has none, or is damaged.

    No tensor is read or checked: of a large file that takes milliseconds.

    Args:
        path: Of the file.
    """
    with suppress(Exception), _opened(path) as file:  # torch raises anything on damaged files
        return int(_torch_load(file, MAP_PRIVATE)[OWN]["generation"])
    return 0


def verify(path: str | os.PathLike[str]) -> None:
    """See that a file is whole, without loading it.

    Args:
        path: Of the file.

    Raises:
        CheckpointError: It is missing, damaged or cut short.
    """
    with _opened(path) as file:
        _check(file, path)


def remove_temporaries(folder: Path, name: str) -> None:
    """Delete what killed saves left.

    Args:
        folder: Of the checkpoints.
        name: Of the files that they were to be, a pattern of :func:`Path.glob`.
    """
    for temporary in folder.glob(f"{name}.*.tmp"):
        # One that stays takes space, and is in nobody's way: the save must not fail for it.
        with suppress(OSError):
            temporary.unlink()


def sync_folder(folder: Path) -> None:
    """Bring renames in a folder to the disk.

    They get there only with the folder itself; fsync(2) of the file is not enough.

    Args:
        folder: In which a file was renamed.

    Raises:
        OSError: The folder cannot be opened, or the disk fails.
    """
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class _HashedFile:
    """Hashes what ``torch.save`` writes to it, on the way to a file.

    Attributes:
        length: Bytes so far.
        error: The disk's. torch replaces it by a RuntimeError of its own, without the errno.
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
    # Unbuffered: torch writes in large pieces, and a disk's error then comes from the write itself.
    with open(temporary, "xb+", buffering=0) as file:
        line = _save(file, path, state)
        # _save has read the file from its beginning, to see whether it can be loaded.
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
    """Write a state, and return the last line, which is still to be written.

    Raises:
        CheckpointError: It holds what cannot be loaded again.
        OSError: The disk refuses it.
    """
    hashed = _HashedFile(file)
    try:
        torch.save(dict(state), hashed)  # type: ignore[arg-type]
    except (AttributeError, TypeError, ValueError, RuntimeError, pickle.PicklingError) as error:
        if hashed.error is not None:
            raise hashed.error from None
        raise _unfit(path, _first_line(error)) from error
    file.seek(0)
    # torch.load(weights_only=True) would refuse classes that torch.save wrote without a word.
    # Better now than in the job that is to go on from this file.
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
    """Write all of some bytes, in several calls if need be.

    Args:
        file: Open to be written, without a buffer.
        data: The bytes.

    Raises:
        OSError: The disk refuses it.
    """
    rest = memoryview(data)
    while rest:
        rest = rest[file.write(rest) :]  # a write may be short, as at the end of the space


@contextmanager
def _opened(path: str | os.PathLike[str]) -> Iterator[io.FileIO]:
    """Yield the open file, which is a regular one; its errors are CheckpointErrors."""
    try:
        # O_NONBLOCK: to open a named pipe would wait for a writer, for ever.
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
    """Return the file's last line, once it was found to be right about all that is before it.

    Raises:
        CheckpointError: It is not.
    """
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
        # Some file systems cannot map; then the file is read below. By its number under /proc, as
        # torch maps a path and not an open file, and another file may have the name by now.
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
