"""Check the limits of each rank's process and the room in its node's /dev/shm and /tmp. If these
are too low, a training may fail only after hours.
"""

import os
import resource
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from srunddp.check.finding import FAIL, WARN, Check, CheckContext, Finding, Observation, Ranks
from srunddp.util.hostlist import group_by_key

# Free bytes in a folder. Below _FULL nothing starts; below _SCARCE a compiler or a loader may run
# out of space.
_FULL = 8 << 20
_SCARCE = 1 << 30
_FEW_FILES = 1024  # the usual soft limit


@dataclass(frozen=True, kw_only=True)
class LimitFacts:
    """The limits of one rank's process, and the free space on its node.

    Attributes:
        files: How many files the process may have open; -1 for no limit.
        memlock: How many bytes of memory the process may lock; -1 for no limit.
        rdma: Whether the rank's node has InfiniBand or RoCE devices.
        free: The free bytes in /dev/shm and in the folder for temporary files; -1 for a folder that
            does not exist.
    """

    files: int
    memlock: int
    rdma: bool
    free: dict[str, int]


def collect(context: CheckContext) -> LimitFacts:
    """Collect this process's limits, and the free space in its node's folders."""
    # Loader workers pass batches through /dev/shm, and so does NCCL's SHM transport between ranks
    # of a node. torch.compile keeps its cache in the folder for temporary files.
    folders = ("/dev/shm", context.variables.get("TMPDIR") or "/tmp")
    return LimitFacts(
        # Without a limit the value is RLIM_INFINITY, which Python shows as -1.
        files=resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        memlock=resource.getrlimit(resource.RLIMIT_MEMLOCK)[0],
        rdma=any(Path("/sys/class/infiniband").glob("*")),
        free={
            folder: shutil.disk_usage(folder).free if os.path.isdir(folder) else -1
            for folder in folders
        },
    )


def evaluate(seen: Ranks[LimitFacts]) -> Iterator[Finding]:
    """Judge limits and free space: a folder that is full or missing is a failure; little space and
    low limits are warnings.
    """
    for one in seen:
        for folder, free in one.facts.free.items():
            yield from _room(one, folder, free)
        if 0 <= one.facts.files < _FEW_FILES:
            found = f"{one.facts.files} open files at most"
            hint = "raise the limit of open files (ulimit -n)"
            yield one.finding(WARN, found, f"{_FEW_FILES} or more", hint)
        if one.facts.rdma and one.facts.memlock >= 0:
            found = (
                f"{one.facts.memlock >> 10} KiB of locked memory at most, on a node with InfiniBand"
                " or RoCE"
            )
            hint = "set memlock to unlimited in slurmd's unit"
            yield one.finding(WARN, found, "no limit, as NCCL locks its buffers", hint)


def _room(one: Observation[LimitFacts], folder: str, free: int) -> Iterator[Finding]:
    if free < 0:
        yield one.finding(FAIL, f"{folder} is not there", "a folder", "create it or correct TMPDIR")
    elif free < _SCARCE:
        # Docker gives a container 64 MiB of /dev/shm by default.
        shared = (
            "start a container with --shm-size or --ipc=host; else mount -o remount,size=50%"
            " /dev/shm"
        )
        hint = (
            f"clear {folder}, or"
            f" {shared if folder == '/dev/shm' else 'name a folder with more room in TMPDIR'}"
        )
        level = FAIL if free < _FULL else WARN
        yield one.finding(
            level, f"{free >> 20} MiB free in {folder}", f"{_SCARCE >> 30} GiB or more", hint
        )


def summary(seen: Ranks[LimitFacts]) -> str:
    """Write the lowest free space of each folder among all nodes."""
    known = group_by_key(pair for one in seen for pair in one.facts.free.items())
    return ", ".join(
        f"{folder} {min(free) / 2**30:.1f} GiB free at least" for folder, free in known.items()
    )


CHECK = Check("limits", LimitFacts, collect, evaluate, summary)
