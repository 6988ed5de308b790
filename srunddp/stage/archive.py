"""Packs a folder into a tar file, unpacks it on a node, and tells whether a folder has changed.

The nodes get the text of this module, as they may have no srunddp: besides :mod:`srunddp.errors` it needs the standard
library only.
"""

from __future__ import annotations

import fnmatch
import hashlib
import os
import shutil
import stat
import tarfile
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from srunddp.errors import ConfigError

_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_KINDS = (stat.S_IFREG, stat.S_IFDIR, stat.S_IFLNK)


class ArchiveInfo(NamedTuple):
    """What an archive holds.

    Attributes:
        sha256: of the archive, in hex.
        size: bytes of content; files: number of files, folders and links; archive_size: bytes of the archive.
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

    @property
    def mode(self) -> int:
        return 0o700 if self.kind == stat.S_IFDIR or self.status.st_mode & stat.S_IXUSR else 0o600


def fingerprint(folder: str, *, leave_out: Sequence[str] = ()) -> str:
    """A hash of names, types, sizes, times and links: another one where what is packed has changed.

    Args:
        folder: its files are not read.
        leave_out: as for :func:`pack`.

    Raises:
        ConfigError: the folder or one in it cannot be read, or a link leads out of it.
    """
    digest = hashlib.sha256()
    for entry in _entries(folder, leave_out):
        facts: tuple[object, ...] = ()
        if entry.kind == stat.S_IFREG:
            facts = (entry.status.st_size, entry.status.st_mtime_ns, entry.mode)
        elif entry.kind == stat.S_IFLNK:
            facts = (_target(folder, entry),)
        digest.update(repr((entry.name, entry.kind, *facts)).encode())
    return digest.hexdigest()


def pack(folder: str, archive: str, *, leave_out: Sequence[str] = ()) -> ArchiveInfo:
    """Pack a folder's files, folders and links, without owners; sockets, FIFOs and devices are left out.

    Args:
        folder: the names in the archive begin below it.
        archive: a new file.
        leave_out: patterns as in the shell: of a name anywhere, or with a slash before the end of a path from here on.

    Raises:
        ConfigError: a link leads out of the folder, or something cannot be read or changes meanwhile.
        OSError: the archive cannot be written.
    """
    size, files, links = 0, 0, {}
    with tarfile.open(archive, "x", format=tarfile.PAX_FORMAT, encoding="utf-8") as tar:
        for entry in _entries(folder, leave_out):
            if entry.kind == stat.S_IFLNK and os.path.isabs(target := _target(folder, entry)):
                links[entry.name] = target
                continue
            _add(tar, folder, entry)
            files += 1
            size += entry.status.st_size if entry.kind == stat.S_IFREG else 0
    with open(archive, "rb") as file:
        sha256 = hashlib.file_digest(file, "sha256").hexdigest()
    return ArchiveInfo(sha256, size, files, os.path.getsize(archive), links)


def _entries(folder: str, leave_out: Sequence[str], below: str = "") -> Iterator[_Entry]:
    """What is to be packed, each folder before what is in it, in an order that is always the same."""
    here = os.path.join(folder, below).rstrip("/")
    try:
        found = sorted(os.scandir(here), key=lambda entry: os.fsencode(entry.name))
        entries = [_Entry(below + each.name, each.path, each.stat(follow_symlinks=False)) for each in found]
    except OSError as error:
        raise _unreadable(error.filename or here, error) from None
    for entry in entries:
        if entry.kind in _KINDS and not any(_fits(entry.name, pattern.rstrip("/")) for pattern in leave_out):
            yield entry
            if entry.kind == stat.S_IFDIR:
                yield from _entries(folder, leave_out, entry.name + "/")


def _fits(name: str, pattern: str) -> bool:
    if "/" in pattern:
        return fnmatch.fnmatchcase(name, pattern.lstrip("/"))
    return fnmatch.fnmatchcase(os.path.basename(name), pattern)


def _add(tar: tarfile.TarFile, folder: str, entry: _Entry) -> None:
    info = tarfile.TarInfo(entry.name)
    info.mode, info.mtime = entry.mode, int(entry.status.st_mtime)
    if entry.kind == stat.S_IFREG:
        _add_file(tar, info, entry)
        return
    if entry.kind == stat.S_IFDIR:
        info.type = tarfile.DIRTYPE
    else:
        info.type, info.linkname = tarfile.SYMTYPE, _target(folder, entry)
    tar.addfile(info)


def _add_file(tar: tarfile.TarFile, info: tarfile.TarInfo, entry: _Entry) -> None:
    """A regular file, as it was found; one that has grown, as the job's own log does, up to the length that it had."""
    info.size = entry.status.st_size
    try:
        source = os.open(entry.path, _READ)
    except OSError as error:
        raise _unreadable(entry.path, error) from None
    with open(source, "rb") as file:
        try:
            tar.addfile(info, file)
        finally:
            _require_unchanged(entry, source)


def _require_unchanged(entry: _Entry, source: int) -> None:
    before, now = entry.status, os.fstat(source)
    file = (before.st_dev, before.st_ino, before.st_mode) == (now.st_dev, now.st_ino, now.st_mode)
    content = (before.st_size, before.st_mtime_ns) == (now.st_size, now.st_mtime_ns)
    if not (file and (content or now.st_size > before.st_size)):
        found, hint = f"{entry.path} has changed while it was packed", "leave it out with --exclude"
        raise ConfigError(found, expected="a folder in which nothing writes", hint=hint)


def _target(folder: str, entry: _Entry) -> str:
    """Where a link of the archive leads: by a relative path; by an absolute one only to an interpreter."""
    root, place = os.path.realpath(folder), os.path.realpath(entry.path)
    if f"{place}/".startswith(f"{root}/"):
        return os.path.relpath(place, os.path.join(root, os.path.dirname(entry.name)))
    interpreter = fnmatch.fnmatchcase(entry.name, "bin/python*") and entry.name.count("/") == 1
    if interpreter and os.path.isfile(os.path.join(folder, "pyvenv.cfg")) and os.path.isfile(place):
        return place
    raise ConfigError(
        f"{entry.path} is a link to {place}, out of the folder",
        expected="links that lead to something in it",
        hint=f"copy into the folder what it leads to, or --exclude={entry.name}",
    )


def _unreadable(path: str, error: OSError) -> ConfigError:
    found = f"{path} cannot be read: {error.strerror}"
    return ConfigError(found, expected="a folder that you may read whole", hint="leave it out with --exclude")


def unpack(archive: str, folder: str, *, sha256: str, links: Mapping[str, str]) -> None:
    """Unpack an archive of :func:`pack` into a new folder: all of it, or nothing.

    Args:
        archive: a file in a folder that nobody else may change, as ``folder`` is.
        sha256: of the archive, in hex.
        links: more links to make, by :class:`ArchiveInfo`.

    Raises:
        ConfigError: the archive is another one, or the folder cannot be written.
    """
    above, name = os.path.split(folder)
    new = os.path.join(above, f".{name}")
    try:
        with open(archive, "rb") as file:
            if (found := hashlib.file_digest(file, "sha256").hexdigest()) != sha256:
                wrong = f"archive {archive} has the SHA-256 {found[:16]}…"
                raise ConfigError(wrong, expected=f"{sha256[:16]}…", hint="stage it again")
            file.seek(0)
            os.mkdir(new, 0o700)
            with tarfile.open(fileobj=file, encoding="utf-8") as tar:
                tar.extraction_filter = getattr(tarfile, "data_filter", None)  # from Python 3.11.4 on
                tar.extractall(new)
        for link, target in links.items():
            os.symlink(target, os.path.join(new, link))
        os.rename(new, folder)
    except (OSError, tarfile.TarError) as error:
        found = f"{folder} cannot be written: {getattr(error, 'strerror', None) or error}"
        raise ConfigError(found, expected="room and leave to write", hint="name another folder with --dir") from None
    finally:
        shutil.rmtree(new, ignore_errors=True)
