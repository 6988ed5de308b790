"""A loop that saves itself: ``kept_steps.py FOLDER STEPS PACE``. It resumes after any restart,
under any launcher.

Each step's data follow from its number, so that the weights at the end are the same however often
it was restarted.
"""

import hashlib
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

import srunddp

folder = Path(sys.argv[1])
steps = int(sys.argv[2])
pace = float(sys.argv[3])
rank = int(os.environ["RANK"])
(folder / f"pid.{rank}").write_text(str(os.getpid()))
dist.init_process_group("gloo")
torch.manual_seed(0)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(64, 64))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
# DistributedDataParallel orders its buckets anew after the first backward, and the order of sums
# follows from that.
model(torch.zeros(8, 64)).square().mean().backward()
saved = folder / "saved.pt"
begin = 0
if saved.exists():
    state = torch.load(saved)
    begin = state["step"]
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
for step in range(begin, steps):
    generator = torch.Generator().manual_seed(1000 * step + rank)
    began = time.monotonic()
    optimizer.zero_grad()
    model(torch.randn(8, 64, generator=generator)).square().mean().backward()
    optimizer.step()
    time.sleep(pace)
    srunddp.heartbeat()
    if rank == 0:
        with (folder / "steps").open("a") as file:
            file.write(f"{step} {time.monotonic() - began:.4f} {time.monotonic():.4f}\n")
        if (step + 1) % 50 == 0:
            state = {
                "step": step + 1,
                "model": model.state_dict(),
                "optimizer": optimizer.state_dict(),
            }
            torch.save(state, folder / "saving.pt")
            os.replace(folder / "saving.pt", saved)
weights = b"".join(each.detach().numpy().tobytes() for each in model.parameters())
(folder / f"weights.{rank}").write_text(hashlib.sha256(weights).hexdigest())
dist.destroy_process_group()
