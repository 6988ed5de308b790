"""Rank 0's guard holds the lines of all ranks, whatever their number and whatever comes over them."""

from __future__ import annotations

from tests.run.crowds import fail_in_a_crowd


def test_four_thousand_ranks_know_of_a_failure_within_two_seconds() -> None:
    seen = fail_in_a_crowd(lines=4095, culprit=1234)
    assert (seen.told, seen.codes, seen.code) == (4095, [7], 7)
    assert seen.took < 2.0, seen
    assert "srunddp: rank 1234 on node0154 failed: ValueError: boom (exit code 7)" in seen.errors
