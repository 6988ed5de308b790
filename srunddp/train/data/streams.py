"""Iterable data sets: those that all ranks read whole, and those that split themselves by rank and
worker.
"""

import itertools
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch.utils.data import IterableDataset, get_worker_info

from srunddp.train import rng
from srunddp.train.data.fingerprint import Look, fingerprint_of, hashed, look_at
from srunddp.train.data.sampler import MicroBatch, ShardAssignment
from srunddp.train.rng import IsolatedRng

# Samples at the start of a stream, by which it is told from another.
_FIRST = 4


class Stream(IterableDataset[Any]):
    """An iterable data set, read in micro-batches; where it has a ``set_epoch``, that is called
    first.

    Unless it is ``sharded``, all ranks must see the same samples in the same order. They are dealt
    as :mod:`srunddp.train.data.sampler` says: each worker reads all, and keeps its part. So the
    data set is told that it is read by one worker, whatever their number: it would be split twice,
    and samples lost.

    A data set that is ``sharded`` gives each worker of each rank samples of its own. Each of them
    makes its own micro-batches, and the rank takes these from its workers in turn.

    What is drawn at random in reading is the same again after a resume; for a data set that all
    ranks read whole it is the same on all of them.
    """

    def __init__(self, data: IterableDataset[Any], assignment: ShardAssignment) -> None:
        """With ``drop_last`` a worker of a sharded data set leaves out its last micro-batch where
        that is not full.
        """
        self._data = data
        self._assignment = assignment
        self._sharded = assignment.sharded
        self._worker: int | None = None
        self._workers = 1
        # Shared with the workers, which may outlive an epoch.
        self._start = torch.zeros(3, dtype=torch.int64).share_memory_()  # type: ignore[no-untyped-call]

    def begin(self, epoch: int, start: int, look: Look = Look.NONE) -> None:
        """The next iteration is of this epoch; what was seen before ``start`` is read again.

        ``start`` is samples of all ranks, and none of these come again; of a sharded data set it is
        this rank's micro-batches, which may come without samples. ``look``: how the first samples
        are looked at; repeatedly, the stream is begun anew as often.
        """
        self._start.copy_(torch.tensor([epoch, start, look]))
        # Before workers do: what they share, as those of datasets, they find as it shall be.
        self._set_epoch(epoch)

    def _set_epoch(self, epoch: int) -> None:
        if set_epoch := getattr(self._data, "set_epoch", None):
            set_epoch(epoch)

    def __iter__(self) -> Iterator[MicroBatch]:
        epoch, start, look = self._start.tolist()
        self._set_epoch(epoch)
        self._note_worker()
        worker = self._worker or 0
        source = (self._assignment.seed, epoch)
        reader: tuple[int, ...] = ()
        if self._sharded:
            reader = (self._assignment.rank, worker)
        own_seed = hashed((*source, *reader))
        fingerprint = None
        if look == Look.REPEATEDLY and not worker:
            first = partial(self._first_samples, self._looked_at(start))
            fingerprint = look_at(first, Look.REPEATEDLY, own_seed, text=True)
        isolated = IsolatedRng(own_seed)
        if self._sharded:
            parts = self._own_parts(start, worker)
        else:
            parts = self._dealt_parts(start, look=look == Look.ONCE and not worker)
        for number in itertools.count():
            with isolated:
                place, part = next(parts, (0, None))
            if part is None:
                return
            if self._sharded or number % self._workers == worker:
                if self._worker is not None:  # what collate draws, in a worker
                    rng.seed(hashed((*source, place, self._assignment.rank, *reader)))
                yield part._replace(fingerprint=fingerprint) if fingerprint else part
                fingerprint = None

    def _note_worker(self) -> None:
        """See which worker this is, and have the data set not see it where all read the whole."""
        info = get_worker_info()
        if self._worker is not None or info is None:
            return
        self._worker = info.id
        self._workers = info.num_workers
        if not self._sharded:
            for name, value in (("id", 0), ("num_workers", 1)):
                object.__setattr__(info, name, value)  # past what torch may have made read-only

    def _first_samples(self, count: int) -> list[Any]:
        return list(itertools.islice(iter(self._data), count))

    def _looked_at(self, start: int) -> int:
        """How many samples are looked at.

        No more than what is read in one go, as all workers must draw numpy's random numbers alike.
        """
        count = min(_FIRST, self._assignment.global_batch_size)
        return min(count, start) if start else count

    def _dealt_parts(self, start: int, *, look: bool) -> Iterator[tuple[int, MicroBatch]]:
        """Those of this rank, for all of its workers, each with the place of its first sample in
        the epoch; the first with a fingerprint where one is to be taken.
        """
        rank = self._assignment.rank
        ranks = self._assignment.world_size
        full = self._assignment.global_batch_size
        samples = iter(self._data)
        fingerprint = None
        if look:
            head = list(itertools.islice(samples, self._looked_at(start)))
            samples = itertools.chain(head, samples)
            fingerprint = fingerprint_of(head, text=True)
        for passed in range(0, start, full):  # in parts, as they were read before the resume
            for _ in itertools.islice(samples, min(full, start - passed)):
                ...
            rng.forget_normal()
        place = start
        # One rank takes all: quicker.
        while first := list(itertools.islice(samples, full if ranks == 1 else 1)):
            kept = first[rank:]
            count = len(first)
            for sample in itertools.islice(samples, full - count):
                if count % ranks == rank:
                    kept.append(sample)
                count += 1
            for part in self._assignment.split(count):
                mine = kept[: -(-(part - rank) // ranks)] if rank < part else []
                kept = kept[len(mine) :]
                yield place, MicroBatch(mine or first, len(mine), part, fingerprint=fingerprint)
                fingerprint = None
                place += part

    def _own_parts(self, start: int, worker: int) -> Iterator[tuple[int, MicroBatch]]:
        """Those of this worker, numbered; without samples where they surely are among the rank's
        first ``start``.
        """
        samples = iter(self._data)
        size = self._assignment.batch_size
        # Workers take turns; it is this one's turn more often where another has come to its end.
        passed = len(range(worker, start, self._workers))
        for number in itertools.count():
            part = list(itertools.islice(samples, size))
            if len(part) < (size if self._assignment.drop_last else 1):
                return
            yield number, MicroBatch(None if number < passed else part, len(part), len(part))
