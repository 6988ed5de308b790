"""Ranks that have made a step are to make more; when none does, the one that the others wait for is
named.
"""

from __future__ import annotations

from srunddp.supervisor.stall import StackRequest, StallDetector, find_stalled_rank
from tests.support.facts import tells
from tests.support.recorded_writes import ALL_REDUCE, BACKWARD, LOAD_BATCH

NODES = {0: "node01", 1: "node02", 2: "node03"}


def five_steps(timeout: float = 4.0) -> StallDetector:
    """Each of three ranks has made five at 10 s."""
    stall = StallDetector(timeout)
    for rank in NODES:
        stall.note(rank, 5, 10.0)
    return stall


def test_without_a_step_or_a_limit_nothing_is_expected() -> None:
    stall = StallDetector(4.0)
    for rank in NODES:
        stall.note(rank, 0, 10.0)
    assert (stall.due, stall.detected(1e9)) == (None, False)
    assert not five_steps(timeout=0.0).detected(1e9)


def test_steps_of_any_rank_put_it_off() -> None:
    stall = five_steps()
    assert not stall.detected(13.9)
    stall.note(2, 6, 13.9)
    assert not stall.detected(17.8)
    stall.note(2, 6, 17.8)
    assert stall.detected(17.9)
    assert stall.detected(17.9), "asking changes nothing"


def test_a_last_step_disarms_and_a_further_one_arms_again() -> None:
    stall = five_steps()
    for rank in NODES:
        stall.note(rank, 0, 11.0)
    assert not stall.detected(1e9)
    stall.note(1, 6, 20.0)
    assert stall.detected(24.0)


def begun(first_within: float = 30.0) -> StallDetector:
    """None of three ranks has made a step at 10 s."""
    stall = StallDetector(4.0, first_within)
    for rank in NODES:
        stall.note(rank, 0, 10.0)
    return stall


def test_a_first_step_is_expected_of_all_ranks_together() -> None:
    stall = begun()
    for rank in NODES:
        stall.note(rank, 0, 39.0)
    assert not stall.detected(39.9)
    assert stall.detected(40.0)
    found = find_stalled_rank({0: ALL_REDUCE, 1: LOAD_BATCH, 2: ALL_REDUCE}, stall, NODES, {})
    assert (found.ranks, found.exit_code) == ((1,), 124)
    assert tells(found.cause, "30 s", "load_batch (train.py:7)")
    stall.note(2, 1, 40.1)
    assert not stall.detected(44.0)
    assert stall.detected(44.1), "from then on the usual limit holds"
    stall.note(2, 0, 45.0, paused=True)
    assert not stall.detected(1e9)


def test_while_a_rank_pauses_no_first_step_is_expected() -> None:
    stall = begun()
    stall.note(1, 0, 12.0, paused=True)
    assert stall.due is None
    stall.note(1, 0, 500.0, paused=True)
    stall.note(1, 0, 505.0)
    assert not stall.detected(534.9)
    assert stall.detected(535.0)
    stall.note(1, 0, 600.0, paused=True)
    stall.remove(1)
    stall.note(2, 0, 601.0)
    assert stall.due is not None


def test_a_limit_has_no_effect_before_a_step_of_any_rank() -> None:
    """A last step is one, too, after which none is expected."""
    stall = StallDetector(4.0)
    assert not stall.has_no_effect(99.0)  # nobody has begun
    stall.note(0, 0, 1.0)
    stall.note(1, 0, 1.0)
    assert not stall.has_no_effect(4.9)
    assert stall.has_no_effect(5.0)
    stall.note(1, 1, 5.0)
    stall.note(1, 0, 6.0)
    assert not stall.has_no_effect(99.0)
    no_limit = StallDetector(0.0)
    no_limit.note(0, 0, 1.0)
    assert not no_limit.has_no_effect(99.0)


def test_of_ranks_that_are_over_no_first_step_is_expected() -> None:
    stall = begun()
    for rank in (0, 1):
        stall.remove(rank)
    assert stall.detected(40.0)
    stall.remove(2)
    assert not stall.detected(1e9)


def test_stacks_are_complete_with_all_answers_or_in_time() -> None:
    request = StackRequest([0, 1, 2], 17.0)
    request.add(0, ALL_REDUCE)
    request.add(2, "")
    request.add(7, ALL_REDUCE)  # was not asked
    assert not request.complete(16.9)
    assert request.complete(17.0)
    request.add(1, LOAD_BATCH)
    assert request.complete(14.6)
    assert request.stacks == {0: ALL_REDUCE, 1: LOAD_BATCH, 2: ""}


def test_the_root_cause_says_where_each_rank_is() -> None:
    found = find_stalled_rank(
        {0: ALL_REDUCE, 1: LOAD_BATCH, 2: ALL_REDUCE}, five_steps(), NODES, {}
    )
    assert (found.ranks, found.node, found.exit_code) == ((1,), "node02", 124)
    assert found.cause == "no step for 4 s, in load_batch (train.py:7)"
    assert "in load_batch" in found.traceback
    assert found.notes == (
        "rank 0 on node01, rank 2 on node03 in all_reduce (distributed_c10d.py:3252)",
    )
    found = find_stalled_rank({0: ALL_REDUCE, 1: "", 2: ALL_REDUCE}, five_steps(), NODES, {})
    assert found.ranks == (1,)
    assert tells(found.cause, "4 s", "no stack")
    found = find_stalled_rank({1: ALL_REDUCE, 2: ALL_REDUCE}, five_steps(), NODES, {0: "node01"})
    assert any(tells(note, "rank 0 on node01", "exit code 0") for note in found.notes)


def test_of_ranks_that_all_wait_the_one_at_another_place_is_named() -> None:
    """It has left out a collective, so it is the one that has made more steps."""
    stall = five_steps()
    stall.note(1, 6, 10.0)
    found = find_stalled_rank({0: ALL_REDUCE, 1: BACKWARD, 2: ALL_REDUCE}, stall, NODES, {})
    assert (found.ranks, found.node, found.suspect) == ((1,), "node02", "")
    assert tells(found.cause, "4 s", "_engine_run_backward", "others wait elsewhere")
    assert found.notes == (
        "rank 0 on node01, rank 2 on node03 in all_reduce (distributed_c10d.py:3252)",
    )
