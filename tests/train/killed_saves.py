"""Children that save without end until they are killed; run as ``killed_saves.py FOLDER KILLS``.

They are forked from one process, since each start of Python would import torch again.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from pathlib import Path

import torch

from srunddp.train import load_checkpoint, save_checkpoint

VALUES = 1_000_000


def save_for_ever(path: Path, number: int) -> None:
    while True:
        number += 1
        save_checkpoint(path, {"number": number, "values": torch.full((VALUES,), float(number))})


def killed_save(path: Path, number: int) -> None:
    child = os.fork()
    if child == 0:
        save_for_ever(path, number)
    time.sleep(random.uniform(0.005, 0.05))
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)


def main(folder: Path, kills: int) -> None:
    torch.set_num_threads(1)  # a forked child has none of the pool's threads
    random.seed(0)
    path = folder / "checkpoint.pt"
    save_checkpoint(path, {"number": 0, "values": torch.zeros(VALUES)})
    number, amid = 0, 0
    for _ in range(kills):
        killed_save(path, number)
        amid += len(list(folder.iterdir())) > 1
        state = load_checkpoint(path)
        assert state["number"] >= number, "an older checkpoint came back"
        assert bool((state["values"] == float(state["number"])).all()), "a mixture of two checkpoints"
        number = state["number"]
    assert len(list(folder.iterdir())) <= 2, "killed saves pile up"
    print(f"{number} saves, {amid} of {kills} kills amid one")


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
