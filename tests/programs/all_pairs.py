"""In each step each rank sends something to each other: ``all_pairs.py FOLDER STEPS SECONDS``, with
the time limit of a collective. Each rank notes its steps in the folder's ``steps.txt``, as
``restarted.py`` does.
"""

from __future__ import annotations

import datetime
import os
import sys
import time

import torch
import torch.distributed as dist

import srunddp

folder, steps, limit = sys.argv[1:]
start = os.environ["TORCHELASTIC_RESTART_COUNT"]
rank = os.environ["RANK"]
dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=float(limit)))
numbers = torch.ones(dist.get_world_size())
for step in range(int(steps)):
    dist.all_to_all_single(torch.empty_like(numbers), numbers)
    with open(f"{folder}/steps.txt", "a") as file:
        file.write(f"{start} {step} {rank} {os.environ['SLURMD_NODENAME']} {time.monotonic()}\n")
    srunddp.heartbeat()
    time.sleep(0.2)
dist.destroy_process_group()
