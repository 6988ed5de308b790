"""Train in windows of steps, in turn monitored and with supervisor and sampler standing still; report each one's time.

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
from torch import nn
from torch.utils.data import TensorDataset

import srunddp
from srunddp import telemetry
from srunddp.train import Config, LoadingConfig

WINDOWS, STEPS, WIDTH = int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
BATCH = 32


class Stopwatch(srunddp.Callback):
    """From the end of an epoch's first step to that of its last."""

    def on_step(self, trainer, step, loss):
        self.times.append(time.perf_counter())

    def seconds(self):
        return self.times[-1] - self.times[0]


def observers():
    supervisor = os.getppid()
    children = Path(f"/proc/{supervisor}/task/{supervisor}/children").read_text().split()
    return [supervisor, *(int(child) for child in children if int(child) != os.getpid())]


torch.set_num_threads(1)
figures = {"with": [], "without": []}
page = telemetry.active_page()
assert page
with srunddp.init() as world:
    torch.manual_seed(0)
    count = (STEPS + 1) * BATCH * world.world_size
    data = TensorDataset(torch.randn(count, WIDTH), torch.randint(10, (count,)))
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    config = Config(batch_size=BATCH, loading=LoadingConfig(num_workers=0))
    watch = Stopwatch()
    trainer = srunddp.Trainer(model, optimizer, nn.CrossEntropyLoss(), config, world=world, callbacks=[watch])
    for window in range(-1, 2 * WINDOWS):
        # Each order as often as the other: a machine that grows slower favours neither.
        monitored = window % 4 in (0, 3)
        for process in observers():
            os.kill(process, signal.SIGCONT if monitored else signal.SIGSTOP)
        telemetry.install(page if monitored else None)
        watch.times = []
        trainer.config = replace(config, epochs=trainer.state.epoch + 1)
        with contextlib.redirect_stdout(io.StringIO()):
            trainer.fit(data)
        if window >= 0:
            figures["with" if monitored else "without"].append(watch.seconds())
    for process in observers():
        os.kill(process, signal.SIGCONT)
if world.rank == 0:
    print(json.dumps(figures))
