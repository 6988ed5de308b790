"""DistributedDataParallel without a Trainer; writes when each start's first all-reduce has ended,
and then its pid.
"""

import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

import srunddp

folder = Path(sys.argv[1])
rank = os.environ["RANK"]
dist.init_process_group("gloo")
dist.all_reduce(torch.ones(1000))
start = len(list(folder.glob(f"reduced.{rank}.*")))
(folder / f"reduced.{rank}.{start}").write_text(str(time.time()))
torch.manual_seed(0)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(64, 64))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
pid = folder / f"pid.{rank}.{start}"
end = time.monotonic() + 30.0
while not (folder / "over").exists() and time.monotonic() < end:
    model(torch.randn(8, 64)).square().mean().backward()
    optimizer.step()
    srunddp.heartbeat()
    if not pid.exists():
        pid.write_text(str(os.getpid()))
    time.sleep(0.02)
os._exit(0)
