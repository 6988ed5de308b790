"""The order of an epoch over all ranks."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils.data import DistributedSampler, TensorDataset

from srunddp.errors import ConfigError
from srunddp.train.data.order import Order, Sequential, Shuffled, Weighted

RARE = [0] * 900 + [1] * 90 + [2] * 10


@pytest.mark.parametrize("world_size", [1, 3, 4])
@pytest.mark.parametrize("epoch", [0, 1, 7])
@pytest.mark.parametrize("shuffle", [True, False])
def test_the_order_is_that_of_torch_s_sampler_before_it_pads(
    world_size: int, epoch: int, shuffle: bool
) -> None:
    order = (Shuffled(100, seed=5) if shuffle else Sequential(100)).indices(epoch).tolist()
    padded = order + order[: -100 % world_size]
    for rank in range(world_size):
        sampler: DistributedSampler[Any] = DistributedSampler(
            TensorDataset(torch.empty(100)), world_size, rank, shuffle=shuffle, seed=5
        )
        sampler.set_epoch(epoch)
        assert list(sampler) == padded[rank::world_size]


ORDERS = [
    lambda seed: Shuffled(50, seed=seed),
    lambda seed: Weighted(range(50), seed=seed),
    lambda seed: Weighted(range(50), 20, seed=seed, replacement=False),
    lambda seed: Weighted.balanced(RARE, seed=seed),
]


@pytest.mark.parametrize("order_of", ORDERS)
def test_an_order_depends_on_its_seed_and_epoch_alone(order_of: Callable[[int], Order]) -> None:
    order = order_of(3)
    first = order.indices(1)
    assert (first.dtype, first.shape, first.device.type) == (torch.int64, (len(order),), "cpu")
    torch.manual_seed(99)
    torch.rand(17)
    assert torch.equal(first, order.indices(1))
    assert not torch.equal(first, order.indices(2))
    assert not torch.equal(first, order_of(9).indices(1))


def within(counts: torch.Tensor, shares: torch.Tensor, draws: int) -> bool:
    """Whether each count is within five standard deviations of its share of the draws."""
    deviations = (draws * shares * (1 - shares)).sqrt()
    return bool(((counts - draws * shares).abs() <= 5 * deviations + 1e-9).all())


def test_samples_are_drawn_in_proportion_to_their_weights() -> None:
    weights = torch.tensor([0.0, 1.0, 2.0, 0.0, 3.0, 10.0, 0.0])
    counts = Weighted(weights, 100_000).indices(0).bincount(minlength=7)
    assert within(counts, weights.double() / 16, 100_000)
    assert counts[weights == 0].sum() == 0


def test_balanced_classes_are_drawn_equally_often() -> None:
    drawn = torch.tensor(RARE)[Weighted.balanced(RARE, 30_000).indices(0)]
    assert within(drawn.bincount(), torch.full((3,), 1 / 3).double(), 30_000)


def test_without_replacement_heavy_samples_come_first_and_once() -> None:
    """The first of three draws falls on each sample by its weight, the second by the weights of
    those left.
    """
    weights = [1.0, 2.0, 5.0, 0.0]
    order = Weighted(weights, 3, replacement=False)
    drawn = torch.stack([order.indices(epoch) for epoch in range(20_000)])
    assert all(len(set(row)) == 3 for row in drawn.tolist())
    shares = torch.tensor(weights).double() / 8
    assert within(drawn[:, 0].bincount(minlength=4), shares, 20_000)
    after_2 = drawn[drawn[:, 0] == 2, 1]
    assert within(
        after_2.bincount(minlength=4), torch.tensor([1 / 3, 2 / 3, 0, 0]).double(), len(after_2)
    )


def test_more_samples_than_multinomial_takes() -> None:
    weights = torch.zeros(2**24 + 8)
    weights[-3:] = 1
    assert set(Weighted(weights, 100).indices(0).tolist()) == {2**24 + 5, 2**24 + 6, 2**24 + 7}


@pytest.mark.parametrize(("draw", "sample"), [(0.0, 1), (0.5, 2), (1.0, 2)])
def test_a_draw_at_the_very_edge_is_no_sample_of_weight_zero(
    draw: float, sample: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    order = Weighted([0.0, 1.0, 1.0, 0.0], 3)
    monkeypatch.setattr(
        torch, "rand", lambda *size, **options: torch.full(size, draw, dtype=torch.float64)
    )
    assert order.indices(0).tolist() == [sample] * 3


@pytest.mark.parametrize(
    ("weights", "options", "words"),
    [
        ([1.0, -2.0], {}, "weight -2.0 of sample 1"),
        ([math.nan, 1.0], {}, "weight nan of sample 0"),
        ([1.0, math.inf], {}, "weight inf of sample 1"),
        ([0.0, 0.0], {}, "weights with the sum 0.0"),
        ([1e308, 1e308], {}, "weights with the sum inf"),
        ([], {}, r"weights of shape \(0,\)"),
        ([[1.0]], {}, r"weights of shape \(1, 1\)"),
        ([1.0, 1.0], {"num_samples": 0}, "num_samples is 0"),
        (
            [1.0, 1.0],
            {"num_samples": 3, "replacement": False},
            "num_samples is 3; .* at most the 2 samples",
        ),
        ([1.0, 0.0], {"replacement": False}, "num_samples is 2; .* at most the 1 samples"),
    ],
)
def test_impossible_draws_are_refused_with_the_hint(weights: Any, options: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=f"^{words}.* -> "):
        Weighted(weights, **options)
    with pytest.raises(
        ConfigError, match=r"weights of shape \(2, 2\); expected .* per sample, .* -> "
    ):
        Weighted.balanced(torch.eye(2))
