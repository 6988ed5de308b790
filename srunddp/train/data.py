"""Each rank's shard of a data set, and which of its samples count."""

from __future__ import annotations

from collections.abc import Iterator, Sized
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler

from srunddp.train.world import World


@dataclass(frozen=True, kw_only=True)
class LoaderOptions:
    """How batches are read; the names are those of :class:`torch.utils.data.DataLoader`.

    Attributes:
        num_workers: reading processes per rank; 0 reads in the rank itself.
        prefetch_factor: batches each worker reads ahead; None is torch's default.
        persistent_workers: keep the workers from one epoch to the next.
        pin_memory: page-locked batches; None pins them where the device is a GPU.
        multiprocessing_context: how workers start: ``"fork"``, ``"spawn"``, ``"forkserver"``; None is
            Python's default. Where MPI or RDMA is in use in the rank, fork is not safe.
    """

    num_workers: int = 0
    prefetch_factor: int | None = None
    persistent_workers: bool = True
    pin_memory: bool | None = None
    multiprocessing_context: str | None = None


def shard(data: Dataset[Any], world: World) -> range:
    """The indices that are this rank's own: every ``world_size``-th, from ``rank`` on; maybe none."""
    return range(world.rank, len(cast(Sized, data)), world.world_size)


class ShardSampler(Sampler[int]):
    """This rank's own samples in order, for evaluation.

    Unlike :class:`torch.utils.data.DistributedSampler` it adds no padding, so that each sample is read by
    one rank only. Lengths may differ by one between ranks: no collective may run inside the loop over it.
    """

    def __init__(self, data: Dataset[Any], world: World) -> None:
        self._indices = shard(data, world)

    def __iter__(self) -> Iterator[int]:
        return iter(self._indices)

    def __len__(self) -> int:
        return len(self._indices)


def make_loader(
    data: Dataset[Any],
    sampler: Sampler[Any],
    batch_size: int,
    device: torch.device,
    options: LoaderOptions | None = None,
) -> DataLoader[Any]:
    """A loader of ``batch_size`` samples per rank and step; the last batch may be smaller."""
    options = options or LoaderOptions()
    pin_memory = device.type == "cuda" if options.pin_memory is None else options.pin_memory
    return DataLoader(
        data,
        batch_size=batch_size,
        sampler=sampler,
        num_workers=options.num_workers,
        prefetch_factor=options.prefetch_factor,
        persistent_workers=options.persistent_workers and options.num_workers > 0,
        pin_memory=pin_memory,
        multiprocessing_context=options.multiprocessing_context,
    )


def batches(loader: DataLoader[Any], world: World) -> Iterator[tuple[Tensor, Tensor, int]]:
    """Inputs and targets on the device, and how many of them count, from the front.

    DistributedSampler fills shorter shards up with samples that other ranks have too. It does so at a
    shard's end, whatever the order of the epoch, so the shard's own length tells them apart.
    """
    left = len(shard(loader.dataset, world))
    for batch in loader:
        inputs, targets = _pair(batch)
        own = min(len(targets), left)
        left -= own
        yield (
            inputs.to(world.device, non_blocking=True),
            targets.to(world.device, non_blocking=True),
            own,
        )


def _pair(batch: Any) -> tuple[Tensor, Tensor]:
    match batch:
        case [Tensor() as inputs, Tensor() as targets]:
            return inputs, targets
    parts = batch if isinstance(batch, list | tuple) else [batch]
    raise ValueError(
        f"a batch of {[type(part).__name__ for part in parts]}; expected two tensors, inputs and targets -> "
        "let the data set's __getitem__ return such a pair"
    )
