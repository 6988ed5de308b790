"""Files that are replaced as a whole, appends that are complete or undone, and safe file names."""

import os
import re
import stat
from contextlib import suppress
from pathlib import Path


def replace_file(path: Path, content: bytes) -> None:
    """Replace the content of ``path`` so that a kill or a power cut leaves either the old file or
    the new. Whatever else is in its place, such as a pipe, is replaced as well.

    Only one rank may call this for a given path.

    Raises:
        OSError: The folder is missing or not writable, or the disk is full. The old file is
            unchanged.
    """
    temporary = path.with_name(path.name + ".tmp")
    # Remove what a killed process has left. In /tmp it may also be a link that another user has
    # made.
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
        with suppress(OSError):  # the first of the two errors says more
            temporary.unlink()
        raise


def write_output(path: Path, content: bytes) -> None:
    """Write to a path that the user has named: a file is replaced as by :func:`replace_file`, and a
    device or a pipe is written to.

    Raises:
        OSError: As for :func:`replace_file`, or nobody reads the pipe.
    """
    if is_stream(path):
        _write_to(path, content)
    else:
        replace_file(path, content)


def is_stream(path: str | os.PathLike[str]) -> bool:
    """Return whether a path leads to a device, a pipe or an open file of a process, such as
    /dev/stdout: these are written to, never replaced.
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
    if not content:  # the reader of a pipe would see an end of file
        return
    # O_NONBLOCK: an open of a pipe that nobody reads fails instead of waiting. O_APPEND: if the
    # path is standard output and that is a file, its content so far stays.
    flags = os.O_WRONLY | os.O_APPEND | os.O_NONBLOCK | os.O_NOCTTY
    descriptor = os.open(path, flags)
    os.set_blocking(descriptor, True)
    with open(descriptor, "wb") as file:
        file.write(content)


def append_whole(file: int, data: bytes) -> None:
    """Append all of ``data`` to an open file, or nothing if the disk becomes full halfway.

    Raises:
        OSError: The disk is full, or the file system fails.
    """
    written = 0
    try:
        while written < len(data):
            written += os.write(file, data[written:])
    except OSError:
        with suppress(OSError):
            # Cut the file back to its old size. That is safe because no other process appends: each
            # rank has files of its own.
            os.ftruncate(file, os.fstat(file).st_size - written)
        raise


def plain(name: str) -> str:
    """Turn any text into a name for a single file or folder.

    The name has no slash, is not hidden, is not empty, and is not ``..``.
    """
    # Replacing a leading dot is enough to exclude "..", because there are no slashes. Other dots
    # stay, as in a node's domain or a run's JOB.STEP.
    return re.sub(r"[^\w.-]|^\.", "_", name, flags=re.ASCII) or "_"
