"""Deals the samples of an epoch to the ranks, micro-batch by micro-batch.

The order of an epoch is the same on all ranks. Each micro-batch takes the next ``world_size *
batch_size`` samples of it, and each rank every ``world_size``-th of these. So after any step, the
samples seen are the first part of the order, and another number of ranks can continue from there.
"""

from collections.abc import Callable, Iterator, Mapping, Sized
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    Sampler,
    TensorDataset,
    get_worker_info,
)

from srunddp.errors import ConfigError, Scope
from srunddp.train import rng
from srunddp.train.data.fingerprint import Fingerprint, Look, hashed, look_at, some_indices
from srunddp.train.world import World, all_gather_ints

# The seed for random numbers in the samples of a fingerprint. It is the same in all runs, because a
# later run, whatever its seed, compares its fingerprint with that in the checkpoint.
_SEED = 0


class MicroBatch(NamedTuple):
    """One rank's part of a micro-batch, on its way from its indices to a batch.

    Attributes:
        samples: First the indices, then a list of the samples, and after collate a batch. If this
            rank has no samples, one of another rank stands in. None if a resume skips them.
        own: How many of ``samples`` count: all, or 0 for a stand-in.
        total: How many samples count over all ranks; for a sharded stream, on this rank.
        source: The seed of the random numbers with which samples with indices are read: the
            configured seed, the epoch, the position in its order and the rank.
        weight: The weight of the batch; a text that says what was found if the user's function did
            not return a number.
        look: How some samples of the data set, the same on all ranks, are read for the fingerprint.
        fingerprint: The fingerprint of these, or of the first samples of a stream; None if there is
            none to compare.
    """

    samples: Any
    own: int
    total: int
    source: tuple[int, ...] = ()
    weight: float | str = 0.0
    look: Look = Look.NONE
    fingerprint: Fingerprint | None = None


@dataclass(frozen=True)
class ShardAssignment:
    """How each micro-batch is split between the ranks, and how many make a step.

    Attributes:
        rank: This rank's number.
        world_size: How many ranks there are.
        batch_size: Samples per rank and micro-batch.
        seed: The seed of all random numbers in reading.
        gradient_accumulation_steps: Micro-batches per step.
        drop_last: Leave out steps that are not full on every rank.
        sharded: Whether each rank has its own stream, which may be longer or shorter than others.
        equal: Whether all ranks get equally many samples of each micro-batch, including stand-ins.
            If an epoch's last samples are fewer than the ranks, they then make a separate
            micro-batch.
    """

    rank: int
    world_size: int
    batch_size: int
    seed: int
    gradient_accumulation_steps: int = 1
    drop_last: bool = False
    sharded: bool = False
    equal: bool = False

    @property
    def global_batch_size(self) -> int:
        """The samples of all ranks in a full micro-batch."""
        return self.world_size * self.batch_size

    def split(self, samples: int) -> list[int]:
        """Return the sizes, over all ranks, of the micro-batches that are made from some samples.

        Args:
            samples: The number of samples of all ranks, at most those of a full micro-batch.
        """
        rest = samples % self.world_size
        if not self.equal or rest in (0, samples):
            return [samples]
        return [samples - rest, rest]


def check_agreement(world: World, values: Mapping[str, Any]) -> None:
    """Check that all ranks were given the same values; a collective.

    Ranks that differ would later call different collectives, and wait for each other forever.

    Args:
        world: The ranks, all of which call this.
        values: The values, by their names in messages; equally many on all ranks.

    Raises:
        ConfigError: A value differs between ranks.
    """
    numbers = [value if isinstance(value, int) else hashed(value) for value in values.values()]
    for name, *row in zip(values, *all_gather_ints(world, numbers), strict=True):
        if len(set(row)) > 1:
            if isinstance(values[name], int):
                shown = f": {row}, by rank (-1: none)"
            else:
                shown = ""
            raise ConfigError(
                f"{name} differs between ranks{shown}",
                expected="the same on all",
                hint=(
                    "give every rank the whole data sets and the same settings: each gets its part"
                    " of them"
                ),
                scope=Scope.JOB,
            )


def length_of(data: Dataset[Any]) -> int | None:
    """Return the number of samples of a data set; None if it has no length.

    Args:
        data: The user's data set.

    Raises:
        ConfigError: It is a DataLoader, or it has no length and is not iterable.
    """
    if isinstance(data, DataLoader):
        size = data.batch_size
        raise ConfigError(
            "a DataLoader as data",
            expected="its data set, of which all ranks make batches together",
            hint=(
                f"pass loader.dataset, with batch_size={size}, collate=loader.collate_fn, and"
                " order= for a sampler"
            ),
            scope=Scope.JOB,
        )
    try:
        return len(cast(Sized, data))
    except (TypeError, NotImplementedError):  # a ChainDataset always has a __len__
        if isinstance(data, IterableDataset):
            return None
    raise ConfigError(
        f"a data set of {type(data).__name__} without a length",
        expected="__len__ and __getitem__, or an IterableDataset",
        hint="use one of torch.utils.data's kinds",
        scope=Scope.JOB,
    )


class DistributedBatchSampler(Sampler[MicroBatch]):
    """A sampler of micro-batches; iterate again for each epoch, after :meth:`begin`."""

    def __init__(self, assignment: ShardAssignment) -> None:
        """Create a sampler, which has no order before :meth:`begin`.

        Args:
            assignment: How each micro-batch is split between the ranks.
        """
        self._assignment = assignment

    def begin(self, order: Tensor, epoch: int, start: int, look: Look = Look.NONE) -> None:
        """Set the order of the next iteration.

        Args:
            order: Indices of the epoch's samples, int64 of shape (samples,), on the CPU.
            epoch: The number of the epoch.
            start: How many samples of all ranks were yielded before.
            look: How some samples are read for the fingerprint, with the first micro-batch.
        """
        # Slicing a numpy array takes a tenth of the time of slicing a tensor, and each micro-batch
        # needs one slice.
        self._order = order.numpy()
        self._epoch = epoch
        self._start = start
        self._look = look

    def __iter__(self) -> Iterator[MicroBatch]:
        assignment = self._assignment
        full = assignment.global_batch_size
        start = self._start
        while start < len(self._order):
            for count in assignment.split(min(full, len(self._order) - start)):
                chunk = self._order[start : start + count]
                mine = chunk[assignment.rank :: assignment.world_size].tolist()
                source = (assignment.seed, self._epoch, start, assignment.rank)
                look = self._look if start == self._start else Look.NONE
                yield MicroBatch(mine or chunk[:1].tolist(), len(mine), count, source, look=look)
                start += count


class Reader(Dataset[Any]):
    """A data set with indices, read micro-batch by micro-batch."""

    def __init__(self, data: Dataset[Any], *, rows: bool = False) -> None:
        """Create a reader, which reads nothing yet.

        Args:
            data: The user's data set.
            rows: Whether it is a TensorDataset, of which one indexing operation per tensor reads a
                micro-batch.
        """
        self._data = data
        self._rows = rows
        self._read_many = getattr(data, "__getitems__", None)
        self._set_epoch: Callable[[int], object] | None = getattr(data, "set_epoch", None)
        self._epoch: int | None = None

    def begin(self, epoch: int) -> None:
        """Tell the data set that another epoch begins.

        Each worker has a copy of the data set, which is told with its first samples.

        Args:
            epoch: Passed to the data set's ``set_epoch``, if it has one.
        """
        if self._set_epoch and epoch != self._epoch:
            self._set_epoch(epoch)
        self._epoch = epoch

    def __getitems__(self, part: MicroBatch) -> MicroBatch:
        """Read a micro-batch.

        The DataLoader calls this instead of ``__getitem__``, with an item of the sampler.

        Args:
            part: The micro-batch, with the indices of its samples.

        Returns:
            The same micro-batch with its samples.
        """
        self.begin(part.source[1])
        if part.look:
            part = part._replace(fingerprint=self._look_at_some(part.look))
        # In a worker, random numbers depend only on the position in the epoch, not on which worker
        # reads. The rank itself has its own random numbers, which a checkpoint restores.
        if get_worker_info():
            rng.seed(hashed(part.source))
        return MicroBatch(self._read(part.samples), *part[1:])

    def _look_at_some(self, look: Look) -> Fingerprint | None:
        """Return the fingerprint of some samples, the same ones on all ranks.

        This is done in the worker, because a data set may open its files when it is read: if it
        were opened in the rank and then forked, several workers would share one file position.
        """
        indices = some_indices(len(cast(Sized, self._data)))
        return look_at(lambda: self._read(indices), look, _SEED)

    def _read(self, indices: list[int]) -> Any:
        if self._rows:
            places = torch.tensor(indices)
            return [tensor[places] for tensor in cast(TensorDataset, self._data).tensors]
        if self._read_many:
            return self._read_many(indices)
        return [self._data[index] for index in indices]
