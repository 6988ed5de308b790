"""Rank 1 fails; rank 0 handles SIGTERM, and does what the argument says: ``victim.py HOW FOLDER``.

- write: writes a file, for seconds after SIGTERM.
- save: saves a large tensor by one call, which begins before SIGTERM.
- all_reduce, wait: waits for the other ranks, and rank 1 stays until rank 0 is gone.
"""

from __future__ import annotations

import atexit
import os
import signal
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

SECONDS = 4.0


def write(path: Path) -> None:
    while not asked:
        time.sleep(0.05)
    end = time.monotonic() + SECONDS
    with path.open("w") as file:
        while time.monotonic() < end:
            file.write("x")
            file.flush()
            time.sleep(0.05)
        file.write("END")


def save(path: Path) -> None:
    large = torch.ones(300_000_000)
    (folder / "begins").touch()
    torch.save(large, path)
    while not asked:
        time.sleep(0.05)


def stays() -> None:
    pid = int((folder / "rank0").read_text())
    while Path(f"/proc/{pid}/stat").exists():
        time.sleep(0.05)
    (folder / "outlived").touch()


how = sys.argv[1]
folder = Path(sys.argv[2])
asked: list[int] = []
dist.init_process_group("gloo")
rank = dist.get_rank()
if rank == 0:
    signal.signal(signal.SIGTERM, lambda number, _: asked.append(number))
    (folder / "rank0").write_text(str(os.getpid()))
dist.barrier()
if rank == 1:
    if how in ("all_reduce", "wait"):
        time.sleep(0.5)  # rank 0 is to be in its collective
        atexit.register(stays)
    while how == "save" and not (folder / "begins").exists():
        time.sleep(0.05)
    raise ValueError("boom")
if rank == 0 and how == "write":
    write(folder / "saved")
elif rank == 0 and how == "save":
    save(folder / "saved")
elif rank == 0 and how == "all_reduce":
    dist.all_reduce(torch.ones(1))
elif rank == 0:
    work = dist.all_reduce(torch.ones(1), async_op=True)
    assert work is not None
    work.wait()
else:
    time.sleep(600)
