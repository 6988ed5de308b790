"""Power cuts amid saves, on a real file system; run as root by ``unshare -m``, as ``power_cuts.py FOLDER CUTS``.

ext4 has a call for it: from then on nothing more gets to the disk, the journal included, and all calls fail with EIO.
"""

from __future__ import annotations

import fcntl
import os
import random
import struct
import subprocess
import sys
import time
from pathlib import Path

import torch

from tests.train.killed_saves import check, directory_of, fork_saver, kill

SHUTDOWN, WITHOUT_JOURNAL = 0x8004587D, 2  # EXT4_IOC_SHUTDOWN, EXT4_GOING_FLAGS_NOLOGFLUSH


def run(*command: str | Path) -> None:
    subprocess.run(command, check=True, capture_output=True)


def cut(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    fcntl.ioctl(descriptor, SHUTDOWN, struct.pack("I", WITHOUT_JOURNAL))
    os.close(descriptor)


def main(folder: Path, cuts: int) -> None:
    torch.set_num_threads(1)
    image, disk = folder / "image", folder / "disk"
    disk.mkdir()
    run("truncate", "-s", "64M", image)
    run("mkfs.ext4", "-q", image)
    run("mount", "-o", "loop", image, disk)
    directory_of(disk).add(0, {"step": 0, "values": torch.zeros(10)})
    step, amid = 0, 0
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
    main(Path(sys.argv[1]), int(sys.argv[2]))
