"""Whether a node sees the same folder as the one where it is packed; sent to the nodes beside the node program."""

from __future__ import annotations

import hashlib
import os
import stat
from typing import TypedDict

from srunddp.site.places import identity, mount_of


class Mark(TypedDict):
    """What two nodes can compare of a folder.

    Attributes:
        identity: equal for nodes that see this one folder, where its file system lets that be told.
        content: a hash of its entries' names, sizes and times; empty where it cannot be read.
    """

    identity: str
    content: str


def mark(path: str) -> Mark:
    """Of a folder here."""
    try:
        entries = sorted(_entry(entry) for entry in os.scandir(path))
        found = os.stat(path)
        return Mark(
            identity=identity(mount_of(os.path.realpath(path)), found),
            content=hashlib.sha256("\0".join(entries).encode(errors="surrogateescape")).hexdigest(),
        )
    except OSError:
        return Mark(identity="", content="")


def _entry(entry: os.DirEntry[str]) -> str:
    try:
        found = entry.stat(follow_symlinks=False)
    except FileNotFoundError:
        return entry.name
    return f"{entry.name} {found.st_size if stat.S_ISREG(found.st_mode) else ''} {int(found.st_mtime)}"


def same(here: Mark, there: Mark) -> bool:
    """Whether it is one folder, or a copy of it to the last time of its entries."""
    return any(here[key] and here[key] == there[key] for key in ("identity", "content"))
