"""The assignment: every sample once, for any samples, ranks, batch size and start."""

from __future__ import annotations

import pickle

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import ChainDataset, Subset, TensorDataset

from srunddp.train.data.sampler import (
    DistributedBatchSampler,
    MicroBatch,
    Reader,
    ShardAssignment,
    length_of,
)
from tests.train.data.test_loader import RandomStream

DEALS = {
    "samples": st.integers(0, 70),
    "ranks": st.integers(1, 7),
    "batch_size": st.integers(1, 9),
    "seed": st.integers(0, 5),
}


def asked(assignment: ShardAssignment, order: torch.Tensor, start: int = 0) -> list[MicroBatch]:
    requests = DistributedBatchSampler(assignment)
    requests.begin(order, 1, start)
    return list(requests)


def shuffled(samples: int, seed: int) -> torch.Tensor:
    return torch.randperm(samples, generator=torch.Generator().manual_seed(seed))


@given(**DEALS, start=st.just(0) | st.integers(0, 80))
def test_every_sample_is_dealt_once_in_order(
    samples: int, ranks: int, batch_size: int, seed: int, start: int
) -> None:
    """No rank has an empty batch or one too large; samples seen after any step begin the order.

    From any start that another number of ranks has left; none is left where the data set has become
    smaller since.
    """
    order = shuffled(samples, seed)[start:]
    seen = []
    by_rank = [
        asked(ShardAssignment(rank, ranks, batch_size, seed), shuffled(samples, seed), start)
        for rank in range(ranks)
    ]
    for step in zip(*by_rank, strict=True):
        assert all(1 <= len(part.samples) <= batch_size for part in step)
        assert all(part.own in (0, len(part.samples)) for part in step)
        assert {part.total for part in step} == {sum(part.own for part in step)}
        seen += [index for part in step for index in part.samples[: part.own]]
        assert sorted(seen) == sorted(order[: len(seen)].tolist())
    assert len(seen) == len(order)
    assert len({part.source for parts in by_rank for part in parts}) == sum(map(len, by_rank)), (
        "each draws its own"
    )


def test_many_samples_are_read_at_once_where_that_is_offered() -> None:
    data = TensorDataset(torch.arange(10.0), torch.arange(10))
    part = MicroBatch([0, 3], 2, 4, (0, 0, 0, 0))
    read = pickle.loads(pickle.dumps(Reader(Subset(data, [9, 8, 7, 6])))).__getitems__(part)
    assert [float(sample[0]) for sample in read.samples] == [9.0, 6.0]
    assert (read.own, read.total) == (2, 4)
    inputs, targets = Reader(data, rows=True).__getitems__(part).samples
    assert (inputs.tolist(), targets.tolist()) == ([0.0, 3.0], [0, 3])


class Known(RandomStream):
    def __len__(self) -> int:
        return self.samples


def test_a_length_is_known_where_the_data_set_tells_it() -> None:
    known = [TensorDataset(torch.empty(5)), Known(7), ChainDataset([Known(7), Known(7)])]
    assert [length_of(data) for data in known] == [5, 7, 14]
    assert [length_of(data) for data in (RandomStream(7), ChainDataset([RandomStream(7)]))] == [
        None,
        None,
    ]
