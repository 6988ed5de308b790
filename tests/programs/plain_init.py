"""A script that calls srunddp.init() itself, started without srunddp. Leaves nothing behind between
its two worlds.
"""

import json
import sys

import torch
import torch.distributed as dist

import srunddp

sums = []
for _ in range(2):
    with srunddp.init() as world:
        value = torch.tensor([world.rank + 1])
        dist.all_reduce(value)
        sums.append(int(value))
    assert not dist.is_initialized()
sys.stdout.write(json.dumps({"rank": world.rank, "sums": sums}) + "\n")
