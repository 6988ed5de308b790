"""What a rank is given: the same for any number of workers, again after a resume, and by weights
over all ranks.
"""

from __future__ import annotations

import math
import os
import random
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    TensorDataset,
    default_collate,
    get_worker_info,
)

from srunddp.errors import ConfigError
from srunddp.train import DistributedDataLoader, Weighted
from srunddp.train.data.order import Sequential, Shuffled
from tests.support.facts import tells
from tests.train.local_world import LocalWorld, run_ranks
from tests.train.problems import message


def draws(index: int) -> torch.Tensor:
    """A sample, with what augmentation would draw."""
    drawn = [torch.rand(()).item(), random.random(), numpy.random.random()]
    return torch.tensor([float(index), *drawn], dtype=torch.float64)


def noisy(samples: list[Any]) -> Any:
    """A collate that draws as well."""
    return default_collate(samples) + torch.rand(())


class Augmented(Dataset[Any]):
    def __init__(self, samples: int) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> torch.Tensor:
        return draws(index)


class RandomStream(IterableDataset[Any]):
    """In an order that it draws at random."""

    def __init__(self, samples: int) -> None:
        self.samples = samples

    def __iter__(self) -> Iterator[torch.Tensor]:
        return (draws(int(index)) for index in torch.randperm(self.samples))


class Shards(IterableDataset[Any]):
    """Samples ``1000 rank + 100 worker + i``, so many of each rank and worker; further draws where
    asked for.
    """

    def __init__(self, rank: int, lengths: list[list[int]], *, augment: bool = False) -> None:
        self.rank = rank
        self.lengths = lengths
        self.augment = augment

    def __iter__(self) -> Iterator[torch.Tensor]:
        if (info := get_worker_info()) is None:
            worker = 0
        else:
            worker = info.id
        first = 1000 * self.rank + 100 * worker
        for index in range(first, first + self.lengths[self.rank][worker]):
            yield draws(index) if self.augment else torch.tensor(index)


def loader_of(data: Any, world: Any = None, **options: Any) -> DistributedDataLoader:
    defaults: dict[str, Any] = {
        "batch_size": 4,
        "seed": 5,
        "num_workers": 0,
        "multiprocessing_context": "fork",
    }
    return DistributedDataLoader(data, world or LocalWorld(), **(defaults | options))


def rows(loader: DistributedDataLoader, epoch: int, start: int = 0) -> list[Any]:
    loader.load_state_dict({"epoch": epoch, "samples_seen": start})
    return [
        [batch.data.tolist(), batch.samples] for step in loader.steps() for batch in step.batches
    ]


@pytest.mark.parametrize("collate", [None, noisy])
def test_augmentation_does_not_depend_on_workers_or_a_resume(collate: Any) -> None:
    options = {"order": Shuffled(18, 1), "collate": collate}
    one, two = (loader_of(Augmented(18), num_workers=workers, **options) for workers in (1, 2))
    whole = rows(one, 3)
    assert rows(two, 3) == whole
    assert rows(two, 3, start=8) == whole[2:], "the same workers, which have read an epoch already"
    assert rows(one, 4) != whole


class Readers(Dataset[Any]):
    """Samples that say which process has read them."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor(os.getpid())


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("persistent", [True, False])
def test_workers_stay_for_the_next_epoch_where_asked(workers: int, persistent: bool) -> None:
    loader = loader_of(Readers(), num_workers=workers, persistent_workers=persistent)
    first, second = (
        {pid for read_by, _ in rows(loader, epoch) for pid in read_by} for epoch in (0, 1)
    )
    assert len(first) == len(second) == workers
    assert (first == second) == persistent


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_real_workers_read_a_stream_as_none_do(method: str) -> None:
    alone = loader_of(RandomStream(18))
    two = loader_of(RandomStream(18), num_workers=2, multiprocessing_context=method)
    for epoch in (1, 2):
        assert rows(two, epoch) == (whole := rows(alone, epoch))
    assert rows(two, 2, start=8) == whole[2:]


class SharesItsEpoch(RandomStream):
    """As a stream of Hugging Face's: workers that change one number at the same time may leave a
    wrong one there.
    """

    def __init__(self) -> None:
        super().__init__(18)
        self.epoch, self.changed = torch.zeros(2, dtype=torch.int64).share_memory_().unbind()

    def set_epoch(self, epoch: int) -> None:
        self.changed += get_worker_info() is not None and int(self.epoch) != epoch
        self.epoch.fill_(epoch)


def test_workers_find_the_epoch_that_they_share_as_it_shall_be() -> None:
    data = SharesItsEpoch()
    loader = loader_of(data, num_workers=2)
    for epoch in (0, 1, 0):
        rows(loader, epoch)
    assert data.changed == 0


def test_what_collate_draws_is_the_same_after_a_resume() -> None:
    for data, kind in (
        (RandomStream(24), {}),
        (Shards(0, [[9, 15]], augment=True), {"sharded": True}),
    ):
        options = {"num_workers": 2, "collate": noisy, **kind}
        loader = loader_of(data, **options)
        steps = []
        states = []
        for step in loader.steps():
            steps.append(step.batches[0].data.tolist())
            states.append(loader.state_dict())
        for number, state in enumerate(states, 1):
            resumed = loader_of(data, **options)
            resumed.load_state_dict(state)
            assert [batch.data.tolist() for batch in resumed] == steps[number:]


class SplitByWorker(IterableDataset[Any]):
    """As torch's documentation tells data sets to do."""

    def __iter__(self) -> Iterator[int]:
        info = get_worker_info()
        return iter(range(info.id if info else 0, 30, info.num_workers if info else 1))


@pytest.mark.parametrize("workers", [0, 1, 3])
def test_a_stream_that_splits_itself_by_worker_loses_nothing(workers: int) -> None:
    """Neither where all read it whole, twice as persistent workers do, nor where it is said to
    split itself.
    """
    whole, split = (
        loader_of(SplitByWorker(), num_workers=workers, sharded=sharded)
        for sharded in (False, True)
    )
    for _ in range(2):
        assert torch.cat([batch.data for batch in whole]).tolist() == list(range(30))
        assert sorted(torch.cat([batch.data for batch in split]).tolist()) == list(range(30))


class EpochAware(Augmented):
    epoch = -1

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor(self.epoch)


class EpochAwareStream(EpochAware, IterableDataset[Any]):
    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter([torch.tensor(self.epoch)] * self.samples)


@pytest.mark.parametrize("data", [EpochAware(12), EpochAwareStream(12)])
@pytest.mark.parametrize("workers", [0, 2])
def test_a_data_set_is_told_the_epoch(data: Any, workers: int) -> None:
    """Also the copies of it that workers keep from one epoch to the next."""
    loader = loader_of(data, num_workers=workers)
    for epoch in (3, 4):
        loader.set_epoch(epoch)
        assert {int(value) for batch in loader for value in batch.data} == {epoch}


def test_a_weighted_order_without_a_seed_has_the_loaders() -> None:
    def read(order: Weighted, seed: int) -> list[Any]:
        loader = loader_of(TensorDataset(torch.arange(50)), order=order, seed=seed)
        return [batch.data[0].tolist() for batch in loader]

    weights = [1.0] * 50
    assert read(Weighted(weights), 7) == read(Weighted(weights, seed=7), 1)
    assert read(Weighted(weights), 7) != read(Weighted(weights), 8)


@pytest.mark.parametrize("drop_last", [False, True])
def test_a_step_that_is_not_full_is_left_out_where_asked(drop_last: bool) -> None:
    """18 samples in steps of two batches of 4: the last step has one batch of 2."""
    loader = loader_of(
        Augmented(18), order=Sequential(18), drop_last=drop_last, gradient_accumulation_steps=2
    )
    counts = [[batch.samples for batch in step.batches] for step in loader.steps()]
    assert counts == ([[4, 4], [4, 4]] if drop_last else [[4, 4], [4, 4], [2]])
    assert [loader.steps_left(seen) for seen in (0, 8, 999)] == [len(counts), len(counts) - 1, 0]
    for seen in (0, 8):
        loader.load_state_dict({"epoch": 2, "samples_seen": seen})
        assert len(loader) == sum(map(len, counts)) - seen // 4
    with pytest.raises(TypeError, match="not known"):
        len(loader_of(RandomStream(18)))


def test_the_state_tells_of_whole_steps_and_the_next_epoch() -> None:
    loader = loader_of(Augmented(18), gradient_accumulation_steps=2)
    seen = [loader.state_dict()["samples_seen"] for _ in loader]
    assert seen == [0, 8, 8, 16, 18]
    assert loader.state_dict().items() >= {"epoch": 1, "samples_seen": 0}.items()
    first, again = (next(iter(loader)).data[:, 0] for _ in range(2))
    assert torch.equal(again, first), "an epoch that was left begins again"
    loader.load_state_dict({"epoch": 1, "samples_seen": 8})
    loader.set_epoch(1)
    assert sum(batch.samples for batch in loader) == 10


def sizes(loader: DistributedDataLoader) -> list[tuple[Any, ...]]:
    """Of each step: samples and weights of all ranks, and of each batch what counts of it, with its
    scale.
    """
    return [
        (step.samples, step.weight, [(batch.data.tolist(), *batch[1:]) for batch in step.batches])
        for step in loader.steps()
    ]


def weigh_first(batch: torch.Tensor) -> torch.Tensor:
    return batch[0].double() ** 2


def weighted(world: LocalWorld) -> list[Any]:
    """Three batches of 2, 2 and 1 samples on two ranks: the last is rank 0's alone."""
    data = TensorDataset(torch.arange(5))
    options = {
        "order": Sequential(5),
        "batch_size": 1,
        "collate": lambda rows: torch.stack([row for (row,) in rows]),
    }
    weights = (None, weigh_first, lambda batch: 0)
    return [sizes(loader_of(data, world, **options, weight=weight)) for weight in weights]


def test_weights_are_summed_over_ranks_and_give_the_scale(tmp_path: Path) -> None:
    """A rank that has no sample of a batch gets another's, which does not count; no weight at all
    scales by 0.
    """
    (plain, by_value, none), (plain1, by_value1, _) = run_ranks(2, tmp_path, weighted)
    assert none[0] == (2, 0.0, [([0], 1, 0.0, 0.0)])
    assert plain[1:] == [(2, 2.0, [([2], 1, 1.0, 1.0)]), (1, 1.0, [([4], 1, 1.0, 2.0)])]
    assert plain1[1:] == [(2, 2.0, [([3], 1, 1.0, 1.0)]), (1, 1.0, [([4], 0, 0.0, 0.0)])]
    assert by_value[:2] == [(2, 1.0, [([0], 1, 0.0, 0.0)]), (2, 13.0, [([2], 1, 4.0, 8 / 13)])]
    assert by_value1 == [
        (2, 1.0, [([1], 1, 1.0, 2.0)]),
        (2, 13.0, [([3], 1, 9.0, 18 / 13)]),
        (1, 16.0, [([4], 0, 0.0, 0.0)]),
    ]


def collectives(world: LocalWorld) -> list[int]:
    with pytest.MonkeyPatch.context() as patch:
        counts: Counter[str] = Counter()
        reduce = torch.distributed.all_reduce
        patch.setattr(
            torch.distributed,
            "all_reduce",
            lambda *a, **k: (counts.update("r"), reduce(*a, **k))[1],
        )
        made = []
        for options in ({}, {"weight": float}):
            loader = loader_of(
                Augmented(20), world, collate=len, gradient_accumulation_steps=2, **options
            )
            list(loader.steps())  # at whose beginning the samples are compared
            counts.clear()
            made += [len(list(loader.steps())), counts["r"]]
        return made


def test_weights_cost_one_all_reduce_a_step_and_samples_none(tmp_path: Path) -> None:
    assert run_ranks(2, tmp_path, collectives) == [[2, 0, 2, 2]] * 2


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (-1.0, "-1.0"),
        (math.nan, "nan"),
        (torch.tensor(math.inf), "inf"),
        (torch.ones(2), r"a tensor of shape \(2,\)"),
        (None, "a NoneType"),
    ],
)
@pytest.mark.parametrize("workers", [0, 1])
def test_an_impossible_weight_is_refused_with_the_hint(
    value: Any, words: str, workers: int
) -> None:
    with pytest.raises(ConfigError, match=rf"^weight\(batch\) is {words}; expected .* -> [^\n]*$"):
        list(loader_of(Augmented(4), weight=lambda batch: value, num_workers=workers))


LENGTHS = [[5, 0], [2, 9], [0, 0]]


def sharded(world: LocalWorld, workers: int, options: dict[str, Any]) -> list[Any]:
    """The steps of an epoch, and those after each state of it."""
    data = Shards(world.rank, LENGTHS, augment=True)

    def make() -> DistributedDataLoader:
        return loader_of(data, world, batch_size=2, num_workers=workers, sharded=True, **options)

    def plain(step: Any) -> tuple[Any, ...]:
        data = [None if batch.data is None else batch.data.tolist() for batch in step.batches]
        return (
            step.samples,
            step.weight,
            [(value, *batch[1:]) for value, batch in zip(data, step.batches, strict=True)],
        )

    loader = make()
    steps = []
    later = []
    for step in loader.steps():
        steps.append(plain(step))
        resumed = make()
        resumed.load_state_dict(loader.state_dict())
        later.append([plain(step) for step in resumed.steps()])
    return [steps, later, loader.state_dict()["samples_seen"]]


def indices(steps: list[Any]) -> list[list[int]]:
    """What each batch of its samples has; nothing where others stand in."""
    return [
        [int(row[0]) for row in data] if samples else []
        for _, _, bs in steps
        for data, samples, *_ in bs
    ]


def test_shards_of_any_length_give_all_ranks_equal_steps(tmp_path: Path) -> None:
    """Each sample once; the last batch that was read stands in on a rank at its end, and None where
    there was none.
    """
    ranks = run_ranks(3, tmp_path, sharded, 2, {"weight": float_of_first})
    steps = [rank[0] for rank in ranks]
    assert indices(steps[0]) == [[0, 1], [2, 3], [4], [], [], []]
    assert indices(steps[1]) == [
        [1000, 1001],
        [1100, 1101],
        [1102, 1103],
        [1104, 1105],
        [1106, 1107],
        [1108],
    ]
    assert [[samples for samples, *_ in rank] for rank in steps] == [[4, 4, 3, 2, 2, 1]] * 3
    assert {data[0][0] for _, _, ((data, *_),) in steps[0][3:]} == {4.0}
    assert all(batches == [(None, 0, 0.0, 0.0)] for _, _, batches in steps[2])
    for number, (_, weight, _) in enumerate(steps[0]):
        assert weight == sum(rank[number][2][0][2] for rank in steps)
        assert sum(rank[number][2][0][3] for rank in steps) == pytest.approx(3, rel=1e-12)


def float_of_first(batch: torch.Tensor) -> torch.Tensor:
    return batch[0, 0] + 1


@pytest.mark.parametrize("workers", [0, 2])
def test_a_resume_of_shards_gives_the_same_bits(workers: int, tmp_path: Path) -> None:
    for steps, later, seen in run_ranks(
        3, tmp_path, sharded, workers, {"gradient_accumulation_steps": 2}
    ):
        assert seen == 0
        for number, rest in enumerate(later, 1):
            own = [
                [(*batch[1:], batch[0] if batch[1] else None) for batch in step[2]]
                for step in steps[number:]
            ]
            assert [
                [(*batch[1:], batch[0] if batch[1] else None) for batch in step[2]] for step in rest
            ] == own


def test_drop_last_ends_shards_with_the_shortest(tmp_path: Path) -> None:
    ranks = run_ranks(2, tmp_path, sharded, 2, {"drop_last": True})
    assert [indices(rank[0]) for rank in ranks] == [[[0, 1], [2, 3]], [[1000, 1001], [1100, 1101]]]


def test_shards_go_on_with_as_many_ranks_and_workers_only() -> None:
    loader = loader_of(Shards(0, [[9, 9]]), sharded=True, num_workers=2)
    start = loader.state_dict()
    next(loader.steps())
    state = loader.state_dict()
    assert (state["batches"], state["samples_seen"]) == (1, 4)
    for name, here in (("world_size", 1), ("num_workers", 2), ("batch_size", 4)):
        with pytest.raises(
            ConfigError, match=f"^{name} was 7 .* is {here}; expected .* -> .*{name}=7"
        ):
            loader.load_state_dict(state | {name: 7})
        loader.load_state_dict(start | {name: 7})
    assert sum(batch.samples for batch in loader) == 18


class SplitByRank(IterableDataset[Any]):
    def __init__(self, world: LocalWorld) -> None:
        self.world = world

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return (
            {"x": torch.tensor(index), "name": f"{index}"} for index in range(self.world.rank, 7, 2)
        )


def stream_by_rank(world: LocalWorld, workers: int) -> list[Any]:
    refused = message(lambda: list(loader_of(SplitByRank(world), world, num_workers=workers)))
    own = loader_of(SplitByRank(world), world, num_workers=workers, sharded=True, batch_size=1)
    whole = loader_of(RandomStream(7), world, num_workers=workers)
    same = [int(row[0]) for batch in whole for row in batch.data[: batch.samples]]
    return [refused, [[batch.data["name"] for batch in own if batch.samples], same]]


@pytest.mark.parametrize("workers", [0, 1])
def test_a_stream_that_splits_itself_is_refused_unless_said(workers: int, tmp_path: Path) -> None:
    """Else all but one of the ranks' samples would be lost without a word."""
    (refused, (own, same)), (refused1, (own1, same1)) = run_ranks(
        2, tmp_path, stream_by_rank, workers
    )
    assert refused == refused1
    assert tells(refused, "samples of data differ between ranks", "; expected ")
    assert "sharded=True" in refused
    assert (own, own1) == ([["0"], ["2"], ["4"], ["6"]], [["1"], ["3"], ["5"]])
    assert sorted(same + same1) == list(range(7)), "read whole by both"


@pytest.mark.parametrize(
    ("data", "options", "words"),
    [
        (
            DataLoader(TensorDataset(torch.ones(4)), batch_size=2),
            {},
            "a DataLoader as data.*loader.dataset.*size=2",
        ),
        (DataLoader(RandomStream(4)), {}, "a DataLoader as data.*loader.dataset"),
        (object(), {}, "a data set of object without a length"),
        (Augmented(4), {"sharded": True}, "sharded=True, and data with indices"),
        (Augmented(4), {"order": Sequential(5)}, "the order's indices: from 0 to 4"),
        (
            Augmented(4),
            {"order": Weighted([0.0] * 9 + [1.0])},
            "the order's indices: from 9 to 9; .* from 0 to 3",
        ),
        (RandomStream(4), {"order": Sequential(4)}, "an order, and data that is iterable"),
        (Augmented(4), {"batch_size": 0}, "batch_size is 0"),
        (Augmented(4), {"gradient_accumulation_steps": 0}, "gradient_accumulation_steps is 0"),
    ],
)
def test_data_that_cannot_be_dealt_are_refused_with_the_hint(
    data: Any, options: Any, words: str
) -> None:
    with pytest.raises(ConfigError, match=f"{words}.*; expected .* -> |{words}"):
        loader_of(data, **options)


def differing(world: LocalWorld) -> list[str]:
    data = TensorDataset(torch.ones(4 + world.rank))
    other = {"seed": world.rank, "batch_size": 1 + world.rank, "order": Sequential(3 + world.rank)}
    found = [message(lambda: loader_of(data, world))]
    for name, value in other.items():
        found.append(message(partial(loader_of, Augmented(8), world, **{name: value})))
    return found


def test_what_differs_between_ranks_is_refused(tmp_path: Path) -> None:
    """Before a rank waits for ever for another that has fewer batches."""
    for found in run_ranks(2, tmp_path, differing):
        starts = ("len(data)", "seed", "batch_size", "len(data)")
        assert [text.split(" differs between ranks")[0] for text in found] == [*starts]


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_what_workers_cannot_be_sent_is_named_with_the_cure(method: str) -> None:
    class Local(Augmented):
        pass

    for words, data, options in (
        ("data, .*Local", Local(4), {}),
        ("collate, .*lambda", Augmented(4), {"collate": lambda samples: samples}),
        ("weight, .*lambda", Augmented(4), {"weight": lambda batch: 1.0}),
    ):
        loader = loader_of(data, num_workers=1, multiprocessing_context=method, **options)
        with pytest.raises(
            ConfigError, match=rf"{words}.* by pickle: .*-> .*multiprocessing_context=fork"
        ):
            next(iter(loader))


def by_hand(world: LocalWorld, state: dict[str, int] | None) -> list[Any]:
    """A loop of one's own in float64, from a state on; its gradients summed, and the samples that
    this rank had.
    """
    model = nn.Linear(1, 1, bias=False, dtype=torch.float64)
    nn.init.ones_(model.weight)
    wrapped = DistributedDataParallel(model)
    values = torch.arange(1.0, 24.0, dtype=torch.float64).unsqueeze(1)
    loader = loader_of(
        TensorDataset(values), world, batch_size=3, weight=lambda batch: batch[0].sum()
    )
    loader.load_state_dict(state or loader.state_dict())
    seen = []
    states = []
    gradients = []
    for batch in loader:
        model.zero_grad()
        loss = (wrapped(batch.data[0]) * batch.data[0]).sum() / batch.data[0].sum() * batch.scale
        loss.backward()
        seen += batch.data[0][: batch.samples].flatten().tolist()
        states.append(loader.state_dict())
        gradients.append(model.weight.grad.item() if model.weight.grad is not None else 0.0)
    return [seen, states, gradients]


def test_a_loop_of_ones_own_is_exact_and_resumes_on_other_ranks(tmp_path: Path) -> None:
    """Gradients are means over all weights of a step; amid an epoch every sample comes once, on 2
    ranks and then 3.
    """
    two = run_ranks(2, tmp_path, by_hand, None)
    assert sorted(two[0][0] + two[1][0]) == [float(value) for value in range(1, 24)]
    order = Shuffled(23, 5).indices(0) + 1.0
    for number, gradient in enumerate(two[0][2]):
        step = order[6 * number : 6 * number + 6].double()
        assert gradient == pytest.approx(float((step**2).sum() / step.sum()), rel=1e-12)
    assert two[0][2] == two[1][2]
    state = two[0][1][1]
    assert state == two[1][1][1]
    assert (state["epoch"], state["samples_seen"]) == (0, 12)
    three = run_ranks(3, tmp_path / "three", by_hand, state)
    rest = [value for rank in three for value in rank[0]]
    assert sorted(rest + order[:12].tolist()) == [float(value) for value in range(1, 24)]
