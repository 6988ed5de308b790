"""How many ranks a run may have after the loss of nodes, and whether they can share its steps."""

from __future__ import annotations

import pytest

from srunddp.bootstrap.environment.world_sizes import accumulation_for, world_sizes


@pytest.mark.parametrize(
    ("nodes", "fewest", "expected"),
    [
        ((1, 1, 1), 2, (3, 2)),
        ((8, 8, 8, 8), 2, (32, 24, 16)),
        ((2, 1, 3), 2, (6, 5, 4, 3)),
        ((4, 4), 2, (8,)),
        ((8,) * 2000, 1999, (16000, 15992)),
        # As many combinations as 16 ** 8.
        (tuple(range(1, 9)) * 15, 119, (540, *range(539, 531, -1))),
    ],
)
def test_how_many_ranks_may_be_left(
    nodes: tuple[int, ...], fewest: int, expected: tuple[int, ...]
) -> None:
    assert world_sizes(nodes, fewest) == expected


@pytest.mark.parametrize(
    ("first", "later", "expected"),
    [(12, (12, 10, 8), 10), (4, (4, 2), 1), (3, (3, 2), 2), (8, (8,), 1)],
)
def test_what_each_number_of_ranks_can_share(
    first: int, later: tuple[int, ...], expected: int
) -> None:
    assert accumulation_for(first, later) == expected
    fits = [
        steps
        for steps in range(1, 3 * expected + 1)
        if not any(first * steps % ranks for ranks in later)
    ]
    assert fits == [expected, 2 * expected, 3 * expected]
