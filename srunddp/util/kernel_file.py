"""Files of the kernel, read once or repeatedly, and files in memory.

A file that is read repeatedly stays open, so that each read is one system call. Reading the figures
of a process in this way takes about 10 us; with psutil it takes 30 to 60 us.
"""

import contextlib
import math
import os
import resource
from collections.abc import Iterator
from pathlib import Path

from srunddp.util.descriptors import move_high

_PAGE = 4096
_RECORD = 1024  # bytes; no line of the files that are read here is longer


class KernelFile:
    """A file of /proc, /sys or a control group that stays open between reads.

    Making an instance raises an OSError if the file cannot be opened.
    """

    __slots__ = ("_file", "_path")

    def __init__(self, path: str | Path) -> None:
        self._path = path
        self._file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)

    def read(self, *, whole: bool = False) -> bytes:
        """Read the present content of the file.

        Args:
            whole: Whether to read the whole file. Otherwise at most the first 4 KiB are read, by
                one system call.

        Raises:
            OSError: The process, device or group that the file describes is gone.
        """
        text = more = os.pread(self._file, _PAGE, 0)
        # A read ends before the first record (mostly a line) that does not fit, because the kernel
        # never splits a record. So if the read has left room for another record, nothing is
        # missing, and no further call is needed.
        while whole and more and len(text) > _PAGE - _RECORD:
            more = os.pread(self._file, _PAGE, len(text))
            text += more
        return text

    def __del__(self) -> None:
        if hasattr(self, "_file"):
            os.close(self._file)


def opened(path: str | Path) -> KernelFile | None:
    """Open a file of the kernel; return None if it does not exist or may not be read."""
    with contextlib.suppress(OSError):
        return KernelFile(path)
    return None


def text_of(path: Path) -> str:
    """Return the content of a kernel file, without white space at its beginning and end; empty if
    it cannot be read.
    """
    with contextlib.suppress(OSError):
        return path.read_text(errors="replace").strip()
    return ""


def number_after(text: bytes, name: bytes) -> int | None:
    """Find the number after a name, in a text with lines like ``name 123`` or ``name: 123``.

    Args:
        text: The lines.
        name: Everything before the number, for example ``b"usage_usec "``.

    Returns:
        The number; None if no line has the name.
    """
    start = text.find(name)
    if start < 0:
        return None
    start += len(name)
    end = text.find(b"\n", start)
    return int(text[start : end if end >= 0 else None])


# Indexes of the session and the start time in the list that stat_fields() returns. In the file they
# are fields 6 and 22.
SESSION = 3
STARTED = 19


def stat_fields(pid: int | str) -> list[str]:
    """Read the fields of /proc/PID/stat that follow the process name: state, parent, group,
    session, ...

    The name is left out, because it may contain anything, even the separators.

    Raises:
        OSError: The process has ended, or this user may not see it.
    """
    return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()


def ancestors(pid: int) -> Iterator[tuple[int, str]]:
    """Yield pid and name of a process, of its parent, and so on, up to the first process of the pid
    namespace.

    At a process that has ended or that this user may not see, the sequence ends with its pid and an
    empty name.
    """
    while pid:
        try:
            before, _, after = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")
        except OSError:
            yield pid, ""  # /proc may be mounted with hidepid, which hides other users' processes
            return
        yield pid, before.partition("(")[2]
        pid = int(after.split()[1])


def environ_of(pid: int) -> dict[str, str]:
    """Read the environment variables that a process was started with.

    Raises:
        OSError: The process has ended, or belongs to another user.
    """
    text = Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace")
    return dict(entry.partition("=")[::2] for entry in text.split("\0") if "=" in entry)


def children_of(pid: int) -> list[int]:
    """List the pids of the children that any thread of a process has forked.

    The list is empty if the process has ended, or if this user may not see it.
    """
    found: list[int] = []
    with contextlib.suppress(OSError):
        for thread in os.listdir(f"/proc/{pid}/task"):
            found += map(int, Path(f"/proc/{pid}/task/{thread}/children").read_text().split())
    return found


def raise_open_files_limit(needed: float = math.inf) -> None:
    """Raise this process's soft limit of open files to the hard limit.

    Args:
        needed: How many open files are enough: a soft limit of at least this number is not changed.

    Raises:
        OSError, ValueError: The kernel refuses the change.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    # Soft limits are often 1,024, because select() takes no higher descriptors. Raising the soft
    # limit up to the hard one needs no privilege.
    if soft != resource.RLIM_INFINITY and soft < needed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def memory_file() -> int:
    """Create a nameless file in memory and return its descriptor, which is high (see
    :func:`srunddp.util.descriptors.move_high`) and has close-on-exec set.
    """
    # os.memfd_create is missing in Pythons that were built against an old glibc, such as those of
    # Miniforge and uv.
    if hasattr(os, "memfd_create"):
        return move_high(os.memfd_create("srunddp"))
    from tempfile import TemporaryFile

    # Return a duplicate of the descriptor, which keeps the nameless file alive after the with block
    # has closed the descriptor itself. os.dup() sets close-on-exec too.
    with TemporaryFile(dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None) as file:
        return move_high(os.dup(file.fileno()))
