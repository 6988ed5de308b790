"""Limits of each rank's process, and the room in its node's /dev/shm and /tmp, which a training
meets hours later.
"""

import os
import resource
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from srunddp.check.finding import FAIL, WARN, Check, CheckContext, Finding, Observation, Ranks
from srunddp.util.hostlist import group_by_key

# Bytes free in a folder: below the first nothing starts, below the second a compiler or a loader
# may run out.
_FULL = 8 << 20
_SCARCE = 1 << 30
_FEW_FILES = 1024  # the usual soft limit


@dataclass(frozen=True, kw_only=True)
class LimitFacts:
    """Of one rank.

    Attributes:
        files: open files that it may have; -1 for any number.
        memlock: bytes that it may lock; -1 for any number.
        rdma: whether its node has InfiniBand or RoCE devices.
        free: bytes that are free, of /dev/shm and the folder for temporary files; -1 where it is
            not there.
    """

    files: int
    memlock: int
    rdma: bool
    free: dict[str, int]


def collect(context: CheckContext) -> LimitFacts:
    """Collect this process's limits, and the room in its node's folders."""
    # Loader workers hand over batches in /dev/shm, and so does NCCL's SHM transport between ranks
    # of a node. torch.compile keeps its cache in the folder for temporary files.
    folders = ("/dev/shm", context.variables.get("TMPDIR") or "/tmp")
    return LimitFacts(
        # No limit is RLIM_INFINITY, which Python has as -1.
        files=resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        memlock=resource.getrlimit(resource.RLIMIT_MEMLOCK)[0],
        rdma=any(Path("/sys/class/infiniband").glob("*")),
        free={
            folder: shutil.disk_usage(folder).free if os.path.isdir(folder) else -1
            for folder in folders
        },
    )


def evaluate(seen: Ranks[LimitFacts]) -> Iterator[Finding]:
    """Judge limits and room: full folders stop a job, scarce ones and low limits are warned of."""
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
        # Docker gives a container 64 MiB unless told otherwise.
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
    """Tell the least room of each folder."""
    known = group_by_key(pair for one in seen for pair in one.facts.free.items())
    return ", ".join(
        f"{folder} {min(free) / 2**30:.1f} GiB free at least" for folder, free in known.items()
    )


CHECK = Check("limits", LimitFacts, collect, evaluate, summary)
