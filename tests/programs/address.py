"""Print when this rank knows its place and rank 0's address, by the clock of the machine; without
torch.

The word says from where: ``env`` (under srunddp), ``idr_torch``, or ``mpi4py`` (a broadcast).
"""

import json
import os
import socket
import sys
import time

known: tuple[object, ...]
match sys.argv[1]:
    case "idr_torch":
        import idr_torch

        known = idr_torch.rank, idr_torch.world_size, idr_torch.master_addr, idr_torch.master_port
    case "mpi4py":
        from mpi4py import MPI

        with socket.socket() as free:
            free.bind(("", 0))
            address = MPI.COMM_WORLD.bcast((socket.gethostname(), free.getsockname()[1]))
        known = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size, *address
    case _:
        known = tuple(
            os.environ[name] for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
        )
print(json.dumps({"at": time.monotonic(), "known": known}), flush=True)
