"""Small files that are whole or not there, lines that are, and names for files."""

import os
import re
from contextlib import suppress
from pathlib import Path


def replace_file(path: Path, content: bytes) -> None:
    """Replace ``path`` by ``content``; a kill or a power cut at any moment leaves the old file or
    the new.

    One rank alone may call this.

    Raises:
        OSError: the folder is missing, not writable, or the disk is full; the old file is
            untouched.
    """
    temporary = path.with_name(path.name + ".tmp")
    # Left by a kill; or in /tmp a link that somebody else has made.
    temporary.unlink(missing_ok=True)
    try:
        # "x" is O_EXCL: if a link is made again after the unlink, this fails instead of following
        # it.
        with temporary.open("xb") as file:
            file.write(content)
            file.flush()
            # Before the rename: some file systems store a rename before the data, and a power cut
            # in between would leave an empty file under the final name.
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        with suppress(OSError):  # of the two errors the first tells more
            temporary.unlink()
        raise


def append_whole(file: int, data: bytes) -> None:
    """Append all of it to an open file or none of it, also where the disk is full halfway.

    Raises:
        OSError: there is no room, or the file system fails.
    """
    written = 0
    try:
        while written < len(data):
            written += os.write(file, data[written:])
    except OSError:
        with suppress(OSError):
            # This is the old end of the file because nobody else appends to it: each rank has its
            # own.
            os.ftruncate(file, os.fstat(file).st_size - written)
        raise


def plain(name: str) -> str:
    """Return a name for one file or folder, made of any text.

    Whatever the text holds, the name has no slash, is not hidden, and is not the folder above.
    """
    # Only a leading dot is replaced: without a slash that is enough to exclude "..", and the dots
    # in a node's domain or in a run's JOB.STEP stay.
    return re.sub(r"[^\w.-]|^\.", "_", name, flags=re.ASCII) or "_"
