"""Write files so that no reader finds a half-written one: a file is replaced by a complete new one,
and an append that fails is undone. Also makes safe file names.
"""

import os
import re
import stat
from contextlib import suppress
from pathlib import Path


def replace_file(path: Path, content: bytes) -> None:
    """Replace the file at ``path`` by a new one. After a kill or a power cut there is either the
    old or the new file, never a part of one. A named pipe or the like at ``path`` is replaced as
    well.

    Only one rank may call this for a given path.

    Raises:
        OSError: The folder is missing or not writable, or the disk is full. The old file is
            unchanged.
    """
    temporary = path.with_name(path.name + ".tmp")
    # Remove a temporary file that a killed process has left behind. In /tmp there may also be a
    # link of this name that another user has made.
    temporary.unlink(missing_ok=True)
    try:
        # "x" opens with O_EXCL: if somebody makes a link after the unlink, the open fails instead
        # of following the link.
        with temporary.open("xb") as file:
            file.write(content)
            file.flush()
            # Sync before the rename: some file systems store the rename before the data, so a power
            # cut in between would leave an empty file under the final name.
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        with suppress(OSError):  # raise the error of the write, which says more than one of this
            temporary.unlink()
        raise


def write_output(path: Path, content: bytes) -> None:
    """Write to a path that the user has named. A file is replaced, see :func:`replace_file`; a
    device or a pipe gets the content, see :func:`is_stream`.

    Raises:
        OSError: As for :func:`replace_file`, or nobody reads the pipe.
    """
    if is_stream(path):
        _write_to(path, content)
    else:
        replace_file(path, content)


def is_stream(path: str | os.PathLike[str]) -> bool:
    """Return whether a path leads to a device, a pipe or an open file of a process, such as
    /dev/stdout. Output is written to such a path, and never replaces it by a file.
    """
    try:
        kind = os.stat(path).st_mode
    except OSError:
        return False
    if not stat.S_ISREG(kind):
        return not stat.S_ISDIR(kind)
    # /dev/stdout is a link even if standard output goes to a regular file.
    folder = os.path.realpath(os.path.dirname(os.path.abspath(path)))
    return os.path.islink(path) and (folder == "/dev" or folder.startswith("/proc/"))


def _write_to(path: Path, content: bytes) -> None:
    if not content:  # opening and closing a pipe would show its reader an end of file
        return
    # With O_NONBLOCK, opening a pipe that nobody reads fails instead of waiting for a reader. With
    # O_APPEND, what a file already contains stays there if the path is /dev/stdout and standard
    # output goes to this file.
    flags = os.O_WRONLY | os.O_APPEND | os.O_NONBLOCK | os.O_NOCTTY
    descriptor = os.open(path, flags)
    os.set_blocking(descriptor, True)
    with open(descriptor, "wb") as file:
        file.write(content)


def append_whole(file: int, data: bytes) -> None:
    """Append ``data`` to an open file. If the disk becomes full halfway, remove what was appended.

    Raises:
        OSError: The disk is full, or the file system fails.
    """
    written = 0
    try:
        while written < len(data):
            written += os.write(file, data[written:])
    except OSError:
        with suppress(OSError):
            # Truncate the file to its old size. No other process appends to it meanwhile, because
            # no two ranks write to the same file.
            os.ftruncate(file, os.fstat(file).st_size - written)
        raise


def plain(name: str) -> str:
    """Turn any text into a name for a single file or folder.

    The name has no slash, is not hidden, is not empty, and is not ``..``.
    """
    # Replacing a leading dot is enough to exclude "..", because there are no slashes. Other dots
    # stay, as in a node's domain or a run's JOB.STEP.
    return re.sub(r"[^\w.-]|^\.", "_", name, flags=re.ASCII) or "_"
