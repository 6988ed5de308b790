"""Packs a folder into a tar file that :mod:`srunddp.stage.unpack` takes, and tells whether one has changed."""

from __future__ import annotations

import contextlib
import errno
import fnmatch
import hashlib
import os
import stat
import tarfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, NamedTuple

from srunddp.errors import ConfigError
from srunddp.stage.archive import inward

_CHUNK, _BLOCK, _END = 1 << 20, 512, 1024
_LATEST = 8**11 - 1  # what a tar header holds
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


class ArchiveInfo(NamedTuple):
    """What an archive holds, for ``unpack``.

    Attributes:
        sha256: of the archive, in hex.
        size: bytes of content; files: members: files, folders and links; archive_size: bytes of the archive.
        links: an environment's links to its interpreter, ``bin/NAME`` to an absolute path; not in the archive.
    """

    sha256: str
    size: int
    files: int
    archive_size: int
    links: dict[str, str]


class _Entry(NamedTuple):
    name: str
    path: str
    status: os.stat_result

    @property
    def kind(self) -> int:
        return stat.S_IFMT(self.status.st_mode)


def fingerprint(folder: str | os.PathLike[str], *, leave_out: Sequence[str] = ()) -> str:
    """A hash of names, types, sizes, times and links: another one where what is packed has changed.

    Args:
        folder: its files are not read.
        leave_out: as for ``pack``.

    Raises:
        ConfigError: the folder or one in it cannot be read.
    """
    digest = hashlib.sha256()
    for entry in _entries(os.fspath(folder), leave_out):
        found = entry.status
        facts = f"{entry.kind:o}"
        if entry.kind == stat.S_IFREG:
            facts += f" {found.st_size} {found.st_mtime_ns} {bool(found.st_mode & stat.S_IXUSR)}"
        target = os.fsencode(os.readlink(entry.path)) if entry.kind == stat.S_IFLNK else b""
        digest.update(b"\0".join([os.fsencode(entry.name), facts.encode(), target, b""]))
    return digest.hexdigest()


def pack(
    folder: str | os.PathLike[str], archive: str | os.PathLike[str], *, leave_out: Sequence[str] = ()
) -> ArchiveInfo:
    """Pack a folder's files, folders and links; sockets, FIFOs and devices are left out.

    Args:
        folder: the names in the archive begin below it.
        archive: must not be there; made with mode 0600, and removed if this fails.
        leave_out: patterns as in the shell: of a name anywhere, or with a slash before the end of a path from here on.

    Raises:
        ConfigError: a link leads out of the folder, something cannot be read or changes meanwhile, or no room is left.
    """
    source, target = os.fspath(folder), os.fspath(archive)
    try:
        new = os.open(target, _NEW, 0o600)
    except FileExistsError:
        raise ConfigError(f"{target} is there", expected="a new file for the archive") from None
    except OSError as error:
        raise _not_written(target, error) from None
    try:
        with open(new, "wb", buffering=_CHUNK) as file:
            os.fchmod(new, 0o600)
            return _packed(source, _entries(source, leave_out), _Hashing(file))
    except BaseException as error:
        with contextlib.suppress(OSError):
            os.unlink(target)
        if isinstance(error, OSError):
            raise _not_written(target, error) from None
        raise


def _entries(folder: str, leave_out: Sequence[str], below: str = "") -> Iterator[_Entry]:
    """What is to be packed, each folder before what is in it, in an order that is always the same."""
    here = os.path.join(folder, below) if below else folder
    try:
        with os.scandir(here) as entries:
            found = sorted(entries, key=lambda entry: os.fsencode(entry.name))
    except OSError as error:
        raise (_unreadable if below else _denied)(here, error) from None
    try:
        for each in found:
            name = f"{below}/{each.name}" if below else each.name
            if any(_fits(name, pattern.rstrip("/")) for pattern in leave_out):
                continue
            entry = _Entry(name, os.path.join(here, each.name), each.stat(follow_symlinks=False))
            if entry.kind in (stat.S_IFREG, stat.S_IFDIR, stat.S_IFLNK):
                yield entry
            if entry.kind == stat.S_IFDIR:
                yield from _entries(folder, leave_out, name)
    except OSError as error:
        raise _unreadable(error.filename or here, error) from None


def _fits(name: str, pattern: str) -> bool:
    if "/" in pattern:
        return fnmatch.fnmatchcase(name, pattern.lstrip("/"))
    return fnmatch.fnmatchcase(os.path.basename(name), pattern)


class _Hashing:
    """Hashes and counts what is written."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file, self._digest, self.size = file, hashlib.sha256(), 0
        self.room = memoryview(
            bytearray(_CHUNK)
        )  # for what is read: new memory for each piece costs more than the copy

    def write(self, data: bytes | memoryview) -> None:
        self._file.write(data)
        self._digest.update(data)
        self.size += len(data)

    def finish(self) -> str:
        """The hash in hex of what has arrived in the file."""
        self._file.flush()
        return self._digest.hexdigest()


def _packed(folder: str, entries: Iterator[_Entry], out: _Hashing) -> ArchiveInfo:
    size, files, links = 0, 0, {}
    for entry in entries:
        if entry.kind == stat.S_IFLNK:
            target = _target(folder, entry)
            if os.path.isabs(target):
                links[entry.name] = target
                continue
            out.write(_header(entry, tarfile.SYMTYPE, target=target))
        elif entry.kind == stat.S_IFDIR:
            out.write(_header(entry, tarfile.DIRTYPE))
        else:
            size += entry.status.st_size
            _add(entry, out)
        files += 1
    out.write(bytes(_END))
    return ArchiveInfo(out.finish(), size, files, out.size, links)


def _header(entry: _Entry, kind: bytes, target: str = "") -> bytes:
    """Of a member: nothing of the owner, whole seconds, one of two modes."""
    info = tarfile.TarInfo(entry.name)
    info.type, info.linkname = kind, target
    info.size = entry.status.st_size if kind == tarfile.REGTYPE else 0
    info.mtime = min(max(int(entry.status.st_mtime), 0), _LATEST)
    info.mode = 0o700 if kind == tarfile.DIRTYPE or entry.status.st_mode & stat.S_IXUSR else 0o600
    return info.tobuf(tarfile.PAX_FORMAT, "utf-8", "surrogateescape")


def _add(entry: _Entry, out: _Hashing) -> None:
    """A regular file, exactly as it was found."""
    try:
        file = os.open(entry.path, _READ)
    except OSError as error:
        raise _unreadable(entry.path, error) from None
    try:
        _require_same(entry, os.fstat(file))
        out.write(_header(entry, tarfile.REGTYPE))
        left = entry.status.st_size
        while left:
            data = _read(entry, file, out.room[:left])
            out.write(data)
            left -= len(data)
        _require_same(entry, os.fstat(file))
    finally:
        os.close(file)
    out.write(bytes(-entry.status.st_size % _BLOCK))


def _read(entry: _Entry, file: int, room: memoryview) -> memoryview:
    try:
        length = os.readv(file, [room])
    except OSError as error:
        raise _unreadable(entry.path, error) from None
    if not length:
        raise _changed(entry.path)
    return room[:length]


def _require_same(entry: _Entry, found: os.stat_result) -> None:
    """A file that has grown is whole as far as it was found: the job's own log is such a one."""
    facts = [(each.st_dev, each.st_ino, each.st_mode) for each in (entry.status, found)]
    grown = found.st_size > entry.status.st_size
    if facts[0] != facts[1] or not (grown or _unwritten(entry.status, found)):
        raise _changed(entry.path)


def _unwritten(before: os.stat_result, after: os.stat_result) -> bool:
    return (before.st_size, before.st_mtime_ns) == (after.st_size, after.st_mtime_ns)


def _target(folder: str, entry: _Entry) -> str:
    """Where a link of the archive leads: the same place by a relative way; absolute only of an interpreter's."""
    try:
        target = os.readlink(entry.path)
    except OSError as error:
        raise _unreadable(entry.path, error) from None
    if inward(os.fsencode(target), entry.name.count("/")):
        return target
    root, place = os.path.realpath(folder), os.path.realpath(entry.path)
    near = os.path.join(root, os.path.dirname(entry.name))
    if _inside(place, root):
        return os.path.relpath(place, near)
    if _is_interpreter(folder, entry.name, place):
        return place
    raise ConfigError(
        f"{entry.path} is a link to {target}, out of the folder",
        expected="links that lead to something in it",
        hint=f"copy into the folder what it leads to, or --exclude={entry.name}",
    )


def _inside(path: str, folder: str) -> bool:
    return path.startswith(folder.rstrip("/") + "/")


def _is_interpreter(folder: str, name: str, place: str) -> bool:
    """Whether it is the Python of an environment that was made by venv, virtualenv or uv."""
    first, _, rest = name.partition("/")
    named = first == "bin" and "/" not in rest and rest.startswith("python")
    return named and Path(folder, "pyvenv.cfg").is_file() and os.path.isfile(place)


def _changed(path: str) -> ConfigError:
    return ConfigError(
        f"{path} has changed while it was packed",
        expected="a folder at rest",
        hint="stage once nothing writes there, or leave the file out with --exclude",
    )


def _unreadable(path: str, error: OSError) -> ConfigError:
    if error.errno in (errno.ENOENT, errno.ELOOP, errno.ENOTDIR, errno.ESTALE, errno.ENXIO):
        return _changed(path)
    return _denied(path, error)


def _denied(path: str, error: OSError) -> ConfigError:
    found = f"{path} cannot be read: {error.strerror or error}"
    return ConfigError(found, expected="a folder that you may read whole", hint="leave it out with --exclude")


def _not_written(archive: str, error: OSError) -> ConfigError:
    cause, hint = error.strerror or str(error), "name another folder for it"
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        room = os.statvfs(os.path.dirname(os.path.abspath(archive)))
        cause += f", {room.f_bavail * room.f_frsize >> 20} MiB free"
        hint = "clear the folder, or name another"
    return ConfigError(f"the archive {archive} cannot be written: {cause}", expected="room for it", hint=hint)
