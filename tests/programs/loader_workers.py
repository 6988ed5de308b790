"""Load data with worker processes of each start method, from a rank that met the others over
MPI.
"""

import json
import os
import sys

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset

from srunddp.train.data.workers import start_method


class Numbers(Dataset[int]):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> int:
        # A worker that was spawned starts anew, and must not start MPI again.
        assert not (__name__ == "__mp_main__" and "mpi4py.MPI" in sys.modules)
        return index


if __name__ == "__main__":
    assert "mpi4py.MPI" in sys.modules
    dist.init_process_group("gloo")
    sums = {}
    for method in ("fork", "spawn", start_method(None, "gloo")):
        loader = DataLoader(Numbers(), batch_size=2, num_workers=2, multiprocessing_context=method)
        sums[method] = int(sum(torch.sum(batch) for batch in loader))
    dist.barrier()
    dist.destroy_process_group()
    sys.stdout.write(json.dumps({"rank": int(os.environ["RANK"]), "sums": sums}) + "\n")
