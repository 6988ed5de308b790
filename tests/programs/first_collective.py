"""Join a Gloo group, all-reduce once, and print what that took since srun was started.

Under srunddp the group comes from env://. With ``bare HOST PORT`` the script does it by hand from SLURM_*.
"""

import json
import os
import sys
import time

import torch
import torch.distributed as dist


def cpu_seconds(pid: int) -> float:
    with open(f"/proc/{pid}/stat") as stat:
        fields = stat.read().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


if sys.argv[1:2] == ["bare"]:
    host, port = sys.argv[2:]
    rank, world_size = int(os.environ["SLURM_PROCID"]), int(os.environ["SLURM_NTASKS"])
    dist.init_process_group("gloo", init_method=f"tcp://{host}:{port}", rank=rank, world_size=world_size)
    cpu = 0.0
else:
    dist.init_process_group("gloo")
    cpu = cpu_seconds(os.getppid())
value = torch.ones(1)
dist.all_reduce(value)
wall = time.monotonic() - float(os.environ["STARTED"])
cpu += time.process_time()
sys.stdout.write(json.dumps({"rank": dist.get_rank(), "wall": wall, "cpu": cpu}) + "\n")
dist.destroy_process_group()
