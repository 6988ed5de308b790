"""Archives for ``unpack``, as a friend and as an enemy would write them, and what is left behind by unpacking one."""

from __future__ import annotations

import hashlib
import io
import os
import stat
import tarfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from srunddp.stage.unpack import unpack

Member = tuple[tarfile.TarInfo, bytes]
AMPLE: dict[str, Any] = {"size": 1 << 20, "files": 1000}


def member(name: str, kind: bytes = tarfile.REGTYPE, content: bytes = b"", **facts: Any) -> Member:
    """One of an archive, with facts such as ``linkname``."""
    info = tarfile.TarInfo(name)
    info.type, info.size = kind, len(content)
    info.mode = 0o755 if kind == tarfile.DIRTYPE else 0o644
    for key, value in facts.items():
        setattr(info, key, value)
    return info, content


def folder(name: str) -> Member:
    return member(name, tarfile.DIRTYPE)


def link(name: str, target: str) -> Member:
    return member(name, tarfile.SYMTYPE, linkname=target)


def written(path: Path, members: Iterable[Member], style: int = tarfile.PAX_FORMAT) -> Path:
    """The archive of these members, in this order."""
    out = io.BytesIO()
    for info, content in members:
        out.write(info.tobuf(style, "utf-8", "surrogateescape"))
        out.write(content + bytes(-len(content) % 512))
    out.write(bytes(1024))
    path.write_bytes(out.getvalue())
    path.chmod(0o600)
    return path


def unpacked(archive: Path, place: Path, **facts: Any) -> None:
    """Unpack by the right hash, whatever the archive is."""
    unpack(str(archive), str(place), **(AMPLE | {"sha256": sha256_of(archive)} | facts))


def sha256_of(archive: Path) -> str:
    return hashlib.sha256(archive.read_bytes()).hexdigest()


def snapshot(top: Path, skip: Callable[[str], bool] = lambda path: False) -> dict[str, tuple[Any, ...]]:
    """All that is below: types, modes, owners, times of files, contents, targets."""
    found: dict[str, tuple[Any, ...]] = {}
    for here, folders, files in os.walk(top):
        folders[:] = [name for name in folders if not skip(os.path.join(here, name))]
        for name in (*folders, *files):
            path = os.path.join(here, name)
            if skip(path):
                continue
            status = os.lstat(path)
            said: Any = None
            if stat.S_ISREG(status.st_mode):
                said = (status.st_mtime_ns, Path(path).read_bytes())
            elif stat.S_ISLNK(status.st_mode):
                said = os.readlink(path)
            found[path] = (
                status.st_mode,
                status.st_uid,
                status.st_nlink if not stat.S_ISDIR(status.st_mode) else 0,
                said,
            )
    return found


def good() -> list[Member]:
    """One of each kind that is taken, with a pax header too."""
    return [
        folder("bin"),
        member("bin/tool", content=b"#!/bin/sh\n", mode=0o755),
        folder("lib"),
        link("lib64", "lib"),
        member("lib/" + "long" * 40 + ".py", content=b"x = 1\n" * 200),
        link("lib/up", "../bin/tool"),
        member("lib/empty"),
    ]
