"""Iterable data sets: those that all ranks read completely, and those that split themselves by rank
and worker.
"""

import itertools
from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.utils.data import IterableDataset, get_worker_info

from srunddp.train import rng
from srunddp.train.data.fingerprint import Look, fingerprint_of, hashed, look_at
from srunddp.train.data.sampler import MicroBatch, ShardAssignment
from srunddp.train.rng import IsolatedRng

# Samples at the start of a stream that identify it: enough that a random change of samples shows in
# at least one of them.
_FIRST = 4


class _Placed(NamedTuple):
    """A micro-batch of this rank, and its position in the epoch.

    Attributes:
        place: The position in samples of all ranks; for a sharded stream in micro-batches of this
            worker.
        part: The micro-batch.
    """

    place: int
    part: MicroBatch


class _Dealt(NamedTuple):
    """The samples that a rank keeps of a micro-batch of all ranks.

    Attributes:
        own: This rank's samples.
        stand_in: A list with the first sample of the micro-batch, which a rank without samples of
            its own runs instead; empty if the stream has ended.
        total: The number of samples of all ranks in the micro-batch.
    """

    own: list[Any]
    stand_in: list[Any]
    total: int


class Stream(IterableDataset[Any]):
    """Reads an iterable data set in micro-batches, after calling its ``set_epoch``, if it has one.

    Unless the data set is ``sharded``, all ranks must see the same samples in the same order. The
    samples are dealt as :mod:`srunddp.train.data.sampler` describes: each worker reads all samples
    and keeps its part. So the data set is told that a single worker reads it, whatever the number
    of workers; otherwise it would be split twice, and samples would be lost.

    A data set that is ``sharded`` gives each worker of each rank its own samples. Each worker makes
    its own micro-batches, and the rank takes these from its workers in turn.

    Random numbers drawn while reading are the same again after a resume. For a data set that all
    ranks read completely, they are the same on all ranks.
    """

    def __init__(self, data: IterableDataset[Any], assignment: ShardAssignment) -> None:
        """Create a stream, which reads nothing yet.

        Args:
            data: The user's data set.
            assignment: How each micro-batch is split between the ranks. With ``drop_last``, a
                worker of a sharded data set leaves out its last micro-batch if it is not full.
        """
        self._data = data
        self._assignment = assignment
        self._sharded = assignment.sharded
        # The number of the loader worker that holds this copy; None in the rank's own process.
        self._worker: int | None = None
        self._workers = 1
        # The arguments of begin(). They are in shared memory, because persistent workers have the
        # copy of this object with which they started, and must learn of later epochs.
        self._start = torch.zeros(3, dtype=torch.int64).share_memory_()  # type: ignore[no-untyped-call]

    def begin(self, epoch: int, start: int, look: Look = Look.NONE) -> None:
        """Set the epoch of the next iteration; samples before ``start`` are read again and dropped.

        Args:
            epoch: Passed to the data set's ``set_epoch``.
            start: The position in samples of all ranks, none of which are yielded again. For a
                sharded data set, in micro-batches of this rank, which may be yielded without
                samples.
            look: How the first samples are read for the fingerprint. With ``REPEATEDLY`` the stream
                begins again for each reading.
        """
        self._start.copy_(torch.tensor([epoch, start, look]))
        # Set the epoch here too, before the workers set it. Hugging Face's datasets keep the epoch
        # in memory that the workers share: several workers that change it at once may leave a wrong
        # number.
        self._set_epoch(epoch)

    def _set_epoch(self, epoch: int) -> None:
        set_epoch = getattr(self._data, "set_epoch", None)
        if set_epoch:
            set_epoch(epoch)

    def __iter__(self) -> Iterator[MicroBatch]:
        """Yield the micro-batches of this worker, or of a rank without workers."""
        epoch, start, look = self._start.tolist()
        self._set_epoch(epoch)
        self._note_worker()
        worker = self._worker or 0
        source = (self._assignment.seed, epoch)
        # If every rank and worker reads the complete stream, all must draw the same random numbers,
        # or they would deal from different orders. Readers of a sharded stream must draw different
        # ones, or they would augment their samples alike.
        reader: tuple[int, ...] = ()
        if self._sharded:
            reader = (self._assignment.rank, worker)
        own_seed = hashed((*source, *reader))
        fingerprint = None
        # Worker 0 yields the rank's first micro-batch, which carries the fingerprint.
        if look == Look.REPEATEDLY and worker == 0:
            first = partial(self._first_samples, self._looked_at(start))
            fingerprint = look_at(first, Look.REPEATEDLY, own_seed, text=True)
        isolated = IsolatedRng(own_seed)
        if self._sharded:
            parts = self._own_parts(start, worker)
        else:
            parts = self._dealt_parts(start, look=look == Look.ONCE and worker == 0)
        for number, placed in enumerate(_read_with(isolated, parts)):
            if not self._sharded and number % self._workers != worker:
                # All workers read this micro-batch, but it is another worker's turn to yield it:
                # the DataLoader takes one item from each worker in turn.
                continue
            if self._worker is not None:
                # Collate runs next in this worker. Random numbers that it draws, as MixUp does,
                # must not depend on the number of workers.
                rng.seed(hashed((*source, placed.place, self._assignment.rank, *reader)))
            if fingerprint:
                yield placed.part._replace(fingerprint=fingerprint)
                fingerprint = None
            else:
                yield placed.part

    def _note_worker(self) -> None:
        """Note the number of this worker. Unless the data set is sharded, show to it a single
        worker, because each worker reads all samples.
        """
        info = get_worker_info()
        # Read ``info`` only once: in its next epoch, a persistent worker would find the numbers
        # that are changed below.
        if self._worker is not None or info is None:
            return
        self._worker = info.id
        self._workers = info.num_workers
        if not self._sharded:
            # A data set that splits itself by get_worker_info() must see a single worker that reads
            # everything. torch's WorkerInfo is frozen, and raises on a plain assignment.
            object.__setattr__(info, "id", 0)
            object.__setattr__(info, "num_workers", 1)

    def _first_samples(self, count: int) -> list[Any]:
        return list(itertools.islice(iter(self._data), count))

    def _looked_at(self, start: int) -> int:
        """Return the number of samples for the fingerprint.

        This is at most a micro-batch of all ranks, or the samples before ``start``. The stream is
        read in these pieces without a fingerprint too; in other pieces, different numbers of
        numpy's generator would be drawn.
        """
        count = min(_FIRST, self._assignment.global_batch_size)
        return min(count, start) if start else count

    def _dealt_parts(self, start: int, *, look: bool) -> Iterator[_Placed]:
        """Read the stream from its beginning, and yield this rank's part of each micro-batch.

        All workers of the rank call this, and each passes only some of the parts on.

        Args:
            start: How many samples of all ranks were seen before a resume; these are dropped.
            look: Whether to set the fingerprint of the first samples in the first part.
        """
        samples = iter(self._data)
        fingerprint = None
        if look:
            head = list(itertools.islice(samples, self._looked_at(start)))
            samples = itertools.chain(head, samples)
            fingerprint = fingerprint_of(head, text=True)
        self._pass_over(samples, start)
        place = start
        while True:
            dealt = self._deal(samples)
            if dealt.total == 0:
                return
            left = dealt.own
            for total in self._assignment.split(dealt.total):
                # The positions rank, rank + world_size, ... before the end.
                own_count = len(range(self._assignment.rank, total, self._assignment.world_size))
                own = left[:own_count]
                left = left[own_count:]
                part = MicroBatch(own or dealt.stand_in, len(own), total, fingerprint=fingerprint)
                yield _Placed(place, part)
                fingerprint = None
                place += total

    def _pass_over(self, samples: Iterator[Any], start: int) -> None:
        """Read the samples that were seen before a resume, and drop them.

        A stream cannot begin in the middle. Reading these samples again also brings the random
        numbers to the state that they had before the resume.
        """
        full = self._assignment.global_batch_size
        for passed in range(0, start, full):
            for _ in itertools.islice(samples, min(full, start - passed)):
                pass
            # numpy makes two normal numbers at a time and keeps one for the next call. The previous
            # run lost the kept number after each micro-batch, at the end of an IsolatedRng. If it
            # were not dropped here too, all later normal numbers would be shifted by one.
            rng.forget_normal()

    def _deal(self, samples: Iterator[Any]) -> _Dealt:
        """Read the next micro-batch of all ranks, and return this rank's part of it.

        The samples of other ranks are dropped at once: to keep them would take ``world_size`` times
        the memory.
        """
        rank = self._assignment.rank
        ranks = self._assignment.world_size
        next_samples = itertools.islice(samples, self._assignment.global_batch_size)
        if ranks == 1:
            every = list(next_samples)
            return _Dealt(every, every[:1], len(every))
        own: list[Any] = []
        stand_in: list[Any] = []
        count = 0
        for sample in next_samples:
            if count == 0:
                stand_in = [sample]
            if count % ranks == rank:
                own.append(sample)
            count += 1
        return _Dealt(own, stand_in, count)

    def _own_parts(self, start: int, worker: int) -> Iterator[_Placed]:
        """Read a sharded stream from its beginning, and yield this worker's micro-batches.

        Args:
            start: How many micro-batches the rank had yielded before a resume. The rank skips as
                many. Micro-batches that it certainly skips are yielded without samples, so that
                they need not be collated.
            worker: The number of this worker.
        """
        samples = iter(self._data)
        size = self._assignment.batch_size
        least = size if self._assignment.drop_last else 1
        # Workers take turns, so at least this many of the rank's first ``start`` micro-batches are
        # from this worker. There are more if another worker has reached the end of its samples.
        passed = len(range(worker, start, self._workers))
        for number in itertools.count():
            own = list(itertools.islice(samples, size))
            if len(own) < least:
                return
            kept = None if number < passed else own
            yield _Placed(number, MicroBatch(kept, len(own), len(own)))


def _read_with(isolated: IsolatedRng, parts: Iterator[_Placed]) -> Iterator[_Placed]:
    """Yield the same parts, but read them with the random numbers of ``isolated``.

    These are in use only while the next part is read. Collate, and the training of a rank that
    reads without workers, draw from another sequence.
    """
    while True:
        with isolated:
            placed = next(parts, None)
        if placed is None:
            return
        yield placed
