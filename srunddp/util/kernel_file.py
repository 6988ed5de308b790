"""Files of the kernel, read once or again and again: kept open, each reading is one call; and files
in memory.

psutil would take 30 to 60 us for each process, and this about 10.
"""

import contextlib
import math
import os
import resource
from collections.abc import Iterator
from pathlib import Path

_PAGE = 4096
_RECORD = 1024  # more than a line of any file that is read here


class KernelFile:
    """A file of /proc, /sys or the cgroups; OSError where it cannot be opened."""

    __slots__ = ("_file", "_path")

    def __init__(self, path: str | Path) -> None:
        self._path = path
        self._file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)

    def read(self, *, whole: bool = False) -> bytes:
        """Read what the file says now.

        Args:
            whole: It may be more than the page that the kernel gives at once.

        Raises:
            OSError: What the file is about is gone.
        """
        text = more = os.pread(self._file, _PAGE, 0)
        # The kernel ends a read before the first record that does not fit, not in the middle of
        # one: a text that leaves room for another record is complete, and needs no second call.
        while whole and more and len(text) > _PAGE - _RECORD:
            more = os.pread(self._file, _PAGE, len(text))
            text += more
        return text

    def __del__(self) -> None:
        if hasattr(self, "_file"):
            os.close(self._file)


def opened(path: str | Path) -> KernelFile | None:
    """Open a file; None where there is none, or where it is not ours to read."""
    with contextlib.suppress(OSError):
        return KernelFile(path)
    return None


def text_of(path: Path) -> str:
    """Read a file of the kernel once, without blanks at its ends; empty where it cannot be read."""
    with contextlib.suppress(OSError):
        return path.read_text(errors="replace").strip()
    return ""


def number_after(text: bytes, name: bytes) -> int | None:
    """Find the number in a line ``name 123`` or ``name: 123`` of a text.

    Args:
        text: Such lines.
        name: With all that stands before the number, such as ``b"usage_usec "``.

    Returns:
        None where no line has the name.
    """
    start = text.find(name)
    if start < 0:
        return None
    start += len(name)
    end = text.find(b"\n", start)
    return int(text[start : end if end >= 0 else None])


def stat_fields(pid: int | str) -> list[str]:
    """Read the fields of /proc/PID/stat behind the name: state, parent, group, session, …

    The name is left out, as it may hold anything, also what separates the fields.

    Raises:
        OSError: The process has ended, or is hidden from us.
    """
    return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()


def ancestors(pid: int) -> Iterator[tuple[int, str]]:
    """Yield process id and name of a process, its parent, and so on, as far as our namespace goes.

    The last one has an empty name where it is hidden from us.
    """
    while pid:
        try:
            before, _, after = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")
        except OSError:
            yield pid, ""  # hidden (hidepid), as another user's
            return
        yield pid, before.partition("(")[2]
        pid = int(after.split()[1])


def environ_of(pid: int) -> dict[str, str]:
    """Read the variables that a process was started with.

    Raises:
        OSError: It has ended, or is another user's.
    """
    text = Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace")
    return dict(entry.partition("=")[::2] for entry in text.split("\0") if "=" in entry)


def children_of(pid: int) -> list[int]:
    """List the processes that any thread of a process has forked.

    Empty where it has ended, or is hidden from us.
    """
    found: list[int] = []
    with contextlib.suppress(OSError):
        for thread in os.listdir(f"/proc/{pid}/task"):
            found += map(int, Path(f"/proc/{pid}/task/{thread}/children").read_text().split())
    return found


def raise_open_files_limit(needed: float = math.inf) -> None:
    """Raise this process's soft limit of open files to the hard one, unless it is high enough.

    Args:
        needed: The number of files that is enough.

    Raises:
        OSError, ValueError: The kernel refuses that.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    # Soft limits are often 1,024 for the sake of select(), which takes no higher descriptor;
    # raising one up to the hard limit needs no privilege.
    if soft != resource.RLIM_INFINITY and soft < needed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def memory_file() -> int:
    """Make a file in memory that has no name; return its descriptor, which is not inherited."""
    # Not where Python was built against an old glibc, as Miniforge's and uv's are.
    if hasattr(os, "memfd_create"):
        return os.memfd_create("srunddp")
    from tempfile import TemporaryFile

    # The file has no name; the copy of its descriptor keeps it when the with block closes its own,
    # and is not inherited either.
    with TemporaryFile(dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None) as file:
        return os.dup(file.fileno())
