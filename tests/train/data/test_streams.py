"""Iterable data sets: what each rank and worker reads of them, and again after a resume."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import IterableDataset

from srunddp.train.data import streams
from srunddp.train.data.sampler import DistributedBatchSampler, MicroBatch, ShardAssignment
from srunddp.train.data.streams import Stream
from srunddp.train.rng import IsolatedRng
from tests.train.data.test_loader import RandomStream


def by_workers(
    data: Any, assignment: ShardAssignment, workers: int, epoch: int = 1, start: int = 0
) -> list[MicroBatch]:
    """The parts in the order in which the loader takes them from its workers; 0 workers read in the
    rank.
    """
    turns: list[Iterator[MicroBatch]] = []
    for number in range(max(workers, 1)):
        stream = Stream(data, assignment)
        stream.begin(epoch, start)
        info = SimpleNamespace(id=number, num_workers=workers) if workers else None
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(streams, "get_worker_info", lambda info=info: info)
            turns.append(iter(list(stream)))
    parts: list[MicroBatch] = []
    while any(taken := [next(turn, None) for turn in turns]):
        parts += [part for part in taken if part is not None]
    return parts


@given(
    samples=st.integers(0, 50),
    ranks=st.integers(1, 4),
    batch_size=st.integers(1, 6),
    workers=st.integers(0, 4),
    cut=st.integers(0, 60),
)
def test_a_stream_is_dealt_as_a_data_set_with_indices_is(
    samples: int, ranks: int, batch_size: int, workers: int, cut: int
) -> None:
    """From any start, which another number of ranks may have left."""
    start = min(samples, cut)
    for rank in range(ranks):
        assignment = ShardAssignment(rank, ranks, batch_size, 0)
        requests = DistributedBatchSampler(assignment)
        requests.begin(torch.arange(samples), 1, start)
        expected = [(request.samples, request.own, request.total) for request in requests]
        found = by_workers(range(samples), assignment, workers, 1, start)
        assert [(part.samples, part.own, part.total) for part in found] == expected


def drawn(parts: list[MicroBatch]) -> list[list[float]]:
    return [[value for sample in part.samples for value in sample.tolist()] for part in parts]


def test_ranks_that_draw_the_order_of_a_stream_miss_no_sample() -> None:
    seen = []
    for rank in range(3):
        torch.manual_seed(rank)
        parts = by_workers(RandomStream(20), ShardAssignment(rank, 3, 2, seed=5), 2)
        seen += [int(sample[0]) for part in parts for sample in part.samples[: part.own]]
    assert sorted(seen) == list(range(20))


@pytest.mark.parametrize("sharded", [False, True])
def test_a_stream_leaves_the_rank_s_own_random_numbers_alone(sharded: bool) -> None:
    def states() -> list[Any]:
        return [torch.rand(3).tolist(), random.random(), numpy.random.random()]

    results = []
    for read in (False, True):
        torch.manual_seed(1), random.seed(1), numpy.random.seed(1)
        if read:
            assert (
                len(by_workers(RandomStream(9), ShardAssignment(0, 1, 2, 0, sharded=sharded), 0))
                == 5
            )
        results.append(states())
    assert results[0] == results[1]


@pytest.mark.parametrize(
    "drawing", [numpy.random.random, random.random, lambda: torch.rand(()).item()]
)
def test_two_sequences_of_random_numbers_stay_apart(drawing: Any) -> None:
    def drawn(outside: Any) -> tuple[list[float], list[float]]:
        torch.manual_seed(1), random.seed(1), numpy.random.seed(1)
        isolated = IsolatedRng(2)
        inner = []
        outer = []
        for inside, around in ((1, 0), (0, 0), (0, 3), (3, 1), (0, 0), (1, 1), (2, 0)):
            with isolated:
                inner += [drawing() for _ in range(inside)]
            outer += [drawing() for _ in range(around * outside)]
        return inner, outer

    inner, outer = drawn(1)
    assert drawn(0) == (inner, [])
    assert len({*inner, *outer}) == 12
    torch.manual_seed(1), random.seed(1), numpy.random.seed(1)
    assert outer == [drawing() for _ in outer]


class Normal(IterableDataset[torch.Tensor]):
    """Samples with an odd count of numpy's normal numbers, which it draws in pairs."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        return (torch.tensor(numpy.random.randn(3)) for _ in range(30))


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("sharded", [False, True])
def test_a_resume_draws_the_same_normal_numbers(sharded: bool, ranks: int) -> None:
    assignment = ShardAssignment(0, ranks, 3, 5, sharded=sharded)
    whole = drawn(by_workers(Normal(), assignment, 0))
    for passed in range(1, 4):
        start = passed if sharded else passed * assignment.global_batch_size
        parts = by_workers(Normal(), assignment, 0, 1, start)
        assert drawn([part for part in parts if part.samples]) == whole[passed:]


def test_shards_draw_other_numbers_on_each_rank_and_worker() -> None:
    firsts = {
        drawn(by_workers(RandomStream(4), ShardAssignment(rank, 2, 4, 5, sharded=True), 2, epoch))[
            worker
        ][1]
        for rank, worker, epoch in itertools.product(range(2), range(2), (1, 2))
    }
    assert len(firsts) == 8


class Uneven(IterableDataset[int]):
    """A worker's samples by its number."""

    def __init__(self, lengths: tuple[int, ...]) -> None:
        self.lengths = lengths

    def __iter__(self) -> Iterator[int]:
        info = streams.get_worker_info()  # type: ignore[attr-defined]  # the one that a test replaces
        if info is None:
            worker = 0
        else:
            worker = info.id
        return iter(range(100 * worker, 100 * worker + self.lengths[worker]))


@given(
    lengths=st.lists(st.integers(0, 9), min_size=1, max_size=4).map(tuple),
    batch_size=st.integers(1, 3),
    start=st.integers(0, 20),
)
def test_a_resume_of_shards_reads_on_where_it_was(
    lengths: tuple[int, ...], batch_size: int, start: int
) -> None:
    """However early some workers come to their end; what was seen comes without its samples, or not
    at all.
    """
    assignment = ShardAssignment(0, 1, batch_size, 0, sharded=True)
    workers = len(lengths)
    whole = by_workers(Uneven(lengths), assignment, workers)
    assert sorted(sample for part in whole for sample in part.samples) == [
        sample
        for worker, length in enumerate(lengths)
        for sample in range(100 * worker, 100 * worker + length)
    ]
    resumed = by_workers(Uneven(lengths), assignment, workers, start=start)
    assert resumed[start:] == whole[start:]
    assert all(
        part.samples is None for part in resumed[: min(start, min(lengths) // batch_size * workers)]
    )
