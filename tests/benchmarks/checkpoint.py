"""A step's time while a checkpoint is written over that without, in alternating windows within one run.

One process, one thread of torch, about 100 MB of model and Adam. A window with is as long as the write takes, and the
one after it has as many steps. The figure is the median of the ratios of neighbouring windows.

    python -m tests.benchmarks.checkpoint [WINDOWS [FOLDER]]
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch import nn

from srunddp.train.checkpoint.async_writer import AsyncCheckpointer, Snapshot
from srunddp.train.checkpoint.directory import CheckpointDirectory
from tests.benchmarks import quartiles

WINDOWS = 50
WIDTH, LAYERS, BATCH = 860, 12, 8


class Training:
    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU()) for _ in range(LAYERS)))
        self.optimizer = torch.optim.Adam(self.model.parameters(), fused=True)
        self.inputs = torch.randn(BATCH, WIDTH)

    def step(self) -> float:
        start = time.perf_counter()
        self.optimizer.zero_grad(set_to_none=True)
        self.model(self.inputs).square().mean().backward()
        self.optimizer.step()
        return time.perf_counter() - start

    def state(self) -> dict[str, object]:
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}


def steps_until(done: Callable[[], bool], training: Training) -> list[float]:
    steps = [training.step()]
    while not done():
        steps.append(training.step())
    return steps


def windows(number: int, folder: Path) -> tuple[list[list[float]], list[list[float]]]:
    training, writer = Training(), AsyncCheckpointer(CheckpointDirectory(folder, keep_last=2, keep_best=0), print)
    beside, alone = [], []
    for step in range(number + 2):
        writer.write(step, training.state())
        beside.append(steps_until(lambda: writer.join(0.0), training))
        left = iter(range(len(beside[-1]) - 1))
        alone.append(steps_until(lambda left=left: next(left, None) is None, training))  # type: ignore[misc]
    writer.wait()
    return beside[2:], alone[2:]  # the first two bring memory


def copies(number: int = 20) -> list[float]:
    training, snapshot = Training(), Snapshot()
    training.step()
    times = []
    for _ in range(number):
        start = time.perf_counter()
        snapshot.take(training.state())
        times.append(time.perf_counter() - start)
    return times


def main() -> None:
    number = int(sys.argv[1]) if len(sys.argv) > 1 else WINDOWS
    torch.set_num_threads(1)
    with TemporaryDirectory(dir=sys.argv[2] if len(sys.argv) > 2 else None) as folder:
        beside, alone = windows(number, Path(folder))
        size = max(file.stat().st_size for file in Path(folder).iterdir()) / 1e6
    first, *others = (1000 * copy for copy in copies())
    ratios = [sum(w) / sum(a) for w, a in zip(beside, alone, strict=True)]
    step = 1000 * statistics.median(time for window in alone for time in window)
    longest = 1000 * statistics.median(map(max, beside))
    print(f"step {step:.1f} ms; {size:.0f} MB are written in {statistics.median(map(len, beside)):.0f} steps")
    print(f"beside a write over without: {quartiles(ratios)}")
    print(f"longest step beside a write: {longest:.1f} ms (median of windows)")
    print(f"copy: {statistics.median(others) * 100 / size:.1f} ms per 100 MB, the first {first * 100 / size:.1f} ms")


if __name__ == "__main__":
    main()
