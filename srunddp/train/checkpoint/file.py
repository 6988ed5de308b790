"""Checkpoint files that are either complete or absent.

A file has the output of ``torch.save``, followed by a line with its length and SHA-256. Plain
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
# Bytes read at a time, so that hashing a file of 100 GB needs little memory.
_PIECE = 1 << 20
OWN = "srunddp"  # CheckpointManager's key in a checkpoint


class CheckpointError(ConfigError):
    """A checkpoint cannot be read or written."""


class AnotherRunError(CheckpointError):
    """Another run has begun to write checkpoints into this run's folder.

    The failure is final: a restart would load the other run's checkpoint and take the folder over,
    and the other run, if it has restarts too, would take it back.
    """

    final = True


def save_checkpoint(path: str | os.PathLike[str], state: Mapping[str, Any]) -> None:
    """Replace the file ``path`` by ``state``; a kill or a power cut at any moment leaves either the
    old or the new file.

    Only one process may write ``path``. When this returns, the new file is on the disk and was read
    back.

    Args:
        path: The file; its folder must exist.
        state: Tensors and plain values, which must not change meanwhile.

    Raises:
        CheckpointError: ``state`` contains something that ``load_checkpoint()`` would refuse.
        OSError: The folder is missing or not writable, or the disk is full or broken. With both
            errors the old file stays.
    """
    path = Path(path)
    remove_temporaries(path.parent, path.name)
    write_checkpoint(path, state, lambda: None)


def write_checkpoint(path: Path, state: Mapping[str, Any], check: Callable[[], None]) -> None:
    """Write a file as :func:`save_checkpoint` does, but keep temporary files of killed saves.

    Args:
        path: The file.
        state: The content of the file.
        check: Called just before the file gets its name; if it raises an error, the old file stays.

    Raises:
        CheckpointError, OSError: As for :func:`save_checkpoint`; and whatever ``check`` raises.
    """
    # Put the temporary file into the same folder, because a rename is atomic only within one file
    # system. Give it a unique name, so that two jobs that write to one folder by mistake do not mix
    # their bytes.
    temporary = path.with_name(f"{path.name}.{token_hex(4)}.tmp")
    try:
        _write(temporary, path, state)
        check()
        os.replace(temporary, path)
    except BaseException:
        with suppress(OSError):  # the error that is raised again says more than that of unlink()
            temporary.unlink()
        raise
    # Sync the folder last: until it is on the disk, a power cut may bring the old file back.
    sync_folder(path.parent)


def check_savable(state: Mapping[str, Any], where: str | os.PathLike[str]) -> None:
    """Check without writing to a disk that :func:`save_checkpoint` can save a state.

    Args:
        state: The state; its tensors may have no elements.
        where: The file or folder that an error message names.

    Raises:
        CheckpointError: The state cannot be saved.
    """
    _save(io.BytesIO(), where, state)


def load_checkpoint(path: str | os.PathLike[str], *, mmap: bool = False) -> dict[str, Any]:
    """Load what ``save_checkpoint()`` wrote, with all tensors on the CPU.

    A tensor on a GPU is saved with that GPU's number. The tensors are loaded to the CPU because
    otherwise every rank would load them to the GPU with the number that rank 0 saved. Nothing in
    the file is executed: torch refuses anything but tensors and plain values.

    Args:
        path: The file.
        mmap: Leave the tensors in the file until they are used, as ``torch.load(mmap=True)`` does;
            writes to them stay in memory. If another node may delete the file, copy tensors that
            are used later.

    Raises:
        CheckpointError: The file is missing, damaged or truncated, or contains something else.
    """
    with _opened(path) as file:
        return load_open(file, path, MAP_PRIVATE if mmap else None)


def load_open(file: io.FileIO, path: str | os.PathLike[str], flags: int | None) -> dict[str, Any]:
    """Load the content of an open file, as :func:`load_checkpoint` does.

    Args:
        file: A file that is open for reading.
        path: The name of the file in errors.
        flags: Flags of mmap, such as ``mmap.MAP_SHARED``; None to read instead of mapping.

    Raises:
        CheckpointError: The file is damaged or truncated, or contains something else.
    """
    # Hash the whole file before torch reads a byte: damaged content must not reach pickle.
    _check(file, path)
    try:
        state = _torch_load(file, flags)
    except (MemoryError, OSError):
        raise
    except pickle.UnpicklingError as error:
        raise _broken(path, "it contains something other than tensors and plain values") from error
    except Exception as error:  # a forged pickle may make torch raise anything
        raise _broken(path, f"torch cannot read it: {_first_line(error)}") from error
    if not isinstance(state, dict):
        raise _broken(path, f"it holds a {type(state).__name__}, not a dict")
    return state


def last_line(path: str | os.PathLike[str]) -> str:
    """Return the last line of a checkpoint, with its length and SHA-256.

    Complete files with the same last line have the same content.

    Args:
        path: The file.

    Raises:
        CheckpointError: The file cannot be read.
    """
    with _opened(path) as file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - _LINE_LENGTH))
        return file.read(_LINE_LENGTH).decode(errors="replace")


def generation_of(path: Path) -> int:
    """Return the generation in a file; 0 if it has none or is damaged.

    No tensor is read or checked, so even a large file takes only milliseconds.

    Args:
        path: The file.
    """
    with suppress(Exception), _opened(path) as file:  # torch raises anything on damaged files
        return int(_torch_load(file, MAP_PRIVATE)[OWN]["generation"])
    return 0


def verify(path: str | os.PathLike[str]) -> None:
    """Check that a file is complete, without loading it.

    Args:
        path: The file.

    Raises:
        CheckpointError: The file is missing, damaged or truncated.
    """
    with _opened(path) as file:
        _check(file, path)


def remove_temporaries(folder: Path, name: str) -> None:
    """Delete the temporary files of killed saves.

    Args:
        folder: The folder of the checkpoints.
        name: The final name of the files, a pattern of :func:`Path.glob`.
    """
    for temporary in folder.glob(f"{name}.*.tmp"):
        # A file that cannot be deleted only takes space: the save must not fail because of it.
        with suppress(OSError):
            temporary.unlink()


def sync_folder(folder: Path) -> None:
    """Sync renames in a folder to the disk.

    Syncing the renamed file is not enough: fsync(2) has to be called on the folder too.

    Args:
        folder: The folder in which a file was renamed.

    Raises:
        OSError: The folder cannot be opened, or the disk fails.
    """
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class _HashedFile:
    """Hashes what ``torch.save`` writes, and passes it on to a file.

    Attributes:
        length: The number of bytes written so far.
        error: The error of a write that failed; None if none has failed. torch raises a
            RuntimeError without the errno in its place.
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
        """Do nothing: nothing is buffered."""

    def line(self) -> bytes:
        return _LINE.format(length=self.length, digest=self._hash.hexdigest()).encode()


def _write(temporary: Path, path: Path, state: Mapping[str, Any]) -> None:
    # Open the file unbuffered: torch writes in large pieces, and a disk error is then raised by the
    # write itself.
    with open(temporary, "xb+", buffering=0) as file:
        line = _save(file, path, state)
        # _save() has read the file from its beginning, to check whether it can be loaded.
        file.seek(0, os.SEEK_END)
        write_all(file, line)
        file.flush()
        os.fsync(file.fileno())
        # Without this the file would be read back from the page cache, which says nothing about the
        # disk.
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        with suppress(CheckpointError):
            if _check(file, temporary) == line:
                return
        raise OSError(errno.EIO, "the content read back is not what was written", str(temporary))


def _save(
    file: io.FileIO | io.BytesIO, path: str | os.PathLike[str], state: Mapping[str, Any]
) -> bytes:
    """Write a state, and return the last line, which the caller has to write.

    Raises:
        CheckpointError: The state contains something that cannot be loaded again.
        OSError: The file cannot be written.
    """
    hashed = _HashedFile(file)
    try:
        torch.save(dict(state), hashed)  # type: ignore[arg-type]
    except (AttributeError, TypeError, ValueError, RuntimeError, pickle.PicklingError) as error:
        if hashed.error is not None:
            raise hashed.error from None
        raise _unfit(path, _first_line(error)) from error
    file.seek(0)
    # torch.load(weights_only=True) refuses classes that torch.save writes without complaint. Fail
    # now, rather than in the job that is to continue from this file.
    if refused := get_unsafe_globals_in_checkpoint(file):
        raise _unfit(path, f"it contains {', '.join(sorted(refused))}")
    return hashed.line()


def _unfit(path: str | os.PathLike[str], found: str) -> CheckpointError:
    return CheckpointError(
        f"this state cannot be a checkpoint: {found}",
        expected="tensors and plain values, such as numbers, strings, lists and dicts",
        hint="convert it, for instance a NumPy number by float(), or leave it out",
        where=str(path),
    )


def write_all(file: io.FileIO | io.BytesIO, data: bytes | memoryview) -> None:
    """Write all bytes, in several calls if necessary.

    Args:
        file: An unbuffered file that is open for writing.
        data: The bytes.

    Raises:
        OSError: The file cannot be written.
    """
    rest = memoryview(data)
    while rest:
        rest = rest[file.write(rest) :]  # a write may be partial, as on a full disk


@contextmanager
def _opened(path: str | os.PathLike[str]) -> Iterator[io.FileIO]:
    """Open a regular file for reading; any error becomes a CheckpointError."""
    try:
        # O_NONBLOCK: without it, opening a named pipe would wait for a writer, maybe forever.
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
    """Check that the file's last line matches the content before it, and return that line.

    Raises:
        CheckpointError: It does not match.
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
        # Some file systems cannot map files; then the file is read below. Use the path under /proc,
        # because torch maps a path, not an open file, and by now another file may have the name.
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
