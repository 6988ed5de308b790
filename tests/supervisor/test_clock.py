"""A supervisor's clock counts the time in which it could run, so that nobody is blamed for a job's
suspension.
"""

from __future__ import annotations

import itertools

import pytest

from srunddp.supervisor.clock import ActiveClock


@pytest.mark.parametrize(
    ("waits", "counted"),
    [
        ([(0.0, 2.0), (0.3, 2.0), (2.0, 2.0)], 2.3),
        ([(3600.0, 5.0), (3600.0, 0.0)], 7.0),  # of a suspension a second counts at most
    ],
)
def test_a_wait_counts_for_no_more_than_was_asked(
    waits: list[tuple[float, float]], counted: float
) -> None:
    times = itertools.accumulate((passed for passed, _ in waits), initial=5000.0)
    ours = ActiveClock(lambda: next(times))
    for _, asked in waits:
        ours.advance(asked)
    assert ours.now == pytest.approx(counted)
