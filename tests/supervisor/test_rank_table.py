"""Where each rank is, as rank 0 knows it: every state with every event, and what is counted."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from srunddp.supervisor.rank_table import RankEvent, RankState, RankTable
from tests.support import state_tables

WORKING, DONE, LEFT, FAILED, SPARE, DROPPED = RankState
SCRIPT_IS_OVER, WORKER_HAS_ENDED, HAS_FAILED, IS_DROPPED = RankEvent
EVENTS_OF_A_RANK = (SCRIPT_IS_OVER, WORKER_HAS_ENDED, HAS_FAILED)
# How a rank, or the task of a spare node, gets to a state, and what the events make of it.
AFTER = {
    WORKING: ((), (DONE, LEFT, FAILED)),
    DONE: ((SCRIPT_IS_OVER,), (DONE, LEFT, FAILED)),
    LEFT: ((SCRIPT_IS_OVER, WORKER_HAS_ENDED), (LEFT, LEFT, FAILED)),
    FAILED: ((HAS_FAILED,), (FAILED, FAILED, FAILED)),
}
AFTER_OF_SPARES = {
    SPARE: ((), (SPARE, LEFT, DROPPED)),
    LEFT: ((WORKER_HAS_ENDED,), (LEFT, LEFT, DROPPED)),
    DROPPED: ((IS_DROPPED,), (DROPPED, DROPPED, DROPPED)),
}


@pytest.mark.parametrize("state", AFTER)
@pytest.mark.parametrize("number", range(3))
def test_every_state_of_a_rank_with_every_event(state: RankState, number: int) -> None:
    before, after = AFTER[state]
    table = RankTable([0, 1])
    for event in before:
        table.apply(1, event)
    assert table[1] is state
    table.apply(1, EVENTS_OF_A_RANK[number])
    assert (table[0], table[1]) == (WORKING, after[number])


@pytest.mark.parametrize("state", AFTER_OF_SPARES)
@pytest.mark.parametrize("number", range(3))
def test_every_state_of_a_spare_task_with_every_event(state: RankState, number: int) -> None:
    before, after = AFTER_OF_SPARES[state]
    table = RankTable([0], [1])
    for event in before:
        table.apply(1, event)
    assert table[1] is state
    table.apply(1, (SCRIPT_IS_OVER, WORKER_HAS_ENDED, IS_DROPPED)[number])
    assert (table[0], table[1]) == (WORKING, after[number])


@given(
    st.lists(st.tuples(st.integers(0, 3), st.sampled_from(EVENTS_OF_A_RANK)), max_size=20),
    st.integers(0, 2),
)
def test_what_is_counted_is_what_the_ranks_have_said_however_often(
    said: list[tuple[int, RankEvent]], times: int
) -> None:
    """Three are ranks, and the fourth is the task of a spare node, which counts for nothing."""
    table = RankTable(range(3), [3])
    for rank, event in said:
        for _ in range(1 + times):
            table.apply(rank, IS_DROPPED if rank == 3 and event is HAS_FAILED else event)
    events = {rank: {event for each, event in said if each == rank} for rank in range(3)}
    assert table.scripts_are_over == all(events.values())
    assert table.workers_have_ended == all(WORKER_HAS_ENDED in each for each in events.values())
    assert table.someone_may_fail == any(
        not each & {WORKER_HAS_ENDED, HAS_FAILED} for each in events.values()
    )
    assert table.ranks_in(FAILED) == [rank for rank in range(3) if HAS_FAILED in events[rank]]


def test_the_tables_of_states_are_those_of_the_code() -> None:
    """Else run: python -m tests.support.state_tables."""
    page = state_tables.PAGE.read_text()
    assert state_tables.rendered(page) == page
