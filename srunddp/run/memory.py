"""How often the kernel has killed for want of memory: a SIGKILL says nothing of its reason."""

from __future__ import annotations

import contextlib
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
