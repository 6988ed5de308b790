"""Streams that split themselves, and loaders with indices.

Wall-clock time of an epoch whose samples each take 20 ms of waiting, as from a slow disk, and no
CPU. The first way is a stream that splits itself by rank and worker, read by
``DistributedDataLoader(sharded=True)``. The others are the same samples with indices, read by that
loader and by torch's with a DistributedSampler; and a stream that all ranks read whole, which more
ranks and workers make no faster. Each repeat starts the ranks anew; the first epoch, in which the
loader's workers start, does not count.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import (
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    get_worker_info,
)

from srunddp.train import DistributedDataLoader
from tests.benchmarks.benchmark import Case, Limit, Sample
from tests.train.local_world import LocalWorld, run_ranks

# an epoch's for each process that reads, and each sample's
SAMPLES = 32
SECONDS = 0.020
WORLDS = ((1, 0), (2, 2))  # ranks, and workers of each


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


def with_torch(count: int, world: LocalWorld, options: dict[str, Any]) -> DataLoader[Any]:
    data = Indexed(count)
    sampler: DistributedSampler[Any] = DistributedSampler(data, world.world_size, world.rank)
    return DataLoader(
        data, sampler=sampler, persistent_workers=options["num_workers"] > 0, **options
    )


LOADERS: dict[str, Callable[..., Any]] = {
    "srunddp": lambda count, world, options: DistributedDataLoader(
        Split(count, world), world, sharded=True, **options
    ),
    "srunddp with indices": lambda count, world, options: DistributedDataLoader(
        Indexed(count), world, **options
    ),
    "torch with indices": with_torch,
    "a stream read whole": lambda count, world, options: DistributedDataLoader(
        Whole(count), world, **options
    ),
}


def epoch(world: LocalWorld, way: str, workers: int, count: int) -> float:
    """Its seconds, on one rank."""
    loader = LOADERS[way](
        count, world, {"batch_size": 4, "num_workers": workers, "multiprocessing_context": None}
    )
    for _ in range(2):
        began = time.perf_counter()
        own = torch.tensor(sum(getattr(batch, "samples", len(batch)) for batch in loader))
        torch.distributed.all_reduce(own)
        assert own == count, f"{own} of {count} samples"
    return time.perf_counter() - began


def measure(way: str, ranks: int, workers: int, repeat: int) -> Sample:
    count = SAMPLES * ranks * max(workers, 1)
    with TemporaryDirectory() as folder:
        return {"wall": max(run_ranks(ranks, Path(folder), epoch, way, workers, count))}


def cases(quick: bool) -> Iterator[Case]:
    limits = tuple(
        Limit("wall", way, 1.02) for way in ("srunddp with indices", "torch with indices")
    )
    for ranks, workers in WORLDS[:1] if quick else WORLDS:
        ways = {way: partial(measure, way, ranks, workers) for way in LOADERS}
        yield Case(f"ranks: {ranks}, workers of each: {workers}", ways, 1 if quick else 3, limits)
