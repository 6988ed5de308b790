"""Reads the headers of an archive that :mod:`srunddp.stage.pack` made, and judges its members.

It takes the few kinds of member that pack writes, and by its own reading alone, as tarfile's filters have been got
round. A member lies in a folder that is a member itself. A link's target has its ``..`` in front and not more of them
than there are folders above the link: so each step of each chain of links ends inside.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator, Mapping
from typing import NamedTuple, NoReturn

from srunddp.errors import SrunddpError

_BLOCK = 512
_LONGEST_NAME, _LONGEST_PAX, _SHOWN = 4095, 1 << 15, 200
_LAST_RECORD = 10240  # other packers fill the archive up to a multiple of it
FILE, LINK, FOLDER, _PAX = b"0", b"2", b"5", b"x"
_KINDS = {b"1": "a hard link", b"3": "a device", b"4": "a device", b"6": "a FIFO", b"S": "a sparse file"}
_PAX_KEYS = {b"path", b"linkpath", b"size", b"hdrcharset"}


class ArchiveError(SrunddpError):
    """An archive is broken, foreign, or would write what it must not."""

    exit_code = 78


class Member(NamedTuple):
    """A file, folder or link, and where its content is in the archive."""

    parts: tuple[bytes, ...]
    kind: bytes
    offset: int
    size: int
    executable: bool
    mtime: int
    target: bytes


class Reader:
    """Reads the headers of a tar file: ustar, with pax records for what does not fit."""

    def __init__(self, archive: str, source: int, length: int) -> None:
        self._archive, self._source, self._length = archive, source, length

    def members(self, size: int, files: int) -> list[Member]:
        """All, each judged.

        Args:
            size, files: bytes and members that there are at most.
        """
        found: list[Member] = []
        kinds: dict[tuple[bytes, ...], bytes] = {(): FOLDER}
        for member in self._read():
            size -= member.size
            if size < 0 or len(found) == files:
                what = "bytes" if size < 0 else "members"
                refuse(self._archive, f"has more {what} than were packed", "as many as were packed")
            if wrong := _wrong(member, kinds):
                self._refuse(member.parts, wrong)
            kinds[member.parts] = member.kind
            found.append(member)
        return found

    def _read(self) -> Iterator[Member]:
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

    def _member(self, header: bytes, offset: int, records: Mapping[bytes, bytes]) -> Member:
        name = b"/".join(part for part in (_text(header[345:500]), _text(header[:100])) if part)
        name, kind = records.get(b"path", name), header[156:157]
        size = self._number(records[b"size"], 10) if b"size" in records else self._number(header[124:136])
        parts = tuple((name.removesuffix(b"/") if kind == FOLDER else name).split(b"/"))
        if kind not in (FILE, LINK, FOLDER):
            self._refuse(parts, f"is {_KINDS.get(kind, f'of the unknown type {kind!r}')}")
        if size and kind != FILE:
            self._refuse(parts, "has a size, and is no file")
        mode, mtime = self._number(header[100:108]), self._number(header[136:148])
        target = records.get(b"linkpath", _text(header[157:257]))
        return Member(parts, kind, offset, size, bool(mode & stat.S_IXUSR), mtime, target)

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
        refuse(self._archive, f"{member}{wrong}", "what srunddp packs")


def _text(field: bytes) -> bytes:
    return field.partition(b"\0")[0]


def _wrong(member: Member, kinds: Mapping[tuple[bytes, ...], bytes]) -> str:
    """Why a member is refused, given those before it; empty where nothing is wrong."""
    parts = member.parts
    if any(part in (b"", b".", b"..") or b"\0" in part or len(part) > 255 for part in parts):
        return "has no name that stays in the folder"
    if sum(map(len, parts)) + len(parts) > _LONGEST_NAME:
        return "has too long a name"
    if parts in kinds:
        return "is there twice"
    if kinds.get(parts[:-1]) != FOLDER:
        return "lies in no folder of the archive"
    if member.kind == LINK and not inward(member.target, len(parts) - 1):
        return f"is a link that may lead out, to {os.fsdecode(member.target)!r}"
    return ""


def inward(target: bytes, depth: int) -> bool:
    """Whether a link that lies ``depth`` folders deep stays inside, whatever the links are that it leads to."""
    parts = target.split(b"/")
    up = next((number for number, part in enumerate(parts) if part != b".."), len(parts))
    names = parts[up:]
    fit = all(part not in (b"", b".", b"..") and b"\0" not in part and len(part) <= 255 for part in names)
    return fit and up <= depth and len(target) <= _LONGEST_NAME


def refuse(archive: str, found: str, expected: str) -> NoReturn:
    """Raise an :class:`ArchiveError`."""
    raise ArchiveError(f"archive {archive} {found}", expected=expected, hint="stage it again")
