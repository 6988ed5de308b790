"""Who may go on, and until when, on two sides whose clocks show different times."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from srunddp.spare_nodes.lease import Lease
from srunddp.supervisor.limits import Limits
from srunddp.supervisor.node_replacement import LeaseTimes
from tests.support.connections import Clock

SECONDS = 9.0
LIMITS = Limits(lease_ends_within=3.0)


@pytest.mark.parametrize("answered", [True, False])
def test_a_lease_lasts_while_our_time_comes_back(answered: bool) -> None:
    """That the other side is heard of is not enough: it may hear nothing."""
    clock = Clock()
    ours = Lease(SECONDS, clock, LIMITS)
    theirs = Lease(SECONDS, clock, LIMITS)
    for _ in range(10):
        clock.now += 1.0
        ours.note(*theirs.stamp())
        if answered:
            theirs.note(*ours.stamp())
    assert ours.ends == (clock.now - 1.0 if answered else 1000.0) + SECONDS
    assert ours.other_ended == clock.now + SECONDS + 3.0


@pytest.mark.parametrize("at", [None, float("inf"), float("nan"), -1e300], ids=str)
@pytest.mark.parametrize("echo", [None, float("inf"), float("nan"), -1e300, 1e300], ids=str)
def test_no_garbage_makes_a_lease_longer_or_shorter(at: float | None, echo: float | None) -> None:
    """Than one whose message has come back at once, or than none."""
    clock = Clock()
    theirs = Lease(SECONDS, clock, LIMITS)
    for times in ((None, None), (at, echo)):
        clock.now += 1.0
        theirs.note(*times)
        assert 1000.0 + SECONDS <= theirs.ends <= clock.now + SECONDS
    theirs.note(clock.now, clock.now)
    assert theirs.ends == clock.now + SECONDS
    assert theirs.stamp() == (clock.now, clock.now)


steps = st.tuples(
    st.sampled_from(["send", "arrive", "lose"]),
    st.booleans(),
    st.sampled_from([0.0, 0.1, 2.0, 8.0]),
)


@given(ahead=st.sampled_from([0.0, 1e6, -900.0]), does=st.lists(steps, max_size=30))
def test_a_worker_has_ended_before_the_other_side_says_so(
    ahead: float, does: list[tuple[str, bool, float]]
) -> None:
    """What is sent arrives in that order, or not, at any time."""
    clocks = Clock(1000.0), Clock(1000.0 + ahead)
    leases = [Lease(SECONDS, clock, LIMITS) for clock in clocks]
    coming: tuple[list[LeaseTimes], list[LeaseTimes]] = ([], [])
    for what, which, wait in does:
        for clock in clocks:
            clock.now += wait
        if what == "send":
            coming[not which].append(leases[which].stamp())
        elif coming[which]:
            times = coming[which].pop(0)
            if what == "arrive":
                leases[which].note(*times)
        for one, two in ((0, 1), (1, 0)):
            is_over_in = leases[one].ends - clocks[one].now
            has_ended_in = leases[two].other_ended - clocks[two].now
            assert is_over_in + LIMITS.lease_ends_within <= has_ended_in + 1e-6
