"""What this node sees of a file or folder. Call these functions only under a time limit, because a
file server may not answer.
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

# A file of more bytes than SMALL is compared by its size alone, and a folder with more entries than
# FEW not at all: a check on thousands of ranks must not read a whole data set on each of them.
SMALL = 1 << 20
FEW = 10_000
MOUNTS = Path("/proc/self/mountinfo")
BOOT = Path("/proc/sys/kernel/random/boot_id")
# On these file systems a file has the same inode number on all nodes.
_SHARED = {"nfs", "nfs4", "lustre", "gpfs", "beegfs", "ceph", "cifs", "smb3", "panfs", "wekafs"}


class Place(TypedDict):
    """What is at a path.

    Attributes:
        role: ``working directory``, ``script``, ``environment``, or ``path`` for a named path.
        path: The absolute path.
        kind: ``file``, ``folder`` or ``other``; else ``missing``, ``silent`` (no answer) or
            ``broken`` (another error).
        error: Why it is ``broken``, or why it cannot be read or written; else empty.
        system: The type of the file system, such as ``nfs``; empty if nothing was found.
        identity: A text that is equal on two nodes only if they see the same file or folder; empty
            if nothing was found.
        content: What :func:`content` returns for the path; empty if contents are not compared.
    """

    role: str
    path: str
    kind: str
    error: str
    system: str
    identity: str
    content: str


def look(role: str, path: str, *, write: bool = False) -> Place:
    """Find out what is at a path, without reading the content of the file or folder.

    Args:
        role: The ``role`` of the result.
        path: The file or folder; a relative path is made absolute.
        write: Whether it must be a folder in which files can be created.
    """
    place = Place(
        role=role, path=path, kind="missing", error="", system="", identity="", content=""
    )
    try:
        # abspath() must be inside the try: for a relative path it raises FileNotFoundError if the
        # working directory has been deleted.
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
    """Return a text that is equal on two nodes only if they see the very same file or folder.

    Args:
        mount: The file system that the file or folder is on.
        found: What :func:`os.stat` returns for it.
    """
    if mount.type in _SHARED:
        # Drop the server's name, because one file system is often mounted from several servers.
        export = mount.source.rpartition(":")[2]
        return f"{mount.type} {export} {found.st_ino}"
    # Nodes with the same image have equal device and inode numbers for different files. The boot id
    # tells the nodes apart.
    return f"{mount.type} {BOOT.read_text().strip()} {found.st_dev} {found.st_ino}"


def why_not_writable(folder: str) -> str:
    """Find out whether a file can be written in a folder, with a temporary file that leaves no
    trace.

    Returns:
        The reason why not; empty if the write succeeds.
    """
    try:
        with tempfile.TemporaryFile(dir=folder, prefix=".srunddp-check-") as file:
            # Write a block: an empty file needs none, so it could be created on a full disk.
            file.write(bytes(4096))
            file.flush()
            os.fsync(file.fileno())  # a full quota may only be reported here
    except OSError as error:
        return error.strerror or str(error)
    return ""


def content(path: str, *, whole: bool = False) -> str:
    """Hash a file, or the names and file sizes in a folder, so that two nodes can compare them.

    Args:
        path: The file or folder.
        whole: Whether to hash a file of more than :data:`SMALL` bytes too.

    Returns:
        The hash; for a file that is too large to be hashed, its size in words. Empty if the path
        cannot be read, or if the folder has more than :data:`FEW` entries.
    """
    with contextlib.suppress(OSError):  # other checks report unreadable paths
        if os.path.isdir(path):
            # Take one entry more than the limit, which shows whether there are too many entries
            # without listing all of them.
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
            # Skip __pycache__: each node's Python makes it when it first imports from the folder.
            if entry.name != "__pycache__":
                # Compare the sizes of files only, because file systems report different sizes for
                # folders and links that are equal.
                kept = entry.is_file(follow_symlinks=False)
                yield (
                    f"{os.fsencode(entry.name)!r}"
                    f" {entry.stat(follow_symlinks=False).st_size if kept else ''}"
                )


class Mount(NamedTuple):
    """A mounted file system from /proc/self/mountinfo: mount point, type and source."""

    point: str
    type: str
    source: str


def mount_of(path: str, mounts: Path = MOUNTS) -> Mount:
    """Find the file system that a path is on.

    Args:
        path: An absolute path without symbolic links.
        mounts: The list of mounted file systems.

    Returns:
        The file system; one with three empty texts if none contains the path.
    """
    found = Mount("", "", "")
    # A line looks like "36 35 98:0 /root /mnt rw,noatime master:1 - ext3 /dev/root rw". The number
    # of fields before the "-" varies (proc(5)).
    for line in mounts.read_text().splitlines():
        before, _, after = line.partition(" - ")
        kind, source, *_ = after.split(" ")
        mount = Mount(_unescaped(before.split(" ")[4]), kind, _unescaped(source))
        inside = path == mount.point or path.startswith(mount.point.rstrip("/") + "/")
        # Of two mounts at the same point, the later one hides the earlier one.
        if inside and len(mount.point) >= len(found.point):
            found = mount
    return found


def _unescaped(text: str) -> str:
    # The kernel writes these four characters as octal escapes. Replace the escape of the backslash
    # last, because a backslash could form a new escape with the digits after it.
    for character in (" ", "\t", "\n", "\\"):
        text = text.replace(f"\\{ord(character):03o}", character)
    return text


def mark(path: str) -> dict[str, str]:
    """Describe a folder, so that :func:`same` can compare it with a folder of another node.

    Returns:
        ``identity``, a text that is equal on two nodes only if they see the same folder, and
        ``content``, a hash of the names, sizes and modification times of the folder's entries. Both
        are empty if the folder cannot be read.
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
    # Another process has removed the entry since the folder was listed.
    except FileNotFoundError:
        return entry.name
    return (
        f"{entry.name} {found.st_size if stat.S_ISREG(found.st_mode) else ''} {int(found.st_mtime)}"
    )


def same(here: Mapping[str, str], there: Mapping[str, str]) -> bool:
    """Tell whether two results of :func:`mark` describe the same folder, or a folder and a copy of
    it whose entries have the same names, sizes and modification times.
    """
    return any(here[key] and here[key] == there[key] for key in ("identity", "content"))
