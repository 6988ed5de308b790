"""A script written for torchrun: nothing of srunddp in it. Prints a sum over all ranks."""

import json
import os
import sys
import time

import torch
import torch.distributed as dist

dist.init_process_group(backend="gloo")
total = torch.tensor([float(dist.get_rank() + 1)])
dist.all_reduce(total)
report = {
    "rank": dist.get_rank(),
    "local_rank": int(os.environ["LOCAL_RANK"]),
    "world_size": dist.get_world_size(),
    "sum": total.item(),
    "master": os.environ["MASTER_ADDR"] + " " + os.environ["MASTER_PORT"],
    "run": os.environ["TORCHELASTIC_RUN_ID"],
    "node": os.environ.get("SLURMD_NODENAME", ""),
}
sys.stdout.write(json.dumps(report) + "\n")
time.sleep(float(os.environ.get("PAUSE", 0)))
dist.destroy_process_group()
