"""Checkpoints with a bit turned over or their end missing; run as ``damaged_files.py FOLDER NUMBER``."""

from __future__ import annotations

import random
import sys
from pathlib import Path

import torch

from srunddp.train.checkpoint.directory import CheckpointDirectory
from srunddp.train.checkpoint.file import CheckpointError, load_file


def flipped(data: bytes, bit: int) -> bytes:
    damaged = bytearray(data)
    damaged[bit // 8] ^= 1 << bit % 8
    return bytes(damaged)


def damaged(data: bytes, draw: random.Random) -> bytes:
    """Half of them are flips; of all a quarter is in the line at the end, and the rest anywhere."""
    start = draw.choice((0, 0, 0, len(data) - 117))
    place = draw.randrange(start, len(data))
    return flipped(data, 8 * place + draw.randrange(8)) if draw.random() < 0.5 else data[:place]


def refusal(path: Path) -> str:
    try:
        load_file(path)
    except CheckpointError as error:
        return str(error)
    raise AssertionError("a damaged file was loaded")


def main(folder: Path, number: int) -> None:
    """Each is refused by name, and the one before it is loaded instead."""
    directory = CheckpointDirectory(folder, keep_last=2, keep_best=0)
    for step in (1, 2):
        directory.add(step, {"step": step, "values": torch.arange(500.0) * step})
    path, draw = directory.path(2), random.Random(0)
    data = path.read_bytes()
    for _ in range(number):
        path.write_bytes(damaged(data, draw))
        said: list[str] = []
        found = directory.newest(said.append)
        assert found is not None and found[1]["step"] == 1  # noqa: PT018
        assert len(said) == 1 and said[0] == f"passed over {refusal(path).partition(';')[0]}" and str(path) in said[0]  # noqa: PT018
    print(f"{number} damaged files, all refused by name, and the one before loaded")


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
