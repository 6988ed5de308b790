"""Deals the samples of an epoch to the ranks, micro-batch by micro-batch.

The order of an epoch is the same on all ranks. A micro-batch has the next ``world_size *
batch_size`` samples of the order, of which each rank gets every ``world_size``-th. So after any
step, the samples seen are the first part of the order, and a run with another number of ranks can
continue with the rest.
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

# The seed of the random numbers with which samples are read for a fingerprint. It does not depend
# on the configured seed, because a later run, whatever its seed, compares its fingerprint with that
# in the checkpoint.
_SEED = 0


class MicroBatch(NamedTuple):
    """One rank's part of a micro-batch, from the indices of its samples to the collated batch.

    Attributes:
        samples: First the indices of the samples, then a list of the samples, and after collate a
            batch. If this rank has no samples, a sample of another rank stands in. None if a resume
            skips the micro-batch.
        own: How many of ``samples`` count: all, or 0 for a stand-in.
        total: How many samples of the micro-batch count over all ranks; for a sharded stream, on
            this rank.
        source: The seed of the random numbers with which samples with indices are read: the
            configured seed, the epoch, the position in its order and the rank.
        weight: The weight of the batch; a text that says what was found if the user's function did
            not return a number.
        look: Whether and how some samples of the data set, the same on all ranks, are read for the
            fingerprint together with this micro-batch.
        fingerprint: The fingerprint of the samples that were read for it, or of the first samples
            of a stream; None if there is no fingerprint to compare.
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
            Then the samples by which an epoch's last micro-batch is no multiple of ``world_size``
            make a separate micro-batch.
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
        """Return the sizes, over all ranks, of the one or two micro-batches into which samples are
        split.

        Args:
            samples: The number of samples of all ranks, at most ``global_batch_size``.
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
        ConfigError: ``data`` is a DataLoader, or has no length and is not iterable.
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
    """Yields the indices of this rank's micro-batches; call :meth:`begin` before each iteration."""

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
            start: How many samples of the order, over all ranks, are left out at its beginning,
                because they were yielded before a resume.
            look: How some samples are read for the fingerprint, together with the first
                micro-batch.
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
    """Reads a data set with indices micro-batch by micro-batch."""

    def __init__(self, data: Dataset[Any], *, rows: bool = False) -> None:
        """Create a reader, which reads nothing yet.

        Args:
            data: The user's data set.
            rows: Whether the data set is a TensorDataset, of which one indexing operation per
                tensor reads a micro-batch.
        """
        self._data = data
        self._rows = rows
        self._read_many = getattr(data, "__getitems__", None)
        self._set_epoch: Callable[[int], object] | None = getattr(data, "set_epoch", None)
        self._epoch: int | None = None

    def begin(self, epoch: int) -> None:
        """Call ``set_epoch`` of the data set, if it has one, unless the last call set this epoch.

        Each worker has a copy of the data set, and calls this before it reads a micro-batch.

        Args:
            epoch: The number of the epoch.
        """
        if self._set_epoch and epoch != self._epoch:
            self._set_epoch(epoch)
        self._epoch = epoch

    def __getitems__(self, part: MicroBatch) -> MicroBatch:
        """Read the samples of a micro-batch, and the fingerprint if ``part.look`` asks for it.

        The DataLoader calls this instead of ``__getitem__``, with an item of the sampler.

        Args:
            part: The micro-batch, with the indices of its samples.

        Returns:
            The micro-batch with its samples instead of the indices.
        """
        self.begin(part.source[1])
        if part.look:
            part = part._replace(fingerprint=self._look_at_some(part.look))
        # In a worker, seed by the position in the epoch, so that random numbers do not depend on
        # which worker reads. Do not seed in the rank itself, whose random states a checkpoint
        # restores.
        if get_worker_info():
            rng.seed(hashed(part.source))
        return MicroBatch(self._read(part.samples), *part[1:])

    def _look_at_some(self, look: Look) -> Fingerprint | None:
        """Return the fingerprint of some samples, which have the same indices on all ranks.

        Call this in the worker, if there are workers: a data set may open its files when it is
        read. If the rank read it before it forks workers, these would share one file position.
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
