"""The assignment: every sample once, for any samples, ranks, batch size and start."""

from __future__ import annotations

import itertools
import pickle

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import ChainDataset, IterableDataset, Subset, TensorDataset

from srunddp.train.data.sampler import (
    BatchRequest,
    DistributedBatchSampler,
    Reader,
    ShardAssignment,
    TensorRows,
    length_of,
)

DEALS = {
    "samples": st.integers(0, 70),
    "ranks": st.integers(1, 7),
    "batch_size": st.integers(1, 9),
    "seed": st.integers(0, 5),
}


def asked(assignment: ShardAssignment, order: torch.Tensor, start: int = 0, epoch: int = 1) -> list[BatchRequest]:
    requests = DistributedBatchSampler(assignment)
    requests.begin(order, epoch, start)
    made = list(requests)
    assert len(made) == len(requests)
    return made


def shuffled(samples: int, seed: int) -> torch.Tensor:
    return torch.randperm(samples, generator=torch.Generator().manual_seed(seed))


@settings(deadline=None)
@given(**DEALS)
def test_every_sample_is_dealt_once_in_order(samples: int, ranks: int, batch_size: int, seed: int) -> None:
    """No rank has an empty batch or one too large; samples seen after any step begin the order."""
    order, seen = shuffled(samples, seed), []
    by_rank = [asked(ShardAssignment(rank, ranks, batch_size, seed), order) for rank in range(ranks)]
    for step in zip(*by_rank, strict=True):
        assert all(1 <= len(request.indices) <= batch_size for request in step)
        assert all(request.own in (0, len(request.indices)) for request in step)
        assert {request.total for request in step} == {sum(request.own for request in step)}
        seen += [index for request in step for index in request.indices[: request.own]]
        assert sorted(seen) == sorted(order[: len(seen)].tolist())
    assert len(seen) == samples


@settings(deadline=None)
@given(**DEALS, others=st.integers(1, 7), cut=st.integers(0, 9))
def test_another_number_of_ranks_goes_on_with_the_rest(
    samples: int, ranks: int, batch_size: int, seed: int, others: int, cut: int
) -> None:
    order = shuffled(samples, seed)
    start = min(samples, cut * ranks * batch_size)
    rest = [asked(ShardAssignment(rank, others, batch_size, seed), order, start) for rank in range(others)]
    own = [index for requests in rest for request in requests for index in request.indices[: request.own]]
    assert sorted(own) == sorted(order[start:].tolist())


def test_the_seed_of_a_request_is_its_place_s_and_its_rank_s() -> None:
    order = torch.arange(60)
    whole = asked(ShardAssignment(1, 2, 5, seed=3), order)
    resumed = asked(ShardAssignment(1, 2, 5, seed=3), order, start=20)
    assert [request.seed for request in resumed] == [request.seed for request in whole[2:]]
    elsewhere = [
        asked(ShardAssignment(0, 2, 5, seed=3), order),
        asked(ShardAssignment(1, 2, 5, seed=4), order),
        asked(ShardAssignment(1, 2, 5, seed=3), order, epoch=2),
    ]
    seeds = [request.seed for requests in [whole, *elsewhere] for request in requests]
    assert len(set(seeds)) == len(seeds)


def test_a_start_beyond_the_end_leaves_nothing() -> None:
    """As where the data set has become smaller since the checkpoint."""
    assert asked(ShardAssignment(0, 2, 4, seed=0), torch.arange(10), start=16) == []


def test_data_sets_that_read_many_at_once_are_asked_so() -> None:
    data = Subset(TensorDataset(torch.arange(10.0)), [9, 8, 7, 6])
    part = pickle.loads(pickle.dumps(Reader(data))).__getitems__(BatchRequest([0, 3], 2, 4, (0, 0, 0, 0)))
    assert [float(sample[0]) for sample in part.samples] == [9.0, 6.0]
    assert (part.own, part.total) == (2, 4)


def test_tensors_in_memory_are_read_as_their_samples_collated() -> None:
    data = TensorDataset(torch.arange(10.0), torch.arange(10))
    inputs, targets = TensorRows(data).__getitems__(BatchRequest([7, 2], 2, 2, (0, 0, 0, 0))).samples
    assert (inputs.tolist(), targets.tolist()) == ([7.0, 2.0], [7, 2])


class Unknown(IterableDataset[int]):
    def __iter__(self) -> itertools.count[int]:
        return itertools.count()


class Known(Unknown):
    def __len__(self) -> int:
        return 7


def test_a_length_is_known_where_the_data_set_tells_it() -> None:
    assert length_of(TensorDataset(torch.empty(5))) == 5
    assert length_of(Known()) == 7
    assert length_of(Unknown()) is None
    assert length_of(ChainDataset([Unknown()])) is None
    assert length_of(ChainDataset([Known(), Known()])) == 14
