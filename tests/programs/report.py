"""Print what this rank is told, without importing torch."""

import json
import os
import socket
import sys

report = {
    "rank": int(os.environ["RANK"]),
    "local_rank": int(os.environ["LOCAL_RANK"]),
    "world_size": int(os.environ["WORLD_SIZE"]),
    "local_world_size": int(os.environ["LOCAL_WORLD_SIZE"]),
    "node_rank": int(os.environ["NODE_RANK"]),
    "master": os.environ["MASTER_ADDR"] + " " + os.environ["MASTER_PORT"],
    "run": os.environ["TORCHELASTIC_RUN_ID"],
    "gloo": os.environ["GLOO_SOCKET_IFNAME"],
    "nccl": os.environ["NCCL_SOCKET_IFNAME"],
    "node": os.environ.get("SLURMD_NODENAME", socket.gethostname()),
    "python": sys.executable,
    "arguments": sys.argv[1:],
    "reserved": os.environ.get("SLURM_STEP_RESV_PORTS", ""),
    "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS"),
} | {name: value for name, value in os.environ.items() if name.startswith(("HF_", "TRANSFORMERS_"))}
sys.stdout.write(json.dumps(report) + "\n")
