"""Join a Gloo group, all-reduce once, and print when that was done, by the clock of the machine.

The first word says how the group is made: ``env`` (under srunddp, torchrun, ft_launcher), ``bare``
(from SLURM_* and a fixed port), ``idr_torch``, ``mpi4py`` (a broadcast of rank 0's address),
``accelerate``, ``fabric``, ``lightning``, ``ezpz``, or ``import`` (no group: torch is imported, and
the process ends without any clean-up).
"""

import json
import os
import socket
import sys
import time
import warnings

import torch
import torch.distributed as dist

warnings.simplefilter("ignore")
way, port = sys.argv[1:]
NODES = int(os.environ.get("SLURM_NNODES", "1"))
HERE = int(os.environ.get("SLURM_NTASKS", "1")) // NODES


def join(host: str, port: str, rank: int, size: int) -> None:
    dist.init_process_group("gloo", init_method=f"tcp://{host}:{port}", rank=rank, world_size=size)


if way == "import":
    os._exit(0)
elif way == "bare":
    join("node01", port, int(os.environ["SLURM_PROCID"]), int(os.environ["SLURM_NTASKS"]))
elif way == "idr_torch":
    import idr_torch

    join(idr_torch.master_addr, port, idr_torch.rank, idr_torch.world_size)
elif way == "mpi4py":
    from mpi4py import MPI

    with socket.socket() as free:
        free.bind(("", 0))
        host, free_port = MPI.COMM_WORLD.bcast((socket.gethostname(), str(free.getsockname()[1])))
    join(host, free_port, MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size)
elif way == "accelerate":
    from accelerate import Accelerator

    Accelerator(cpu=True)
elif way == "fabric":
    from lightning.fabric import Fabric

    Fabric(accelerator="cpu", devices=HERE, num_nodes=NODES, strategy="ddp").launch()
elif way == "lightning":
    import lightning

    off = dict.fromkeys(
        ("logger", "enable_progress_bar", "enable_checkpointing", "enable_model_summary"), False
    )
    trainer = lightning.Trainer(
        accelerator="cpu", devices=HERE, num_nodes=NODES, strategy="ddp", **off
    )
    trainer.strategy.setup_environment()
elif way == "ezpz":
    from ezpz.distributed import setup_torch

    setup_torch()
else:
    dist.init_process_group("gloo")
dist.all_reduce(torch.ones(1))
sys.stdout.write(json.dumps({"rank": dist.get_rank(), "at": time.monotonic()}) + "\n")
sys.stdout.flush()
dist.destroy_process_group()
