"""Unpacks an archive of :mod:`srunddp.site.staging.pack`; its text is sent to nodes that have no srunddp yet.

Strict on purpose: it takes the few kinds of member that pack writes, and by its own reading alone, as tarfile's filters
have been got round. All members are judged before the first is written. A member lies in a folder that is a member
itself, and no link is made before all else is written: so nothing is ever written through a link. A link's target has
its ``..`` in front and not more of them than there are folders above the link: so each step of each chain of links
ends inside.
"""

from __future__ import annotations

import errno
import hashlib
import os
import secrets
import shutil
import stat
from collections.abc import Iterator, Mapping
from typing import NamedTuple, NoReturn

from srunddp.errors import ConfigError, SrunddpError

_BLOCK, _CHUNK = 512, 1 << 20
_LONGEST_NAME, _LONGEST_PAX, _SHOWN = 4095, 1 << 15, 200
_LAST_RECORD = 10240  # other packers fill the archive up to a multiple of it
_FILE, _LINK, _FOLDER, _PAX = b"0", b"2", b"5", b"x"
_KINDS = {b"1": "a hard link", b"3": "a device", b"4": "a device", b"6": "a FIFO", b"S": "a sparse file"}
_PAX_KEYS = {b"path", b"linkpath", b"size", b"hdrcharset"}
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC
_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


class ArchiveError(SrunddpError):
    """An archive is broken, foreign, or would write what it must not."""

    exit_code = 78


class _Member(NamedTuple):
    parts: tuple[bytes, ...]
    kind: bytes
    offset: int
    size: int
    executable: bool
    mtime: int
    target: bytes


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
        members = _Reader(archive, source, length).members(size, files)
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
        _refuse(archive, f"cannot be opened: {_cause(error)}", "a file that was staged")
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
        _refuse(archive, wrong, "a file of your own with one name")
    return source


def _checked(archive: str, source: int, sha256: str) -> int:
    """The archive's length in bytes, once its hash is known to be right."""
    digest, length, room = hashlib.sha256(), 0, memoryview(bytearray(_CHUNK))
    while read := os.preadv(source, [room], length):
        digest.update(room[:read])
        length += read
    if digest.hexdigest() != sha256:
        _refuse(archive, f"has the SHA-256 {digest.hexdigest()[:16]}…", f"{sha256[:16]}…")
    return length


class _Reader:
    """Reads the headers of a tar file: ustar, with pax records for what does not fit."""

    def __init__(self, archive: str, source: int, length: int) -> None:
        self._archive, self._source, self._length = archive, source, length

    def members(self, size: int, files: int) -> list[_Member]:
        """All, each judged.

        Args:
            size, files: bytes and members that there are at most.
        """
        found: list[_Member] = []
        kinds: dict[tuple[bytes, ...], bytes] = {(): _FOLDER}
        for member in self._read():
            size -= member.size
            if size < 0 or len(found) == files:
                what = "bytes" if size < 0 else "members"
                _refuse(self._archive, f"has more {what} than were packed", "as many as were packed")
            if wrong := _wrong(member, kinds):
                self._refuse(member.parts, wrong)
            kinds[member.parts] = member.kind
            found.append(member)
        return found

    def _read(self) -> Iterator[_Member]:
        offset = 0
        while header := self._header(offset):
            offset += _BLOCK
            records: dict[bytes, bytes] = {}
            if header[156:157] == _PAX:
                records, offset = self._records(header, offset)
                header = self._header(offset) or self._refuse((), "ends after a pax header")
                offset += _BLOCK
            member = self._member(header, offset, records)
            offset += -(-member.size // _BLOCK) * _BLOCK
            if offset > self._length:
                self._refuse(member.parts, "is cut off")
            yield member
        end = self._block(offset, min(self._length - offset, _LAST_RECORD + _BLOCK))
        if not 2 * _BLOCK <= len(end) <= _LAST_RECORD or any(end):
            self._refuse((), "has no proper end")

    def _header(self, offset: int) -> bytes:
        """A header, or nothing where the members end."""
        block = self._block(offset, _BLOCK)
        if not any(block):
            return b""
        total = sum(block) - sum(block[148:156]) + 8 * ord(" ")
        if block[257:265] != b"ustar\x0000" or self._number(block[148:156]) != total:
            self._refuse((), f"has a broken header at byte {offset}")
        return block

    def _records(self, header: bytes, offset: int) -> tuple[dict[bytes, bytes], int]:
        size = self._number(header[124:136])
        if size > _LONGEST_PAX:
            self._refuse((), f"has a pax header of {size} bytes")
        left, records = self._block(offset, size), {}
        while left:
            digits, _, _ = left[:6].partition(b" ")
            length = int(digits) if digits.isdigit() else 0
            key, equals, value = left[len(digits) + 1 : length - 1].partition(b"=")
            if not equals or left[length - 1 : length] != b"\n" or key not in _PAX_KEYS or key in records:
                self._refuse((), f"has a pax record that is not known: {os.fsdecode(left[:40])!r}")
            records[key], left = value, left[length:]
        return records, offset + -(-size // _BLOCK) * _BLOCK

    def _member(self, header: bytes, offset: int, records: Mapping[bytes, bytes]) -> _Member:
        name = b"/".join(part for part in (_text(header[345:500]), _text(header[:100])) if part)
        name, kind = records.get(b"path", name), header[156:157]
        size = self._number(records[b"size"], 10) if b"size" in records else self._number(header[124:136])
        parts = tuple((name.removesuffix(b"/") if kind == _FOLDER else name).split(b"/"))
        if kind not in (_FILE, _LINK, _FOLDER):
            self._refuse(parts, f"is {_KINDS.get(kind, f'of the unknown type {kind!r}')}")
        if size and kind != _FILE:
            self._refuse(parts, "has a size, and is no file")
        mode, mtime = self._number(header[100:108]), self._number(header[136:148])
        target = records.get(b"linkpath", _text(header[157:257]))
        return _Member(parts, kind, offset, size, bool(mode & stat.S_IXUSR), mtime, target)

    def _number(self, field: bytes, base: int = 8) -> int:
        digits = field.rstrip(b" \0")
        if not digits.isdigit() or len(digits) > 19 or (base == 8 and digits.translate(None, b"01234567")):
            self._refuse((), f"has a number that is none: {field!r}")
        return int(digits, base)

    def _block(self, offset: int, size: int) -> bytes:
        data = os.pread(self._source, size, offset) if size > 0 else b""
        if len(data) < size or not data:
            self._refuse((), f"is cut off at byte {offset + len(data)}")
        return data

    def _refuse(self, parts: tuple[bytes, ...], wrong: str) -> NoReturn:
        name = os.fsdecode(b"/".join(parts))
        member = f"member {name if len(name) <= _SHOWN else name[:_SHOWN] + '…'!r} " if parts else ""
        _refuse(self._archive, f"{member}{wrong}", "what srunddp packs")


def _text(field: bytes) -> bytes:
    return field.partition(b"\0")[0]


def _wrong(member: _Member, kinds: Mapping[tuple[bytes, ...], bytes]) -> str:
    """Why a member is refused, given those before it; empty where nothing is wrong."""
    parts = member.parts
    if any(part in (b"", b".", b"..") or b"\0" in part or len(part) > 255 for part in parts):
        return "has no name that stays in the folder"
    if sum(map(len, parts)) + len(parts) > _LONGEST_NAME:
        return "has too long a name"
    if parts in kinds:
        return "is there twice"
    if kinds.get(parts[:-1]) != _FOLDER:
        return "lies in no folder of the archive"
    if member.kind == _LINK and not inward(member.target, len(parts) - 1):
        return f"is a link that may lead out, to {os.fsdecode(member.target)!r}"
    return ""


def inward(target: bytes, depth: int) -> bool:
    """Whether a link that lies ``depth`` folders deep stays inside, whatever the links are that it leads to."""
    parts = target.split(b"/")
    up = next((number for number, part in enumerate(parts) if part != b".."), len(parts))
    names = parts[up:]
    fit = all(part not in (b"", b".", b"..") and b"\0" not in part and len(part) <= 255 for part in names)
    return fit and up <= depth and len(target) <= _LONGEST_NAME


def _links(archive: str, members: list[_Member], links: Mapping[str, str]) -> list[_Member]:
    """The links of the archive, and the others."""
    kinds = {member.parts: member.kind for member in members}
    found = [member for member in members if member.kind == _LINK]
    for name, target in links.items():
        parts = tuple(os.fsencode(name).split(b"/"))
        bad = len(parts) != 2 or parts[0] != b"bin" or parts[1] in (b"", b".", b"..") or not os.path.isabs(target)
        if bad or "\0" in name + target or parts in kinds or kinds.get(parts[:1]) != _FOLDER:
            _refuse(archive, f"{name!r} cannot be made a link to {target!r}", "a new name in bin, an absolute path")
        found.append(_Member(parts, _LINK, 0, 0, False, 0, os.fsencode(target)))
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
        raise ConfigError(wrong, expected="a new folder in one of your own", cure="name another")
    return parent


def _require_room(above: str, parent: int, members: list[_Member]) -> None:
    found = os.fstatvfs(parent)
    room, block = found.f_bavail * found.f_frsize, found.f_frsize
    needed = sum(-(-member.size // block) * block or block for member in members)
    if room < needed:
        raise _full(above, room, needed)
    if found.f_files and found.f_favail < len(members):
        raise ConfigError(
            f"room for {found.f_favail} more files in {above}",
            expected=f"{len(members)}",
            cure="remove what is old there, or name another folder",
        )


def _full(above: str, room: int, needed: int) -> ConfigError:
    found = f"{room >> 20} MiB free in {above}"
    return ConfigError(found, expected=f"{(needed >> 20) + 1} MiB or more", cure="clear it, or name another folder")


def _into_new(source: int, parent: int, name: str, folder: str, members: list[_Member], links: list[_Member]) -> None:
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


def _write(source: int, root: int, members: list[_Member], links: list[_Member]) -> None:
    here, room = _Here(root), memoryview(bytearray(_CHUNK))
    try:
        for member in members:
            if member.kind == _FOLDER:
                os.mkdir(member.parts[-1], 0o700, dir_fd=here.at(member.parts[:-1]))
                os.fchmod(here.at(member.parts), 0o700)
            elif member.kind == _FILE:
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


def _write_file(source: int, folder: int, member: _Member, room: memoryview) -> None:
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


def _refuse(archive: str, found: str, expected: str) -> NoReturn:
    raise ArchiveError(f"archive {archive} {found}", expected=expected, cure="stage it again")
