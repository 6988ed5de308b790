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

# Of what is random in the samples of a fingerprint, which a later run compares with its own.
_SEED = 0


class MicroBatch(NamedTuple):
    """One rank's part of a micro-batch, on its way from its indices to a batch.

    Attributes:
        samples: first their indices, of which one of another rank's stands in where this rank has
            none; then a list of them, and once collated a batch. None where a resume skips them.
        own: how many count, all or none; total: the same over all ranks, but of a sharded stream of
            this rank.
        source: of what is random in reading them by indices: the seed, the epoch, the place in its
            order and the rank.
        weight: of the batch; a text that says what was found where that is no number.
        look: how some samples are to be read for the fingerprint, whichever this rank's are.
        fingerprint: of them, or of the first samples of a stream; None where there is none to be
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
        rank, world_size: this rank's.
        batch_size: samples per rank.
        seed: of all that is random in reading.
        gradient_accumulation_steps: micro-batches per step.
        drop_last: leave out steps that are not full on every rank.
        sharded: each rank has a stream of its own, which may be longer or shorter than the others'.
        equal: all ranks' parts of a micro-batch have equally many samples, stand-ins included. An
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
        """Return how many samples of all ranks each of the micro-batches gets that these make."""
        rest = samples % self.world_size
        if not self.equal or rest in (0, samples):
            return [samples]
        return [samples - rest, rest]


def check_agreement(world: World, values: Mapping[str, Any]) -> None:
    """All ranks were given the same, or a ConfigError; a collective. Else one would wait in another
    for ever.
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
    """Samples of a data set; None where it does not tell, as iterable ones need not.

    Raises:
        ConfigError: it is a DataLoader, or of no kind that torch has.
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
        self._assignment = assignment

    def begin(self, order: Tensor, epoch: int, start: int, look: Look = Look.NONE) -> None:
        """The next iteration is of this order, int64 of shape (samples,), from the sample ``start``
        on; with its first micro-batch some samples are looked at.
        """
        self._order = order.numpy()  # of which a slice costs a tenth
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
    """A data set with indices, read micro-batch by micro-batch; ``rows``: of tensors, by one
    indexing of each.
    """

    def __init__(self, data: Dataset[Any], *, rows: bool = False) -> None:
        self._data = data
        self._rows = rows
        self._read_many = getattr(data, "__getitems__", None)
        self._set_epoch: Callable[[int], object] | None = getattr(data, "set_epoch", None)
        self._epoch: int | None = None

    def begin(self, epoch: int) -> None:
        """Tell the data set of another epoch; each worker has a copy of it, which is told with its
        first samples.
        """
        if self._set_epoch and epoch != self._epoch:
            self._set_epoch(epoch)
        self._epoch = epoch

    def __getitems__(self, part: MicroBatch) -> MicroBatch:
        """Called by the loader instead of ``__getitem__``, with what the sampler gave."""
        self.begin(part.source[1])
        if part.look:
            part = part._replace(fingerprint=self._look_at_some(part.look))
        if get_worker_info():
            rng.seed(hashed(part.source))
        return MicroBatch(self._read(part.samples), *part[1:])

    def _look_at_some(self, look: Look) -> Fingerprint | None:
        """Here, as a worker has its own files open; and before its random numbers are those of its
        samples.
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
