"""Runs a munged for the tests, with a new key."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.conftest import missing
from tests.support.starting import until


@contextmanager
def munged(folder: Path) -> Iterator[str]:
    """Run a munged until the end of the block, with its files in a new folder. Yield the path of
    its socket.
    """
    program = shutil.which("munged") or shutil.which("munged", path="/usr/sbin:/usr/local/sbin")
    if not program:
        missing("munged")
    folder.mkdir(parents=True)
    (folder / "key").write_bytes(os.urandom(1024))
    (folder / "key").chmod(0o600)
    files = {
        "--socket": "socket",
        "--key-file": "key",
        "--pid-file": "pid",
        "--seed-file": "seed",
        "--log-file": "log",
    }
    command = [
        str(program),
        "--foreground",
        "--force",
        *(f"{name}={folder / file}" for name, file in files.items()),
    ]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as daemon:
        try:
            until(lambda: (folder / "socket").exists() or daemon.poll() is not None)
            assert daemon.poll() is None, (folder / "log").read_text()
            yield str(folder / "socket")
        finally:
            daemon.terminate()
