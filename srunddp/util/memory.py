"""Files in memory that are nowhere else."""

from __future__ import annotations

import os


def memory_file() -> int:
    """The descriptor of a file in memory that has no name and is not inherited."""
    if hasattr(os, "memfd_create"):  # not where Python was built against an old glibc, as Miniforge's and uv's are
        return os.memfd_create("srunddp")
    from tempfile import TemporaryFile

    with TemporaryFile(dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None) as file:
        return os.dup(file.fileno())
