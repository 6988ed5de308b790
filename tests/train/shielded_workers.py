"""Reads with two workers while every process below this one is sent the signals of a step; one worker then hangs."""

from __future__ import annotations

import sys
import time
from functools import partial

from torch.utils.data import DataLoader, Dataset

from srunddp.train.config import PreemptionConfig
from srunddp.train.preemption.signals import Preemption, ignore_in_worker, signals_blocked

SIGNALS = ("USR1", "USR2")


class Numbers(Dataset[int]):
    def __len__(self) -> int:
        return 1000

    def __getitem__(self, index: int) -> int:
        if index == 54:  # the last that is read ahead, by worker 0
            time.sleep(600)
        return index


def main(method: str) -> None:
    loader = DataLoader(
        Numbers(),
        num_workers=2,
        prefetch_factor=2,
        multiprocessing_context=method,
        worker_init_fn=partial(ignore_in_worker, signals=SIGNALS),
    )
    with Preemption(PreemptionConfig(signals=SIGNALS), 0, {}):
        with signals_blocked(SIGNALS, method):
            batches = iter(loader)
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
