"""Initialise in every way a script may: again and again, with its own MASTER_*, new groups, and
through srunddp.
"""

import json
import os
import sys

import torch
import torch.distributed as dist

import srunddp

rank = int(os.environ["RANK"])
world_size = int(os.environ["WORLD_SIZE"])
own_port = sys.argv[1]


def total() -> int:
    value = torch.tensor([rank + 1])
    dist.all_reduce(value)
    return int(value)


sums = []
for _ in range(10):
    dist.init_process_group("gloo")
    sums.append(total())
    dist.destroy_process_group()

for _ in range(2):
    with srunddp.init() as world:
        assert (world.rank, world.world_size) == (rank, world_size)
        sums.append(total())
    dist.init_process_group("gloo", init_method="env://")
    sums.append(total())
    dist.destroy_process_group()

url = f"tcp://{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
dist.init_process_group("gloo", init_method=url, rank=rank, world_size=world_size)
sums.append(total())
dist.destroy_process_group()

os.environ["MASTER_PORT"] = own_port
dist.init_process_group("gloo")
sums.append(total())
dist.destroy_process_group()

os.environ["MASTER_PORT"] = url.rpartition(":")[2]
dist.init_process_group("gloo")
sums.append(total())
# Rank 0 is done here; the others still need the store that it hosts.
if rank != 0:
    group = dist.new_group(list(range(1, world_size)), use_local_synchronization=True)
    dist.barrier(group)
sys.stdout.write(json.dumps({"rank": rank, "sums": sums}) + "\n")
