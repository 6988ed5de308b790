"""Unpacks an archive of :mod:`srunddp.stage.pack`; its text is sent to nodes that have no srunddp yet.

All members are judged before the first is written, and no link is made before all else is: so nothing is ever written
through a link.
"""

from __future__ import annotations

import errno
import hashlib
import os
import secrets
import shutil
import stat
from collections.abc import Mapping

from srunddp.errors import ConfigError
from srunddp.stage.archive import FILE, FOLDER, LINK, Member, Reader, refuse

_CHUNK = 1 << 20
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC
_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


def unpack(
    archive: str, folder: str, *, sha256: str, size: int, files: int, links: Mapping[str, str] | None = None
) -> None:
    """Unpack into a new folder: all of it, with modes 0600 and 0700, or nothing.

    Args:
        archive: a file of the user's own.
        folder: must not be there; the folder above it must be the user's own, and writable for nobody else.
        sha256: of the whole archive, in hex.
        size, files: bytes of content and members that there are at most.
        links: more links to make, ``bin/NAME`` to an absolute path; they come by another way than the archive.

    Raises:
        ArchiveError: the archive is not the one that was packed, or holds what is refused.
        ConfigError: the folder cannot be made, or has no room.
    """
    above, name = os.path.split(os.path.abspath(folder))
    source = _opened(archive)
    try:
        length = _checked(archive, source, sha256)
        members = Reader(archive, source, length).members(size, files)
        named = _links(archive, members, links or {})
        parent = _parent(above, folder)
        try:
            _require_room(above, parent, members)
            _into_new(source, parent, name, folder, members, named)
        finally:
            os.close(parent)
    finally:
        os.close(source)


def _opened(archive: str) -> int:
    try:
        source = os.open(archive, _READ | os.O_NONBLOCK)
    except OSError as error:
        refuse(archive, f"cannot be opened: {_cause(error)}", "a file that was staged")
    found = os.fstat(source)
    wrong = (
        "is no regular file"
        if not stat.S_ISREG(found.st_mode)
        else f"belongs to user id {found.st_uid}"
        if found.st_uid != os.geteuid()
        else f"has {found.st_nlink} names"
        if found.st_nlink != 1
        else ""
    )
    if wrong:
        os.close(source)
        refuse(archive, wrong, "a file of your own with one name")
    return source


def _checked(archive: str, source: int, sha256: str) -> int:
    """The archive's length in bytes, once its hash is known to be right."""
    digest, length, room = hashlib.sha256(), 0, memoryview(bytearray(_CHUNK))
    while read := os.preadv(source, [room], length):
        digest.update(room[:read])
        length += read
    if digest.hexdigest() != sha256:
        refuse(archive, f"has the SHA-256 {digest.hexdigest()[:16]}…", f"{sha256[:16]}…")
    return length


def _links(archive: str, members: list[Member], links: Mapping[str, str]) -> list[Member]:
    """The links of the archive, and the others."""
    kinds = {member.parts: member.kind for member in members}
    found = [member for member in members if member.kind == LINK]
    for name, target in links.items():
        parts = tuple(os.fsencode(name).split(b"/"))
        bad = len(parts) != 2 or parts[0] != b"bin" or parts[1] in (b"", b".", b"..") or not os.path.isabs(target)
        if bad or "\0" in name + target or parts in kinds or kinds.get(parts[:1]) != FOLDER:
            refuse(archive, f"{name!r} cannot be made a link to {target!r}", "a new name in bin, an absolute path")
        found.append(Member(parts, LINK, 0, 0, False, 0, os.fsencode(target)))
    return found


def _parent(above: str, folder: str) -> int:
    try:
        parent = os.open(above, _READ | os.O_DIRECTORY)
    except OSError as error:
        raise ConfigError(
            f"{above} cannot be opened: {_cause(error)}", expected="a folder of your own for what is unpacked"
        ) from None
    found, wrong = os.fstat(parent), ""
    if found.st_uid != os.geteuid():
        wrong = f"{above} belongs to user id {found.st_uid}"
    elif found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        wrong = f"{above} may be changed by others"
    elif os.path.lexists(folder):
        wrong = f"{folder} is there"
    if wrong:
        os.close(parent)
        raise ConfigError(wrong, expected="a new folder in one of your own", hint="name another")
    return parent


def _require_room(above: str, parent: int, members: list[Member]) -> None:
    found = os.fstatvfs(parent)
    room, block = found.f_bavail * found.f_frsize, found.f_frsize
    needed = sum(-(-member.size // block) * block or block for member in members)
    if room < needed:
        raise _full(above, room, needed)
    if found.f_files and found.f_favail < len(members):
        raise ConfigError(
            f"room for {found.f_favail} more files in {above}",
            expected=f"{len(members)}",
            hint="remove what is old there, or name another folder",
        )


def _full(above: str, room: int, needed: int) -> ConfigError:
    found = f"{room >> 20} MiB free in {above}"
    return ConfigError(found, expected=f"{(needed >> 20) + 1} MiB or more", hint="clear it, or name another folder")


def _into_new(source: int, parent: int, name: str, folder: str, members: list[Member], links: list[Member]) -> None:
    """Write all into a folder beside the one that is wanted, which then gets its name."""
    new = f".{name[:200]}.{secrets.token_hex(8)}"
    try:
        os.mkdir(new, 0o700, dir_fd=parent)
        root = os.open(new, _READ | os.O_DIRECTORY, dir_fd=parent)
        try:
            os.fchmod(root, 0o700)
            _write(source, root, members, links)
        finally:
            os.close(root)
        os.rename(new, name, src_dir_fd=parent, dst_dir_fd=parent)
    except BaseException as error:
        shutil.rmtree(new, ignore_errors=True, dir_fd=parent)
        if not isinstance(error, OSError):
            raise
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            room, needed = os.fstatvfs(parent), sum(member.size for member in members)
            raise _full(os.path.dirname(folder), room.f_bavail * room.f_frsize, needed) from None
        raise ConfigError(f"{folder} cannot be written: {_cause(error)}", expected="room and leave to write") from None


def _write(source: int, root: int, members: list[Member], links: list[Member]) -> None:
    here, room = _Here(root), memoryview(bytearray(_CHUNK))
    try:
        for member in members:
            if member.kind == FOLDER:
                os.mkdir(member.parts[-1], 0o700, dir_fd=here.at(member.parts[:-1]))
                os.fchmod(here.at(member.parts), 0o700)
            elif member.kind == FILE:
                _write_file(source, here.at(member.parts[:-1]), member, room)
        for member in links:
            os.symlink(member.target, member.parts[-1], dir_fd=here.at(member.parts[:-1]))
    finally:
        here.close()


class _Here:
    """The open folder that was asked for last, reached from the root through folders alone."""

    def __init__(self, root: int) -> None:
        self._root = root
        self._parts: tuple[bytes, ...] = ()
        self._open = os.dup(root)

    def at(self, parts: tuple[bytes, ...]) -> int:
        """Its descriptor, until the next one is asked for."""
        if parts == self._parts:
            return self._open
        below = self._parts == parts[: len(self._parts)]
        if not below:
            self._to(os.dup(self._root), ())
        for part in parts[len(self._parts) :]:
            self._to(os.open(part, _READ | os.O_DIRECTORY, dir_fd=self._open), (*self._parts, part))
        return self._open

    def _to(self, descriptor: int, parts: tuple[bytes, ...]) -> None:
        os.close(self._open)
        self._open, self._parts = descriptor, parts

    def close(self) -> None:
        os.close(self._open)


def _write_file(source: int, folder: int, member: Member, room: memoryview) -> None:
    mode = 0o700 if member.executable else 0o600
    new = os.open(member.parts[-1], _NEW, mode, dir_fd=folder)
    try:
        offset, end = member.offset, member.offset + member.size
        while offset < end:
            read = os.preadv(source, [room[: end - offset]], offset)
            if not read:
                raise OSError(errno.EIO, "the archive has become shorter")
            offset += os.write(new, room[:read])
        os.fchmod(new, mode)
        os.utime(new, (member.mtime, member.mtime))
    finally:
        os.close(new)


def _cause(error: OSError) -> str:
    return error.strerror or str(error)
