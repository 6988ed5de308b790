"""What the kernel says of one process."""

from __future__ import annotations

import os
import time
from pathlib import Path

_START = 19  # starttime of /proc/PID/stat, counted from the field behind the name


def started_at(pid: int) -> float:
    """When it was started, in Unix time."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    age = time.clock_gettime(time.CLOCK_BOOTTIME) - int(fields[_START]) / os.sysconf("SC_CLK_TCK")
    return time.time() - age
