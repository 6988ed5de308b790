"""Writes the files about a failure, each in a process of its own: if the file system does not
answer, only that process hangs.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import time
import warnings
from pathlib import Path

from srunddp.supervisor.worker_process import wait_for_child

FILE_EXISTS = 3  # exit code of a writer that was to create a file that already exists
_writers: list[int] = []


def start_writer(path: Path, text: str, *, new: bool = False) -> int | None:
    """Start a process that appends a text to a file.

    Args:
        path: The file.
        text: What to write.
        new: Whether to write nothing if the file exists; the process then ends with
            :data:`FILE_EXISTS`.

    Returns:
        The process id; None if the kernel cannot create a process now, in which case nothing is
        written. A limit on processes or memory must not end the supervisor.
    """
    with warnings.catch_warnings():
        # Python warns of a fork while other threads run. The child needs none of their locks.
        warnings.simplefilter("ignore")
        try:
            pid = os.fork()
        except OSError:
            return None
    if pid:
        _writers.append(pid)
        return pid
    code = 1
    try:
        # Close what was inherited: if this process hangs, its copy of a connection or an output
        # must not make another process wait for the end of it.
        os.closerange(0, max(map(int, os.listdir("/proc/self/fd"))) + 1)
        opened = os.open(
            path, os.O_WRONLY | os.O_CREAT | (os.O_EXCL if new else os.O_APPEND), 0o644
        )
        os.write(opened, text.encode(errors="backslashreplace"))
        code = 0
    except FileExistsError:
        code = FILE_EXISTS
    finally:
        os._exit(code)


def writers() -> list[int]:
    """Return the process ids of all writers so far; those that have ended may be among them."""
    return list(_writers)


def has_ended(writer: int) -> bool:
    """Return whether a writer has ended. If so, it is no longer among :func:`writers`."""
    if wait_for_child(writer, 0.0) is None:
        return False
    _writers.remove(writer)
    return True


def finish_writers(within: float) -> set[int]:
    """Wait for all writers.

    Args:
        within: How many seconds to wait at most, for all of them together.

    Returns:
        The process ids of the writers that have not ended by then.
    """
    end = time.monotonic() + within
    return {pid for pid in _writers if wait_for_child(pid, end - time.monotonic()) is None}


def rotate_previous(folder: Path) -> None:
    """Rename the ``failure.json`` of an earlier attempt to ``failure.N.json``, N from 1.

    Rank 0 calls this before its run can fail.

    Args:
        folder: The folder of the run's logs.
    """
    for number in itertools.count(1):
        earlier = folder / f"failure.{number}.json"
        if not earlier.exists():
            with contextlib.suppress(OSError):
                (folder / "failure.json").rename(earlier)
            return
