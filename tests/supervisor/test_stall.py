"""Ranks that have marked a step are to mark more; when none does, the one that the others wait for is named."""

from __future__ import annotations

from srunddp.supervisor.stall import StallDetector
from tests.support.recorded_writes import ALL_REDUCE, LOAD_BATCH

NODES = {0: "node01", 1: "node02", 2: "node03"}


def stalled() -> StallDetector:
    """Of three ranks, at 10 s; each has made five steps by then."""
    stall = StallDetector(4.0)
    for rank in NODES:
        stall.note(rank, 5, 10.0)
    return stall


def test_without_a_step_nothing_is_expected() -> None:
    stall = StallDetector(4.0)
    for rank in NODES:
        stall.note(rank, 0, 10.0)
    assert stall.due is None
    assert not stall.is_new(1e9)


def test_without_a_limit_nothing_is_expected() -> None:
    stall = StallDetector(0.0)
    stall.note(0, 5, 10.0)
    assert not stall.is_new(1e9)


def test_steps_of_any_rank_put_it_off() -> None:
    stall = stalled()
    assert not stall.is_new(13.9)
    stall.note(2, 6, 13.9)
    assert not stall.is_new(17.8)
    stall.note(2, 6, 17.8)
    assert stall.is_new(17.9)


def test_a_last_step_disarms_and_a_further_one_arms_again() -> None:
    stall = stalled()
    for rank in NODES:
        stall.note(rank, 0, 11.0)
    assert not stall.is_new(1e9)
    stall.note(1, 6, 20.0)
    assert stall.is_new(24.0)


def test_a_rank_that_is_through_is_not_waited_for() -> None:
    stall = stalled()
    for rank in NODES:
        stall.forget(rank)
    assert not stall.is_new(1e9)


def test_the_ranks_are_asked_once_and_the_verdict_waits_for_their_answers() -> None:
    stall = stalled()
    assert stall.is_new(14.0)
    stall.gather([0, 1, 2], 14.0)
    assert not stall.is_new(14.5)
    stall.hear(0, ALL_REDUCE)
    stall.hear(2, ALL_REDUCE)
    assert not stall.is_told(14.5)
    assert stall.is_told(17.0), "one that does not answer is not waited for without limit"
    stall.hear(1, LOAD_BATCH)
    assert stall.is_told(14.6)


def test_the_verdict_says_where_the_culprit_is_and_where_the_others_wait() -> None:
    stall = stalled()
    stall.gather([0, 1, 2], 14.0)
    for rank, text in enumerate((ALL_REDUCE, LOAD_BATCH, ALL_REDUCE)):
        stall.hear(rank, text)
    found = stall.verdict(NODES, {})
    assert (found.ranks, found.node, found.exit_code) == ((1,), "node02", 124)
    assert found.cause == "no step for 4 s, in load_batch (train.py:7)"
    assert "in load_batch" in found.traceback
    assert found.notes == ("rank 0 on node01, rank 2 on node03 in all_reduce (distributed_c10d.py:3252)",)


def test_a_rank_that_gave_no_stack_is_named_as_such() -> None:
    stall = stalled()
    stall.gather([0, 1, 2], 14.0)
    stall.hear(0, ALL_REDUCE)
    stall.hear(2, ALL_REDUCE)
    found = stall.verdict(NODES, {})
    assert (found.ranks, found.cause) == ((1,), "no step for 4 s, in no stack")


def test_a_rank_that_left_before_is_mentioned() -> None:
    stall = stalled()
    stall.forget(0)
    stall.gather([1, 2], 14.0)
    stall.hear(1, ALL_REDUCE)
    stall.hear(2, ALL_REDUCE)
    assert "rank 0 on node01 left with exit code 0 before" in stall.verdict(NODES, {0: "node01"}).notes
