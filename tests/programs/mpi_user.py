"""A script that uses MPI itself, beside the process group. With an argument it also calls
srunddp.init() itself.
"""

import json
import sys

from mpi4py import MPI

rank = MPI.COMM_WORLD.Get_rank()
size = MPI.COMM_WORLD.Get_size()
if sys.argv[1:] == ["srunddp"]:
    import srunddp

    with srunddp.init() as world:
        assert (world.rank, world.world_size) == (rank, size)
mpi = [rank, size, MPI.COMM_WORLD.allreduce(rank + 1)]
sys.stdout.write(json.dumps({"rank": rank, "mpi": mpi}) + "\n")
