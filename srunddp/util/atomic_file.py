"""Small files that are whole or not there."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path


def replace_file(path: Path, content: bytes) -> None:
    """Replace ``path`` by ``content``; a kill or a power cut at any moment leaves the old file or the new.

    One rank alone may call this.

    Raises:
        OSError: the folder is missing, not writable, or the disk is full; the old file is untouched.
    """
    temporary = path.with_name(path.name + ".tmp")
    temporary.unlink(missing_ok=True)  # left by a kill; or in /tmp a link that somebody else has made
    try:
        with temporary.open("xb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        with suppress(OSError):  # of the two errors the first tells more
            temporary.unlink()
        raise
