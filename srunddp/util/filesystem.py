"""A file or folder as this node sees it; none of it may be asked for without a limit, as its server
may be gone.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import os
import stat
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple, TypedDict

# Bytes of a file whose content is compared, and entries of a folder whose names are: a check of
# thousands of ranks must not read a data set on each.
SMALL = 1 << 20
FEW = 10_000
MOUNTS = Path("/proc/self/mountinfo")
BOOT = Path("/proc/sys/kernel/random/boot_id")
# On these a file has one inode number on all nodes.
_SHARED = {"nfs", "nfs4", "lustre", "gpfs", "beegfs", "ceph", "cifs", "smb3", "panfs", "wekafs"}


class Place(TypedDict):
    """What is at a path.

    Attributes:
        role: ``working directory``, ``script``, ``environment``, or ``path`` for one that was
            named.
        kind: ``file``, ``folder``, ``other``; ``missing``, ``silent`` (no answer), ``broken``
            (another error).
        error: of ``broken``, or why it cannot be read or written.
        system: the type of its file system.
        identity: equal for two nodes that see one file or folder.
        content: a hash, the same for what is the same; empty where it is not compared.
    """

    role: str
    path: str
    kind: str
    error: str
    system: str
    identity: str
    content: str


def look(role: str, path: str, *, write: bool = False) -> Place:
    """Look at a file or folder, but not at its content.

    Args:
        role: what it is for, as the result has it.
        path: of it.
        write: it has to be a folder in which files can be made.
    """
    place = Place(
        role=role, path=path, kind="missing", error="", system="", identity="", content=""
    )
    try:
        # Inside the try: a relative path raises FileNotFoundError here where the working folder has
        # been deleted.
        place["path"] = os.path.abspath(path)
        found = os.stat(place["path"])
    except (FileNotFoundError, NotADirectoryError):
        return place
    except OSError as error:
        place["kind"] = "broken"
        place["error"] = error.strerror or str(error)
        return place
    mount = mount_of(os.path.realpath(path))
    if stat.S_ISDIR(found.st_mode):
        place["kind"] = "folder"
    elif stat.S_ISREG(found.st_mode):
        place["kind"] = "file"
    else:
        place["kind"] = "other"
    place["system"] = mount.type
    place["identity"] = identity(mount, found)
    if not os.access(path, os.R_OK | (os.X_OK if place["kind"] == "folder" else 0)):
        place["error"] = "cannot be read"
    elif write and not os.access(path, os.W_OK | os.X_OK):
        place["error"] = "cannot be written to"
    return place


def identity(mount: Mount, found: os.stat_result) -> str:
    """Return a text that is equal for all nodes that see this one file or folder, and no others."""
    if mount.type in _SHARED:
        # One file system is often mounted from several servers.
        export = mount.source.rpartition(":")[2]
        return f"{mount.type} {export} {found.st_ino}"
    # Nodes of one image have equal device and inode numbers for different files. The boot id tells
    # the nodes apart.
    return f"{mount.type} {BOOT.read_text().strip()} {found.st_dev} {found.st_ino}"


def why_not_writable(folder: str) -> str:
    """Try to write a file in a folder; it has no name, and nothing of it is left.

    Returns:
        Why that fails; empty where it does not.
    """
    try:
        with tempfile.TemporaryFile(dir=folder, prefix=".srunddp-check-") as file:
            # An empty file takes no block, and would be made where disk or quota is full.
            file.write(bytes(4096))
            file.flush()
            os.fsync(file.fileno())  # a full quota is found here
    except OSError as error:
        return error.strerror or str(error)
    return ""


def content(path: str, *, whole: bool = False) -> str:
    """Hash a file, or the names and sizes in a folder, so that two nodes can compare them.

    Args:
        path: Of the file or folder.
        whole: Hash a file of more than :data:`SMALL` bytes as well; else its size stands for it.

    Returns:
        Empty where it cannot be read, or a folder has more than :data:`FEW` entries.
    """
    with contextlib.suppress(OSError):  # that it cannot be read is found elsewhere
        if os.path.isdir(path):
            # One more than is compared tells that there are more, without listing the rest.
            entries = list(itertools.islice(_entries(path), FEW + 1))
            if len(entries) > FEW:
                return ""
            return hashlib.sha256("\0".join(sorted(entries)).encode()).hexdigest()
        if os.path.isfile(path) and (size := os.path.getsize(path)) > SMALL and not whole:
            return f"{size} bytes"
        if os.path.isfile(path):
            with open(path, "rb") as file:
                return hashlib.file_digest(file, "sha256").hexdigest()
    return ""


def _entries(folder: str) -> Iterator[str]:
    with os.scandir(folder) as entries:
        for entry in entries:
            # Each node's Python makes this folder when it first imports from there.
            if entry.name != "__pycache__":
                # File systems give folders and links different sizes for the same content.
                kept = entry.is_file(follow_symlinks=False)
                yield (
                    f"{os.fsencode(entry.name)!r}"
                    f" {entry.stat(follow_symlinks=False).st_size if kept else ''}"
                )


class Mount(NamedTuple):
    """A mounted file system, as /proc/self/mountinfo has it."""

    point: str
    type: str
    source: str


def mount_of(path: str, mounts: Path = MOUNTS) -> Mount:
    """Find the mounted file system that a path is on; the path is absolute and has no links."""
    found = Mount("", "", "")
    # 36 35 98:0 /root /mnt rw,noatime master:1 - ext3 /dev/root rw: the number of fields before the
    # "-" varies (proc(5)).
    for line in mounts.read_text().splitlines():
        before, _, after = line.partition(" - ")
        kind, source, *_ = after.split(" ")
        mount = Mount(_unescaped(before.split(" ")[4]), kind, _unescaped(source))
        inside = path == mount.point or path.startswith(mount.point.rstrip("/") + "/")
        # Of two at one point the later hides the earlier.
        if inside and len(mount.point) >= len(found.point):
            found = mount
    return found


def _unescaped(text: str) -> str:
    # The kernel writes these four in octal. The backslash comes last: replaced first, it could make
    # an escape of the digits behind it.
    for character in (" ", "\t", "\n", "\\"):
        text = text.replace(f"\\{ord(character):03o}", character)
    return text


def mark(path: str) -> dict[str, str]:
    """Describe a folder so that two nodes can compare it; empty where it cannot be read.

    Returns:
        ``identity``: equal for nodes that see this one folder, where its file system lets that be
        told. ``content``: a hash of its entries' names, sizes and times.
    """
    try:
        entries = "\0".join(sorted(_stamp(entry) for entry in os.scandir(path)))
        here = identity(mount_of(os.path.realpath(path)), os.stat(path))
    except OSError:
        return {"identity": "", "content": ""}
    return {
        "identity": here,
        "content": hashlib.sha256(entries.encode(errors="surrogateescape")).hexdigest(),
    }


def _stamp(entry: os.DirEntry[str]) -> str:
    try:
        found = entry.stat(follow_symlinks=False)
    # The entry was removed after the folder was listed.
    except FileNotFoundError:
        return entry.name
    return (
        f"{entry.name} {found.st_size if stat.S_ISREG(found.st_mode) else ''} {int(found.st_mtime)}"
    )


def same(here: Mapping[str, str], there: Mapping[str, str]) -> bool:
    """Tell whether two marks are of one folder, or of a folder and a copy with the same times."""
    return any(here[key] and here[key] == there[key] for key in ("identity", "content"))
