"""Train in windows of steps, in turn observed and with what observes standing still; report each one's time.

    windows.py supervisor|monitor WINDOWS STEPS WIDTH

Rank 0 reports ``{"with": [seconds, …], "without": […]}``, one figure for each window.
"""

import contextlib
import io
import json
import os
import signal
import sys
import time
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

import srunddp
from srunddp import telemetry
from srunddp.train import Config, LoadingConfig

MONITOR = sys.argv[1] == "monitor"
WINDOWS, STEPS, WIDTH = map(int, sys.argv[2:])
BATCH = 32


class Stopwatch(srunddp.Callback):
    """From the end of an epoch's first step to that of its last."""

    def on_step(self, trainer, step, loss):
        self.times.append(time.perf_counter())


def observers():
    """The supervisor, and with the monitor its sampler."""
    supervisor = os.getppid()
    children = Path(f"/proc/{supervisor}/task/{supervisor}/children").read_text().split()
    return [supervisor, *(int(child) for child in children if int(child) != os.getpid())]


def bare_loop(world):
    model = DistributedDataParallel(nn.Sequential(*(nn.Linear(256, 256) for _ in range(4))))
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    inputs = torch.randn(64, 256)

    def train(observed):
        dist.barrier()
        began = time.perf_counter()
        for _ in range(STEPS):
            optimizer.zero_grad()
            model(inputs).square().mean().backward()
            optimizer.step()
            if observed:
                srunddp.heartbeat()
        return time.perf_counter() - began

    return train


def monitored_loop(world):
    page = telemetry.active_page()
    assert page
    count = (STEPS + 1) * BATCH * world.world_size
    data = TensorDataset(torch.randn(count, WIDTH), torch.randint(10, (count,)))
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 10))
    config = Config(batch_size=BATCH, loading=LoadingConfig(num_workers=0))
    watch = Stopwatch()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    trainer = srunddp.Trainer(model, optimizer, nn.CrossEntropyLoss(), config, world=world, callbacks=[watch])

    def train(observed):
        telemetry.install(page if observed else None)
        watch.times = []
        trainer.config = replace(config, epochs=trainer.state.epoch + 1)
        with contextlib.redirect_stdout(io.StringIO()):
            trainer.fit(data)
        return watch.times[-1] - watch.times[0]

    return train


torch.set_num_threads(1)
figures = {"with": [], "without": []}
with srunddp.init() as world:
    torch.manual_seed(0)
    train = monitored_loop(world) if MONITOR else bare_loop(world)
    train(True)
    for window in range(2 * WINDOWS):
        # Each order as often as the other: a machine that grows slower favours neither.
        observed = window % 4 in (0, 3)
        for process in observers():
            os.kill(process, signal.SIGCONT if observed else signal.SIGSTOP)
        figures["with" if observed else "without"].append(train(observed))
    for process in observers():
        os.kill(process, signal.SIGCONT)
if world.rank == 0:
    print(json.dumps(figures))
