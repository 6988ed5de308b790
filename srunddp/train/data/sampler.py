"""How the samples of an epoch are dealt to the ranks, micro-batch by micro-batch.

The order of an epoch is the same on all ranks. Each micro-batch takes its next ``world_size * batch_size`` samples, and
each rank every ``world_size``-th of these. So what was seen after any step is a beginning of the order, and another
number of ranks can go on from there.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sized
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler, TensorDataset, get_worker_info

from srunddp.errors import ConfigError, Scope
from srunddp.train import rng
from srunddp.train.world import World


class BatchRequest(NamedTuple):
    """One rank's part of a micro-batch, as the loader's workers are asked for it.

    Attributes:
        indices: of the samples, never none: where none is this rank's, one of another rank's stands in.
        own: how many count, all or none; total: the same over all ranks.
        source: of what is random in reading them: the seed, the epoch, the place in its order and the rank.
    """

    indices: list[int]
    own: int
    total: int
    source: tuple[int, int, int, int]

    @property
    def epoch(self) -> int:
        """That in which it is read."""
        return self.source[1]

    @property
    def seed(self) -> int:
        """For reading it; made where it is needed, which is in the workers."""
        return hashed(self.source)


def hashed(value: object) -> int:
    """The same on every rank, and within int64: of what is written, or of bytes."""
    data = value if isinstance(value, bytes) else repr(value).encode()
    return int.from_bytes(hashlib.blake2b(data, digest_size=7).digest(), "big")


def check_agreement(world: World, values: Mapping[str, Any]) -> None:
    """All ranks were given the same; a collective. Else one would wait in another that the others never enter.

    Raises:
        ConfigError: they were not.
    """
    if world.world_size == 1:
        return
    numbers = [value if isinstance(value, int) else hashed(value) for value in values.values()]
    own = torch.tensor(numbers, device=world.device)
    by_rank = [torch.empty_like(own) for _ in range(world.world_size)]
    dist.all_gather(by_rank, own)
    for name, *row in zip(values, *(each.tolist() for each in by_rank), strict=True):
        if len(set(row)) > 1:
            shown = f": {row}, by rank (-1: none)" if isinstance(values[name], int) else ""
            raise ConfigError(
                f"{name} differs between ranks{shown}",
                expected="the same on all",
                hint="give every rank the whole data sets and the same settings: each gets its part of them",
                scope=Scope.JOB,
            )


class MicroBatch(NamedTuple):
    """What came of a request.

    Attributes:
        samples: a list of them, or once collated a batch; None where a resume passes over them.
        own, total: as in the request; of a sharded stream both are of this rank.
        weight: of the batch; a text that says what was found where that is no number.
        digest: of the first sample of a stream; 0 in all micro-batches but the first.
    """

    samples: Any
    own: int
    total: int
    weight: float | str = 0.0
    digest: int = 0


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


def length_of(data: Dataset[Any]) -> int | None:
    """Samples of a data set; None where it does not tell, as iterable ones need not.

    Raises:
        ConfigError: it is a DataLoader, or of no kind that torch has.
    """
    if isinstance(data, DataLoader):
        size = data.batch_size
        raise ConfigError(
            "a DataLoader as data",
            expected="its data set, of which all ranks make batches together",
            hint=f"pass loader.dataset, with batch_size={size}, collate=loader.collate_fn, and order= for a sampler",
            scope=Scope.JOB,
        )
    try:
        return len(cast(Sized, data))
    except (TypeError, NotImplementedError):  # a ChainDataset has a __len__, whatever it is made of
        if isinstance(data, IterableDataset):
            return None
    raise ConfigError(
        f"a data set of {type(data).__name__} without a length",
        expected="__len__ and __getitem__, or an IterableDataset",
        hint="use one of torch.utils.data's kinds",
        scope=Scope.JOB,
    )


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
        self._set_epoch: Callable[[int], object] | None = getattr(data, "set_epoch", None)
        self._epoch: int | None = None

    def begin(self, epoch: int) -> None:
        """Tell the data set of another epoch; each worker has a copy of it, which is told with the first request."""
        if self._set_epoch and epoch != self._epoch:
            self._set_epoch(epoch)
        self._epoch = epoch

    def __getitems__(self, request: BatchRequest) -> MicroBatch:
        """Called by the loader instead of ``__getitem__``, with what the sampler gave."""
        self.begin(request.epoch)
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

    def begin(self, epoch: int) -> None:
        """Nothing: tensors are the same in each epoch."""

    def __getitems__(self, request: BatchRequest) -> MicroBatch:
        """As :meth:`Reader.__getitems__`, but with the batch for samples."""
        rows = torch.tensor(request.indices)
        return MicroBatch([tensor[rows] for tensor in self._tensors], request.own, request.total)
