"""Children that save without end until they are killed: ``killed_saves.py FOLDER KILLS``.

They are forked from one process, since each start of Python would import torch again.
``killed_saves.py FOLDER CUTS power-cuts``, run as root by ``unshare -m``, cuts each off from a disk
of its own before. ext4 has a call for it: from then on nothing more gets to the disk, the journal
included, and all calls fail with EIO.
"""

from __future__ import annotations

import fcntl
import os
import random
import select
import signal
import struct
import subprocess
import sys
import time
from pathlib import Path
from typing import NoReturn

import torch

from srunddp.train.checkpoint.directory import CheckpointDirectory

VALUES = 500_000
# EXT4_IOC_SHUTDOWN, EXT4_GOING_FLAGS_NOLOGFLUSH
SHUTDOWN = 0x8004587D
WITHOUT_JOURNAL = 2


def directory_of(folder: Path) -> CheckpointDirectory:
    return CheckpointDirectory(folder, keep_last=2, keep_best=1)


def save_for_ever(folder: Path, step: int, pipe: int) -> NoReturn:
    """Each step is told through the pipe ``pipe`` once its checkpoint is said to be written."""
    directory = directory_of(folder)
    while True:
        step += 1
        directory.scores[step] = random.random()
        directory.add(step, {"step": step, "values": torch.full((VALUES,), float(step))})
        os.write(pipe, b"%d\n" % step)


def fork_saver(folder: Path, step: int) -> tuple[int, int]:
    """The process, and the pipe that it tells its steps through."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            save_for_ever(folder, step, write)
        finally:
            os._exit(1)
    os.close(write)
    return child, read


def wait_for_first_save(folder: Path, left: set[Path], pipe: int) -> None:
    """Until it is going on or over; ``left``: temporary files of earlier saves.

    On a busy machine a child may begin late, and would be killed before it did anything.
    """
    told = select.poll()
    told.register(pipe, select.POLLIN)
    while not {*folder.glob("*.tmp")} - left and not told.poll(1):
        pass


def kill(child: int, pipe: int, step: int) -> int:
    """The last step that the child told, or ``step``."""
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    with os.fdopen(pipe) as lines:
        return max([step, *map(int, lines.read().split())])


def check(folder: Path, acknowledged: int) -> int:
    """The newest step, which no acknowledged one is newer than; no checkpoint is broken, and the
    best is there.
    """
    broken: list[str] = []
    found = directory_of(folder).newest(broken.append)
    assert found is not None, "no checkpoint is left"
    assert not broken, broken
    step = found[1]["step"]
    values = found[1]["values"]
    assert bool((values == float(step)).all()), "a mixture of two checkpoints"
    assert step >= acknowledged, f"step {acknowledged} was acknowledged, and {step} is the newest"
    best = folder / "best.pt"
    assert not best.is_symlink() or best.exists(), "best.pt leads nowhere"
    return int(step)


def kills(folder: Path, least: int) -> None:
    """So many kills, and more while fewer than half of them fell into a save, as beside other
    work.
    """
    random.seed(0)
    directory_of(folder).add(0, {"step": 0, "values": torch.zeros(VALUES)})
    step = 0
    amid = 0
    number = 0
    while number < least or (amid < least // 2 and number < 10 * least):
        random.seed(number)
        number += 1
        left = {*folder.glob("*.tmp")}
        child, pipe = fork_saver(folder, step)
        wait_for_first_save(folder, left, pipe)
        time.sleep(random.uniform(0.0, 0.08))
        acknowledged = kill(child, pipe, step)
        amid += any(folder.glob("*.tmp"))
        step = check(folder, acknowledged)
    # Several in a row may have been killed after their file was whole and before the older ones
    # were deleted: the next save that comes to its end does so.
    directory_of(folder).add(step + 1, {"step": step + 1, "values": torch.ones(VALUES)})
    files = sorted(file.name for file in folder.iterdir())
    assert len(files) <= 8, f"killed saves pile up: {files}"
    print(f"{step} saves, {amid} of {number} kills left a temporary file")


def run(*command: str | Path) -> None:
    subprocess.run(command, check=True, capture_output=True)


def cut(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    fcntl.ioctl(descriptor, SHUTDOWN, struct.pack("I", WITHOUT_JOURNAL))
    os.close(descriptor)


def power_cuts(folder: Path, cuts: int) -> None:
    image = folder / "image"
    disk = folder / "disk"
    disk.mkdir()
    run("truncate", "-s", "64M", image)
    run("mkfs.ext4", "-q", image)
    run("mount", "-o", "loop", image, disk)
    directory_of(disk).add(0, {"step": 0, "values": torch.zeros(10)})
    step = 0
    amid = 0
    for number in range(cuts):
        random.seed(number)
        child, pipe = fork_saver(disk, step)
        time.sleep(random.uniform(0.005, 0.25))
        cut(disk)
        acknowledged = kill(child, pipe, step)
        run("umount", disk)
        run("mount", "-o", "loop", image, disk)
        amid += any(disk.glob("*.tmp"))
        step = check(disk, acknowledged)
    run("umount", disk)
    print(f"{step} saves, {cuts} power cuts, {amid} left a temporary file")


if __name__ == "__main__":
    torch.set_num_threads(1)  # a forked child has none of the pool's threads
    campaign = power_cuts if "power-cuts" in sys.argv else kills
    campaign(Path(sys.argv[1]), int(sys.argv[2]))
