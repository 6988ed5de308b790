"""How the samples of an epoch are dealt to the ranks, micro-batch by micro-batch.

The order of an epoch is the same on all ranks. Each micro-batch takes its next ``world_size * batch_size`` samples, and
each rank every ``world_size``-th of these. So what was seen after any step is a beginning of the order, and another
number of ranks can go on from there.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterator, Sized
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset, Sampler, TensorDataset, get_worker_info
from torch.utils.data._utils import worker as _worker

from srunddp.train import rng
from srunddp.train.rng import IsolatedRng


class BatchRequest(NamedTuple):
    """One rank's part of a micro-batch, as the loader's workers are asked for it.

    Attributes:
        indices: of the samples, never none: where none is this rank's, one of another rank's stands in.
        own: how many count, all or none; total: the same over all ranks.
        source: of what is random in reading them.
    """

    indices: list[int]
    own: int
    total: int
    source: tuple[int, ...]

    @property
    def seed(self) -> int:
        """For reading it; made where it is needed, which is in the workers."""
        return hashed(self.source)


def hashed(value: object) -> int:
    """The same on every rank, and within int64: of what is written, or of bytes."""
    data = value if isinstance(value, bytes) else repr(value).encode()
    return int.from_bytes(hashlib.blake2b(data, digest_size=7).digest(), "big")


class MicroBatch(NamedTuple):
    """What came of a request: the samples, or a batch of them."""

    samples: Any
    own: int
    total: int


@dataclass(frozen=True)
class ShardAssignment:
    """Who gets what of each micro-batch.

    Attributes:
        rank, world_size: this rank's.
        batch_size: samples per rank.
        seed: of all that is random in reading.
    """

    rank: int
    world_size: int
    batch_size: int
    seed: int

    @property
    def global_batch_size(self) -> int:
        """Samples of all ranks in a full micro-batch."""
        return self.world_size * self.batch_size

    def epoch_seed(self, epoch: int) -> int:
        """The same on all ranks, for an epoch."""
        return hashed((self.seed, epoch))


def length_of(data: Dataset[Any]) -> int | None:
    """Samples of a data set; None where it does not tell, as iterable ones need not."""
    try:
        return len(cast(Sized, data))
    except (TypeError, NotImplementedError):  # a ChainDataset has a __len__, whatever it is made of
        return None


class DistributedBatchSampler(Sampler[BatchRequest]):
    """A sampler of micro-batches; iterate again for each epoch, after :meth:`begin`."""

    def __init__(self, assignment: ShardAssignment) -> None:
        self._assignment = assignment
        self._order: Tensor | None = None
        self._epoch = self._start = 0

    def begin(self, order: Tensor, epoch: int, start: int) -> None:
        """The next iteration is of this order, int64 of shape (samples,), from the sample ``start`` on."""
        self._order, self._epoch, self._start = order, epoch, start

    def __iter__(self) -> Iterator[BatchRequest]:
        assignment = self._assignment
        assert self._order is not None
        order = self._order.numpy()  # of which a slice costs a tenth
        for start in range(self._start, len(order), assignment.global_batch_size):
            chunk = order[start : start + assignment.global_batch_size]
            mine = chunk[assignment.rank :: assignment.world_size].tolist()
            source = (assignment.seed, self._epoch, start, assignment.rank)
            yield BatchRequest(mine or chunk[:1].tolist(), len(mine), len(chunk), source)

    def __len__(self) -> int:
        left = 0 if self._order is None else max(0, len(self._order) - self._start)
        return -(-left // self._assignment.global_batch_size)


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
