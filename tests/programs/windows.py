"""Train in windows of steps, in turn with the supervisor at work and with it standing still; report each one's time.

Rank 0 reports ``{"with": [seconds, …], "without": […]}``, one figure for each window.
"""

import json
import os
import signal
import sys
import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import srunddp

WINDOWS, STEPS = int(sys.argv[1]), int(sys.argv[2])

torch.set_num_threads(1)
figures = {"with": [], "without": []}
with srunddp.init() as world:
    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Sequential(*(torch.nn.Linear(256, 256) for _ in range(4))))
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    inputs = torch.randn(64, 256)

    def train(marks: bool) -> float:
        dist.barrier()
        began = time.perf_counter()
        for _ in range(STEPS):
            optimizer.zero_grad()
            model(inputs).square().mean().backward()
            optimizer.step()
            if marks:
                srunddp.heartbeat()
        return time.perf_counter() - began

    train(True)
    for window in range(2 * WINDOWS):
        # Each order as often as the other: a machine that grows slower favours neither.
        guarded = window % 4 in (0, 3)
        os.kill(os.getppid(), signal.SIGCONT if guarded else signal.SIGSTOP)
        figures["with" if guarded else "without"].append(train(guarded))
    os.kill(os.getppid(), signal.SIGCONT)
if world.rank == 0:
    print(json.dumps(figures))
