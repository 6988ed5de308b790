"""A step's time observed over that of a step alone, within one run: what observes stands still in every other window.

Two ranks of ``Trainer``, Gloo, and their supervisors; with ``monitor`` one rank, so that of two cores one is the
supervisor's and the sampler's, and a sample each second. The figures are the median of the ratios of neighbouring
windows, and the ratio of the fastest tenth of either kind, which a busy machine disturbs less.

    python -m tests.benchmarks.step [supervisor|monitor [WINDOWS [STEPS [WIDTH]]]]
"""

from __future__ import annotations

import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset

import srunddp
from srunddp import telemetry
from srunddp.train import Config, DataLoaderConfig
from tests.benchmarks import quartiles, train
from tests.conftest import ROOT
from tests.support.starting import SRUNDDP, bare, slurm

DEFAULTS = ("supervisor", "50", "100", "512")
BATCH = 32


class Stopwatch(srunddp.Callback):
    """From the end of an epoch's first step to that of its last."""

    def on_step(self, trainer: Any, step: int, loss: float | None) -> None:
        self.times.append(time.perf_counter())


def observers() -> list[int]:
    """The supervisor, and with the monitor its sampler."""
    supervisor = os.getppid()
    children = Path(f"/proc/{supervisor}/task/{supervisor}/children").read_text().split()
    return [supervisor, *(int(child) for child in children if int(child) != os.getpid())]


def let(number: int) -> None:
    for process in observers():
        os.kill(process, number)


def training(world: srunddp.World, steps: int, width: int) -> Callable[[bool], float]:
    """What makes a window of so many steps, and returns how long they took."""
    page = telemetry.active_page()
    count = (steps + 1) * BATCH * world.world_size
    data = TensorDataset(torch.randn(count, width), torch.randint(10, (count,)))
    model = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 10))
    config = Config(batch_size=BATCH, tensorboard=False, dataloader=DataLoaderConfig(num_workers=0))
    watch = Stopwatch()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    trainer = srunddp.Trainer(model, optimizer, nn.CrossEntropyLoss(), config, world=world, callbacks=[watch])

    def window(observed: bool) -> float:
        if page:
            telemetry.install(page if observed else None)
        watch.times = []
        train(trainer, data)
        return watch.times[-1] - watch.times[0]

    return window


def rank(windows: int, steps: int, width: int) -> None:
    """Rank 0 prints ``{"with": [seconds, …], "without": […]}``, one figure for each window."""
    torch.set_num_threads(1)
    figures: dict[str, list[float]] = {"with": [], "without": []}
    with srunddp.init() as world:
        torch.manual_seed(0)
        window = training(world, steps, width)
        window(True)
        for number in range(2 * windows):
            # Each order as often as the other: a machine that grows slower favours neither.
            observed = number % 4 in (0, 3)
            let(signal.SIGCONT if observed else signal.SIGSTOP)
            figures["with" if observed else "without"].append(window(observed))
        let(signal.SIGCONT)
    if world.rank == 0:
        print(json.dumps(figures))


def main(kind: str, *words: str) -> None:
    size = 1 if kind == "monitor" else 2
    with tempfile.TemporaryDirectory() as folder:
        monitor = ("--monitor=1", f"--monitor-dir={folder}") if kind == "monitor" else ()
        command = (*SRUNDDP, "--quiet", *monitor, __file__, kind, *words)
        ranks = [
            subprocess.Popen(command, env=bare(slurm(rank, size, PYTHONPATH=str(ROOT))), stdout=subprocess.PIPE)
            for rank in range(size)
        ]
        outputs = [rank.communicate()[0] for rank in ranks]
    figures = json.loads(outputs[0])
    ratios = [ours / theirs for ours, theirs in zip(figures["with"], figures["without"], strict=True)]
    step = 1000 * statistics.median(figures["without"]) / int(words[1])
    print(f"step {step:.3f} ms without; with over without: {quartiles(ratios, 4)}")
    fastest = [statistics.fmean(sorted(figures[each])[: max(1, len(ratios) // 10)]) for each in ("with", "without")]
    print(f"of the fastest tenth: {fastest[0] / fastest[1]:.4f}")


if __name__ == "__main__":
    given = [*sys.argv[1:], *DEFAULTS[len(sys.argv) - 1 :]]
    if "RANK" in os.environ:
        rank(*map(int, given[1:]))
    else:
        main(*given)
