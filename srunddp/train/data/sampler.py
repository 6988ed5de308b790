"""How the samples of an epoch are dealt to the ranks, micro-batch by micro-batch.

The order of an epoch is the same on all ranks. Each micro-batch takes its next ``world_size * batch_size`` samples, and
each rank every ``world_size``-th of these. So what was seen after any step is a beginning of the order, and another
number of ranks can go on from there.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sized
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

from torch import Tensor
from torch.utils.data import Dataset, Sampler

from srunddp.train.world import World


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
        return _mixed(self.source)


def _mixed(source: tuple[int, ...]) -> int:
    return int.from_bytes(hashlib.blake2b(repr(source).encode(), digest_size=7).digest(), "big")


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

    @classmethod
    def of(cls, world: World, batch_size: int, seed: int) -> ShardAssignment:
        """For this rank of a world."""
        return cls(world.rank, world.world_size, batch_size, seed)

    @property
    def global_batch_size(self) -> int:
        """Samples of all ranks in a full micro-batch."""
        return self.world_size * self.batch_size

    def epoch_seed(self, epoch: int) -> int:
        """The same on all ranks, for an epoch."""
        return _mixed((self.seed, epoch))


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
