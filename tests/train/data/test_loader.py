"""What workers read: the same for any number of them, and again after a resume."""

from __future__ import annotations

import pickle
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import Dataset, IterableDataset, Subset, TensorDataset, get_worker_info

from srunddp.train import LoadingConfig
from srunddp.train.data import sampler
from srunddp.train.data.loader import Batch, DeviceLoader
from srunddp.train.data.order import Order, Sequential, Shuffled
from srunddp.train.data.sampler import (
    BatchRequest,
    DistributedBatchSampler,
    MicroBatch,
    Reader,
    ShardAssignment,
    ShardedIterable,
    TensorRows,
)
from tests.train.local_world import LocalWorld


class Plain(IterableDataset[int]):
    def __init__(self, samples: int) -> None:
        self.samples = samples

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.samples))


class RandomStream(IterableDataset[Any]):
    """In an order that it draws at random; each sample with further draws, as augmentation would make."""

    def __init__(self, samples: int) -> None:
        self.samples = samples

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        for index in torch.randperm(self.samples):
            drawn = [torch.rand(()).item(), random.random(), numpy.random.random()]
            yield torch.tensor([float(index), *drawn], dtype=torch.float64), torch.zeros(1)


class ShardsItself(IterableDataset[int]):
    """As torch's documentation tells data sets to do."""

    def __iter__(self) -> Iterator[int]:
        info = get_worker_info()
        return iter(range(info.id if info else 0, 30, info.num_workers if info else 1))


class Augmented(Dataset[Any]):
    def __init__(self, samples: int) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        drawn = [torch.rand(()).item(), random.random(), numpy.random.random()]
        return torch.tensor([float(index), *drawn], dtype=torch.float64), torch.zeros(1)


@dataclass(frozen=True)
class Info:
    id: int
    num_workers: int


def by_workers(
    data: IterableDataset[Any], assignment: ShardAssignment, workers: int, epoch: int = 1, start: int = 0
) -> list[MicroBatch]:
    """The parts in the order in which the loader takes them from its workers; 0 workers read in the rank."""
    turns: list[Iterator[MicroBatch]] = []
    for number in range(max(workers, 1)):
        stream = ShardedIterable(data, assignment)
        stream.begin(epoch, start)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sampler, "get_worker_info", lambda number=number: Info(number, workers) if workers else None)
            patch.setattr(sampler._worker, "_worker_info", Info(number, workers) if workers else None)
            turns.append(iter(list(stream)))
    parts: list[MicroBatch] = []
    while any(taken := [next(turn, None) for turn in turns]):
        parts += [part for part in taken if part is not None]
    return parts


@settings(deadline=None, max_examples=60)
@given(
    samples=st.integers(0, 50),
    ranks=st.integers(1, 4),
    batch_size=st.integers(1, 6),
    workers=st.integers(0, 4),
    cut=st.integers(0, 4),
)
def test_a_stream_is_dealt_as_a_data_set_with_indices_is(
    samples: int, ranks: int, batch_size: int, workers: int, cut: int
) -> None:
    start = min(samples, cut * ranks * batch_size)
    for rank in range(ranks):
        assignment = ShardAssignment(rank, ranks, batch_size, 0)
        requests = DistributedBatchSampler(assignment)
        requests.begin(torch.arange(samples), 1, start)
        expected = [(request.indices, request.own, request.total) for request in requests]
        found = [
            (part.samples, part.own, part.total) for part in by_workers(Plain(samples), assignment, workers, 1, start)
        ]
        assert found == expected


def drawn(parts: list[MicroBatch]) -> list[list[float]]:
    return [[value for sample, _ in part.samples for value in sample.tolist()] for part in parts]


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_what_a_stream_draws_depends_on_no_number_of_workers(workers: int) -> None:
    assignment = ShardAssignment(0, 1, 4, seed=5)
    alone = drawn(by_workers(RandomStream(21), assignment, 0))
    assert drawn(by_workers(RandomStream(21), assignment, workers)) == alone
    assert drawn(by_workers(RandomStream(21), assignment, workers, epoch=2)) != alone
    assert drawn(by_workers(RandomStream(21), assignment, workers, start=8)) == alone[2:], "a resume"


@pytest.mark.parametrize("workers", [0, 2])
def test_ranks_that_draw_the_order_of_a_stream_miss_no_sample(workers: int) -> None:
    seen = []
    for rank in range(3):
        torch.manual_seed(rank)
        parts = by_workers(RandomStream(20), ShardAssignment(rank, 3, 2, seed=5), workers)
        seen += [int(sample[0]) for part in parts for sample, _ in part.samples[: part.own]]
    assert sorted(seen) == list(range(20))


def test_a_stream_leaves_the_rank_s_own_random_numbers_alone() -> None:
    def states() -> list[Any]:
        return [torch.rand(3).tolist(), random.random(), numpy.random.random()]

    results = []
    for read in (False, True):
        torch.manual_seed(1), random.seed(1), numpy.random.seed(1)
        if read:
            assert len(by_workers(RandomStream(9), ShardAssignment(0, 1, 2, 0), 0)) == 5
        results.append(states())
    assert results[0] == results[1]


@pytest.mark.parametrize("workers", [0, 1, 2, 3])
def test_a_stream_that_shards_itself_among_workers_loses_nothing(workers: int) -> None:
    parts = by_workers(ShardsItself(), ShardAssignment(0, 1, 4, 0), workers)
    assert [sample for part in parts for sample in part.samples] == list(range(30))


def test_a_stream_is_told_the_epoch() -> None:
    class EpochAware(Plain):
        def set_epoch(self, epoch: int) -> None:
            self.samples = 10 * epoch

    assert sum(part.total for part in by_workers(EpochAware(0), ShardAssignment(0, 1, 4, 0), 2, epoch=3)) == 30


def test_data_sets_that_read_many_at_once_are_asked_so() -> None:
    data = Subset(TensorDataset(torch.arange(10.0)), [9, 8, 7, 6])
    part = Reader(data).__getitems__(BatchRequest([0, 3], 2, 4, 0))
    assert [float(sample[0]) for sample in part.samples] == [9.0, 6.0]
    assert (part.own, part.total) == (2, 4)


def test_tensors_in_memory_are_read_as_their_samples_collated() -> None:
    data = TensorDataset(torch.arange(10.0), torch.arange(10))
    inputs, targets = TensorRows(data).__getitems__(BatchRequest([7, 2], 2, 2, 0)).samples
    assert (inputs.tolist(), targets.tolist()) == ([7.0, 2.0], [7, 2])


def feed(
    data: Dataset[Any],
    order: Order | None,
    workers: int,
    method: Any = "fork",
    drop_last: bool = False,
    accumulation: int = 1,
) -> DeviceLoader:
    loading = LoadingConfig(multiprocessing_context=method, drop_last=drop_last)
    options = {"assignment": ShardAssignment(0, 1, 4, 5), "num_workers": workers, "accumulation": accumulation}
    return DeviceLoader(data, order, LocalWorld(), loading, **options)


def rows(steps: Iterator[list[Batch]]) -> list[Any]:
    return [[batch.inputs.tolist(), batch.own, batch.total] for step in steps for batch in step.batches]


def test_augmentation_does_not_depend_on_workers_or_a_resume() -> None:
    one, two = (feed(Augmented(18), Shuffled(18, 1), workers) for workers in (1, 2))
    whole = rows(one.steps(3))
    assert rows(two.steps(3)) == whole
    assert rows(two.steps(3, start=8)) == whole[2:], "the same workers, which have read an epoch already"
    assert rows(one.steps(4)) != whole


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_real_workers_read_a_stream_as_none_do(method: str) -> None:
    expected = [rows(feed(RandomStream(18), None, 0).steps(epoch)) for epoch in (1, 2)]
    workers = feed(RandomStream(18), None, 2, method)
    assert [rows(workers.steps(epoch)) for epoch in (1, 2)] == expected
    assert rows(workers.steps(2, start=8)) == expected[1][2:]


def test_data_with_indices_can_be_sent_to_spawned_workers() -> None:
    reader = pickle.loads(pickle.dumps(Reader(Subset(Augmented(10), range(5)))))
    assert [int(sample[0][0]) for sample in reader.__getitems__(BatchRequest([4, 1], 2, 2, 0)).samples] == [4, 1]


@pytest.mark.parametrize("drop_last", [False, True])
def test_a_step_that_is_not_full_is_left_out_where_asked(drop_last: bool) -> None:
    """18 samples in steps of two batches of 4: the last step has one batch of 2."""
    it = feed(Augmented(18), Sequential(18), 0, drop_last=drop_last, accumulation=2)
    counts = [[batch.total for batch in step.batches] for step in it.steps(1)]
    assert counts == ([[4, 4], [4, 4]] if drop_last else [[4, 4], [4, 4], [2]])
    assert it.steps_left(0) == len(counts)
    assert it.steps_left(8) == len(counts) - 1
    assert it.steps_left(999) == 0
