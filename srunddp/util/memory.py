"""Memory: how often the kernel has killed for want of it, and files that are nowhere else."""

from __future__ import annotations

import contextlib
import os
import re
from pathlib import Path

_ROOT = Path("/sys/fs/cgroup")


def oom_kills() -> int:
    """How many processes the kernel has killed in our control group because its memory was used up."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            _, kinds, group = line.split(":", 2)
            if kinds == "":
                return _count(_ROOT / group.lstrip("/") / "memory.events")
            if "memory" in kinds.split(","):
                return _count(_ROOT / "memory" / group.lstrip("/") / "memory.oom_control")
    return 0


def _count(file: Path) -> int:
    found = re.search(r"^oom_kill (\d+)$", file.read_text(), re.MULTILINE)
    return int(found[1]) if found else 0


def memory_file() -> int:
    """The descriptor of a file in memory that has no name and is not inherited."""
    if hasattr(os, "memfd_create"):  # not where Python was built against an old glibc, as Miniforge's and uv's are
        return os.memfd_create("srunddp")
    from tempfile import TemporaryFile

    with TemporaryFile(dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None) as file:
        return os.dup(file.fileno())
