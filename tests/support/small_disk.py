"""Provides a file system that is soon full."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.conftest import missing


@contextmanager
def small_disk(folder: Path, size: str) -> Iterator[Path]:
    """Mount a small file system on a new folder, and unmount it at the end of the block. Without
    root, the test is skipped, or fails in CI.

    Args:
        folder: The folder, which must not exist.
        size: The size, such as ``3m``.
    """
    if os.geteuid() != 0 or not shutil.which("mount"):
        missing("root, to mount a small disk")
    folder.mkdir()
    subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={size},mode=700", "none", folder], check=True
    )
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", folder], check=True)
