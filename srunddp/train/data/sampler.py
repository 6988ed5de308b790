"""How the samples of an epoch are dealt to the ranks, micro-batch by micro-batch.

The order of an epoch is the same on all ranks. Each micro-batch takes its next ``world_size *
batch_size`` samples, and each rank every ``world_size``-th of these. So what was seen after any
step is a beginning of the order, and another number of ranks can go on from there.
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

# For what is random in the samples of a fingerprint. The same in all runs, as a later run compares
# its own with the one in the checkpoint, whatever seed it has.
_SEED = 0


class MicroBatch(NamedTuple):
    """One rank's part of a micro-batch, on its way from its indices to a batch.

    Attributes:
        samples: First their indices, then a list of the samples, and once collated a batch. Where
            this rank has none, one of another rank's stands in. None where a resume skips them.
        own: How many of ``samples`` count: all, or 0 where another rank's stand in.
        total: How many count over all ranks; of a sharded stream those of this rank.
        source: What seeds the random numbers by which samples with indices are read: the seed, the
            epoch, the place in its order and the rank.
        weight: Of the batch. A text where the user's function gave no number: what was found.
        look: How some samples of the data set, the same on all ranks, are to be read for the
            fingerprint.
        fingerprint: Of these, or of the first samples of a stream; None where there is none to be
            compared.
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
    """Who gets what of each micro-batch, and how many make a step.

    Attributes:
        rank: This rank's number.
        world_size: How many ranks there are.
        batch_size: Samples per rank and micro-batch.
        seed: Of all that is random in reading.
        gradient_accumulation_steps: Micro-batches per step.
        drop_last: Leave out steps that are not full on every rank.
        sharded: Each rank has a stream of its own, which may be longer or shorter than the others'.
        equal: All ranks' parts of a micro-batch have equally many samples, stand-ins included. An
            epoch's last samples, fewer than ranks, then make a micro-batch of their own.
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
        """Samples of all ranks in a full micro-batch."""
        return self.world_size * self.batch_size

    def split(self, samples: int) -> list[int]:
        """Return how many samples of all ranks each of the micro-batches gets that these make.

        Args:
            samples: Of all ranks, at most those of a full micro-batch.
        """
        rest = samples % self.world_size
        if not self.equal or rest in (0, samples):
            return [samples]
        return [samples - rest, rest]


def check_agreement(world: World, values: Mapping[str, Any]) -> None:
    """See that all ranks were given the same; a collective.

    Ranks that differ would meet in different collectives later, and wait for each other for ever.

    Args:
        world: All of its ranks call this.
        values: By the names that a message gives them; as many on all ranks.

    Raises:
        ConfigError: Ranks differ.
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
    """Return the number of samples of a data set; None where it does not tell.

    Args:
        data: The user's.

    Raises:
        ConfigError: It is a DataLoader, or has neither a length nor is iterable.
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
    except (TypeError, NotImplementedError):  # a ChainDataset has a __len__, whatever it is made of
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
        """Have no order yet.

        Args:
            assignment: Who gets what of each micro-batch.
        """
        self._assignment = assignment

    def begin(self, order: Tensor, epoch: int, start: int, look: Look = Look.NONE) -> None:
        """Have the next iteration be of this order.

        Args:
            order: Indices of the epoch's samples, int64 of shape (samples,), on the CPU.
            epoch: Its number.
            start: So many samples of all ranks were given out before.
            look: How some samples are looked at with the first micro-batch.
        """
        # A slice of a numpy array costs a tenth of a tensor's, and there is one for each
        # micro-batch.
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
        """Read nothing yet.

        Args:
            data: The user's.
            rows: It is a TensorDataset, of which a micro-batch is one indexing of each tensor.
        """
        self._data = data
        self._rows = rows
        self._read_many = getattr(data, "__getitems__", None)
        self._set_epoch: Callable[[int], object] | None = getattr(data, "set_epoch", None)
        self._epoch: int | None = None

    def begin(self, epoch: int) -> None:
        """Tell the data set of another epoch.

        Each worker has a copy of it, which is told with its first samples.

        Args:
            epoch: Passed to the data set's ``set_epoch``, if it has one.
        """
        if self._set_epoch and epoch != self._epoch:
            self._set_epoch(epoch)
        self._epoch = epoch

    def __getitems__(self, part: MicroBatch) -> MicroBatch:
        """Read a micro-batch.

        The DataLoader calls this instead of ``__getitem__``, with what the sampler gave.

        Args:
            part: With indices for its samples.

        Returns:
            The same with samples.
        """
        self.begin(part.source[1])
        if part.look:
            part = part._replace(fingerprint=self._look_at_some(part.look))
        # In a worker what is drawn depends on the place in the epoch alone, not on which worker
        # reads it. The rank itself has its own random numbers, which a checkpoint brings back.
        if get_worker_info():
            rng.seed(hashed(part.source))
        return MicroBatch(self._read(part.samples), *part[1:])

    def _look_at_some(self, look: Look) -> Fingerprint | None:
        """Return the fingerprint of samples that are the same ones on all ranks.

        In the worker, as a data set may open its files where it is read: opened in the rank and
        then forked, several workers would share one file position.
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
