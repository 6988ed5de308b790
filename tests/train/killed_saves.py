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
from typing import Any, NoReturn

import torch

from srunddp.train.checkpoint.directory import CheckpointDirectory

VALUES = 500_000


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


def kill(child: int, pipe: int, step: int) -> int:
    """The last step that the child told, or ``step``."""
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    with os.fdopen(pipe) as lines:
        return max([step, *map(int, lines.read().split())])


def newest(folder: Path) -> tuple[int, dict[str, Any]]:
    """The newest checkpoint; nothing that has a checkpoint's name is broken."""
    broken: list[str] = []
    found = directory_of(folder).newest(broken.append)
    assert found is not None, "no checkpoint is left"
    assert not broken, broken
    state = found[1]
    assert bool((state["values"] == float(state["step"])).all()), "a mixture of two checkpoints"
    return state["step"], state


def check(folder: Path, acknowledged: int) -> int:
    """The newest step, which no acknowledged one is newer than; the link to the best leads somewhere."""
    step, _ = newest(folder)
    assert step >= acknowledged, f"step {acknowledged} was acknowledged, and {step} is the newest"
    best = folder / "best.pt"
    assert not best.is_symlink() or best.exists(), "best.pt leads nowhere"
    return step


def main(folder: Path, kills: int) -> None:
    torch.set_num_threads(1)  # a forked child has none of the pool's threads
    random.seed(0)
    directory_of(folder).add(0, {"step": 0, "values": torch.zeros(VALUES)})
    step, amid = 0, 0
    for number in range(kills):
        random.seed(number)
        child, pipe = fork_saver(folder, step)
        time.sleep(random.uniform(0.005, 0.08))
        acknowledged = kill(child, pipe, step)
        amid += any(folder.glob("*.tmp"))
        step = check(folder, acknowledged)
    files = sorted(file.name for file in folder.iterdir())
    assert len(files) <= 8, f"killed saves pile up: {files}"
    print(f"{step} saves, {amid} of {kills} kills left a temporary file")


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
