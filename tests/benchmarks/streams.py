"""The speed of a stream that splits itself by rank and worker over that of the same data with indices, in one run.

A sample takes 20 ms of waiting, as from a slow disk, and costs no CPU. Epochs of both kinds are read in turn by loaders
that keep their workers; the first epoch, in which these start, does not count. Besides, a stream that all ranks read
whole, which more ranks and workers make no faster.

    python -m tests.benchmarks.streams [ROUNDS [SAMPLES]]
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset, get_worker_info

from srunddp.train import DistributedDataLoader
from tests.benchmarks import in_turn, numbers
from tests.train.local_world import LocalWorld, run_ranks

ROUNDS, SAMPLES = 3, 64  # an epoch's samples for each process that reads
SECONDS = 0.020
WORLDS = ((1, 0), (2, 2), (4, 2))  # ranks, and workers of each


def read(index: int) -> Tensor:
    time.sleep(SECONDS)
    return torch.tensor(index)


class Indexed(Dataset[Tensor]):
    """Samples that are asked for one by one."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Tensor:
        return read(index)


class Whole(IterableDataset[Tensor]):
    """The same samples, all in each process."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __iter__(self) -> Iterator[Tensor]:
        return map(read, range(self.count))


class Split(Whole):
    """The same samples, each in one process only."""

    def __init__(self, count: int, world: LocalWorld) -> None:
        super().__init__(count)
        self.world = world

    def __iter__(self) -> Iterator[Tensor]:
        info = get_worker_info()
        worker, workers = (info.id, info.num_workers) if info else (0, 1)
        first = self.world.rank * workers + worker
        return map(read, range(first, self.count, self.world.world_size * workers))


def epoch(loader: DistributedDataLoader, count: int, world: LocalWorld) -> None:
    own = torch.tensor(sum(batch.samples for batch in loader))
    if world.world_size > 1:
        torch.distributed.all_reduce(own)
    assert own == count, f"{own} of {count} samples"


def measure(world: LocalWorld, workers: int, count: int, rounds: int) -> dict[str, float]:
    """The shortest time of an epoch of each kind."""
    options: Any = {"batch_size": 4, "num_workers": workers, "multiprocessing_context": "fork"}
    kinds = {
        "indices": DistributedDataLoader(Indexed(count), world, **options),
        "sharded": DistributedDataLoader(Split(count, world), world, sharded=True, **options),
        "whole": DistributedDataLoader(Whole(count), world, **options),
    }
    loops = {name: partial(epoch, loader, count, world) for name, loader in kinds.items()}
    times = in_turn(loops, rounds + 1, time.perf_counter)
    return {name: min(seconds[1:]) for name, seconds in times.items()}


def main() -> None:
    rounds, samples = numbers(ROUNDS, SAMPLES)
    for ranks, workers in WORLDS:
        count = samples * ranks * max(workers, 1)
        with tempfile.TemporaryDirectory() as folder:
            found = run_ranks(ranks, Path(folder), measure, workers, count, rounds)
        times = {name: max(each[name] for each in found) for name in found[0]}
        speeds = ", ".join(f"{name} {count / seconds:.0f}" for name, seconds in times.items())
        ratios = ", ".join(f"{name} {times['indices'] / times[name]:.3f}" for name in ("sharded", "whole"))
        print(f"{ranks} ranks with {workers} workers: samples/s {speeds}; over indices: {ratios}", flush=True)


if __name__ == "__main__":
    main()
