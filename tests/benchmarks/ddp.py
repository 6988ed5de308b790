"""A step with the loop's DistributedDataParallel settings over one with torch's own, in one run: wall and CPU time.

Two ranks of a model of 20 MB on this machine, Gloo, one thread each; both kinds in turn, in windows of some steps. The
figure is the median of the ratios of neighbouring windows.

    python -m tests.benchmarks.ddp [WINDOWS [STEPS]]
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from srunddp.train.config import Config
from srunddp.train.model.ddp import DDPModel
from srunddp.train.model.step import StepModule
from tests.benchmarks import numbers, quartiles
from tests.train.local_world import LocalWorld, run_ranks

WINDOWS, STEPS = 40, 10


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(layer for _ in range(10) for layer in (nn.Linear(704, 704), nn.ReLU())))


def mean_square(model: nn.Module, inputs: Tensor) -> Tensor:
    return model(inputs).square().mean()


def window(model: nn.Module, inputs: Tensor, steps: int) -> tuple[float, float]:
    dist.barrier()
    wall, cpu = time.perf_counter(), time.process_time()
    for _ in range(steps):
        for parameter in model.parameters():
            parameter.grad = None
        model(inputs)[0].backward()
    dist.barrier()
    return time.perf_counter() - wall, time.process_time() - cpu


def measure(world: LocalWorld, windows: int, steps: int) -> list[tuple[float, float, float, float]]:
    stock = DistributedDataParallel(StepModule(network(), mean_square))
    ours = DDPModel(network(), mean_square, None, world, Config()).training
    inputs = torch.randn(16, 704)
    for model in (stock, ours):
        window(model, inputs, 3)
    return [(*window(stock, inputs, steps), *window(ours, inputs, steps)) for _ in range(windows)]


def main() -> None:
    windows, steps = numbers(WINDOWS, STEPS)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    with tempfile.TemporaryDirectory() as folder:
        rows = run_ranks(2, Path(folder), measure, windows, steps)[0]
    stock = 1000 * statistics.median(row[0] for row in rows) / steps
    print(f"step {stock:.1f} ms with torch's settings; ours over that:")
    for column, name in enumerate(("wall", "CPU")):
        print(f"  {name} {quartiles((row[column + 2] / row[column] for row in rows), 4)}")


if __name__ == "__main__":
    main()
