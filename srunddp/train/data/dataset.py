"""The user's data sets as the loader's workers read them: the samples of a request, or a stream's."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import Dataset, IterableDataset, TensorDataset, get_worker_info
from torch.utils.data._utils import worker as _worker

from srunddp.train import rng
from srunddp.train.data.sampler import BatchRequest, MicroBatch, ShardAssignment
from srunddp.train.rng import IsolatedRng


class Reader(Dataset[Any]):
    """A data set with indices, read request by request."""

    def __init__(self, data: Dataset[Any]) -> None:
        self._data = data
        self._read_many = getattr(data, "__getitems__", None)

    def __getitems__(self, request: BatchRequest) -> MicroBatch:
        """Called by the loader instead of ``__getitem__``, with what the sampler gave."""
        if get_worker_info():
            rng.seed(request.seed)
        if self._read_many:
            samples = self._read_many(request.indices)
        else:
            samples = [self._data[index] for index in request.indices]
        return MicroBatch(samples, request.own, request.total)


class TensorRows(Dataset[Any]):
    """A data set of tensors in memory: a batch is one indexing of each, and needs no collating."""

    def __init__(self, data: TensorDataset) -> None:
        self._tensors = data.tensors

    def __getitems__(self, request: BatchRequest) -> MicroBatch:
        """As :meth:`Reader.__getitems__`, but with the batch for samples."""
        rows = torch.tensor(request.indices)
        return MicroBatch([tensor[rows] for tensor in self._tensors], request.own, request.total)


class ShardedIterable(IterableDataset[Any]):
    """An iterable data set, dealt as :mod:`srunddp.train.data.sampler` says: each worker reads all, and keeps its part.

    Workers take micro-batches in turn. All ranks must see the same samples in the same order; where the data set has a
    ``set_epoch``, it is called first. What it draws at random is the same for all ranks and workers, and again after a
    resume; it sees no ``get_worker_info()``.
    """

    def __init__(self, data: IterableDataset[Any], assignment: ShardAssignment) -> None:
        self._data = data
        self._assignment = assignment
        self._turn, self._turns = 0, 1
        # Shared with the workers, which may outlive an epoch.
        self._place = torch.zeros(2, dtype=torch.int64).share_memory_()  # type: ignore[no-untyped-call]

    def begin(self, epoch: int, start: int) -> None:
        """The next iteration is of this epoch, from the sample ``start`` on."""
        self._place.copy_(torch.tensor([epoch, start]))

    def __iter__(self) -> Iterator[MicroBatch]:
        epoch, start = self._place.tolist()
        if set_epoch := getattr(self._data, "set_epoch", None):
            set_epoch(epoch)
        if worker := get_worker_info():
            self._turn, self._turns = worker.id, worker.num_workers
            # A data set that shards itself among workers would be sharded twice, and samples lost.
            _worker._worker_info = None
        isolated = IsolatedRng(self._assignment.epoch_seed(epoch))
        parts = self._parts(start)
        for number in itertools.count():
            with isolated:
                part = next(parts, None)
            if part is None:
                return
            if number % self._turns == self._turn:
                yield part

    def _parts(self, start: int) -> Iterator[MicroBatch]:
        assignment, kept, first, count = self._assignment, [], None, 0
        for index, sample in enumerate(self._data):
            if index < start:
                continue
            first = sample if count == 0 else first
            if count % assignment.world_size == assignment.rank:
                kept.append(sample)
            count += 1
            if count == assignment.global_batch_size:
                yield MicroBatch(kept, len(kept), count)
                kept, count = [], 0
        if count:
            yield MicroBatch(kept or [first], len(kept), count)
