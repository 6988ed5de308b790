"""Training in a run that may go on with fewer ranks: how many samples a step has then."""

from __future__ import annotations

import pytest

from srunddp.errors import ConfigError
from srunddp.train.config import Config
from srunddp.train.fewer_ranks import (
    WorldSizes,
    what_cannot_follow,
    with_batch_kept,
)
from srunddp.train.optimizer import lr_factor


@pytest.mark.parametrize(
    ("accumulation", "now", "expected"), [(2, 3, 2), (2, 2, 3), (4, 2, 6), (10, 3, 10)]
)
def test_a_step_keeps_its_samples(accumulation: int, now: int, expected: int) -> None:
    config = Config(gradient_accumulation_steps=accumulation, batch_size=8)
    found = with_batch_kept(config, WorldSizes(3, now, (3, 2)))
    assert found.gradient_accumulation_steps == expected
    assert now * expected == 3 * accumulation
    assert found.batch_size == 8


def test_samples_that_fewer_ranks_cannot_make_are_refused_before_a_node_is_lost() -> None:
    """With the numbers of ranks, and what would do."""
    said = (
        "--min-nodes, and a step of 48 samples on 6 ranks, which 5 or 4 ranks cannot make of"
        " batch_size 8; expected .* -> set gradient_accumulation_steps to 10 or a multiple of it"
    )
    with pytest.raises(ConfigError, match=said):
        with_batch_kept(Config(batch_size=8), WorldSizes(6, 6, (6, 5, 4, 3)))
    kept = Config(batch_size=8, gradient_accumulation_steps=10)
    for now in (6, 5, 4, 3):
        with_batch_kept(kept, WorldSizes(6, now, (6, 5, 4, 3)))


@pytest.mark.parametrize(("now", "accumulation", "factor"), [(3, 1, 3.0), (2, 1, 2.0)])
def test_where_the_rate_follows_a_step_may_have_fewer_samples(
    now: int, accumulation: int, factor: float
) -> None:
    config = Config(scale_lr="linear")
    found = with_batch_kept(config, WorldSizes(3, now, (3, 2)))
    assert found.gradient_accumulation_steps == accumulation
    assert lr_factor(found, now) == factor


def test_without_the_option_nothing_changes() -> None:
    config = Config(gradient_accumulation_steps=3)
    assert with_batch_kept(config, None) is config


@pytest.mark.parametrize(
    ("sizes", "accumulation", "sharded", "steps", "said"),
    [
        ((3, 2), 2, False, False, []),
        ((3, 2), 2, True, False, ["a sharded stream"]),
        ((3, 2), 2, False, True, []),  # an epoch keeps its steps
        ((3, 2), 1, False, True, ["this scheduler"]),
        ((3, 2), 1, True, True, ["a sharded stream", "this scheduler"]),
        ((3,), 1, True, True, []),
    ],
)
def test_what_cannot_go_on_with_fewer_ranks_is_said(
    sizes: tuple[int, ...], accumulation: int, sharded: bool, steps: bool, said: list[str]
) -> None:
    config = Config(gradient_accumulation_steps=accumulation, scale_lr="linear")
    lines = [
        *what_cannot_follow(config, WorldSizes(3, 3, sizes), sharded=sharded, steps_scheduler=steps)
    ]
    assert len(lines) == len(said)
    for line, words in zip(lines, said, strict=True):
        assert line.startswith("--min-nodes has no effect")
        assert words in line
