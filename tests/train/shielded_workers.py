"""Reads with two workers while every process below this one is sent the signals of a step; one
worker then hangs.
"""

from __future__ import annotations

import sys
import time
from typing import Any

from torch.utils.data import DataLoader, Dataset

from srunddp.train import Preemption
from tests.train.local_world import LocalWorld

initialised: list[int] = []  # in a worker


def initialise(worker: int) -> None:
    initialised.append(worker)


class Numbers(Dataset[int]):
    def __len__(self) -> int:
        return 1000

    def __getitem__(self, index: int) -> int:
        if index == 54:  # the last that is read ahead, by worker 0
            time.sleep(600)
        assert initialised == [index % 2]
        return index


def main(method: str) -> None:
    loader = DataLoader(
        Numbers(),
        num_workers=2,
        prefetch_factor=2,
        multiprocessing_context=method,
        worker_init_fn=initialise,
    )
    with Preemption(LocalWorld(), environ={}) as preemption:
        batches: Any = preemption.iterate(loader)
        next(batches)
        print("reading", flush=True)
        sys.stdin.readline()
        for _ in range(50):
            next(batches)
        # As torch and multiprocessing do with one that does not end by itself.
        worker = batches._workers[0]
        worker.terminate()
        worker.join(20)
        print("read on; the worker that hung ended with", worker.exitcode, flush=True)
        sys.stdin.readline()


if __name__ == "__main__":
    main(sys.argv[1])
