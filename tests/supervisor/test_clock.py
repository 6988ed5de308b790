"""A supervisor's clock counts the time in which it could run, so that nobody is blamed for a job's suspension."""

from __future__ import annotations

import pytest

from srunddp.supervisor import clock
from srunddp.supervisor.clock import ActiveClock


class Monotonic:
    """The kernel's clock, moved by hand."""

    now = 5000.0

    def monotonic(self) -> float:
        return self.now


@pytest.mark.parametrize(
    ("waits", "counted"),
    [
        ([(0.0, 2.0), (0.3, 2.0), (2.0, 2.0)], 2.3),
        ([(3600.0, 5.0), (3600.0, 0.0)], 7.0),  # of a suspension a second counts at most
    ],
)
def test_a_wait_counts_for_no_more_than_was_asked(
    waits: list[tuple[float, float]], counted: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel = Monotonic()
    monkeypatch.setattr(clock, "time", kernel)
    ours = ActiveClock()
    for passed, asked in waits:
        kernel.now += passed
        ours.advance(asked)
    assert ours.now == pytest.approx(counted)
