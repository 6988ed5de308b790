"""Ranks agree about once a second, however long a step takes."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from types import SimpleNamespace

import pytest

from srunddp.train.preemption.consensus import StopConsensus
from srunddp.train.preemption.signals import StopRequest
from tests.train.local_world import LocalWorld


def agreed_at(
    step_seconds: Callable[[int], float], steps: int, monkeypatch: pytest.MonkeyPatch, *restarts: int
) -> list[float]:
    """The times at which the ranks agree, in seconds; they are told before which steps others begin."""
    now = [0.0]
    monkeypatch.setattr("srunddp.train.preemption.consensus.time", SimpleNamespace(perf_counter=lambda: now[0]))
    consensus, times = StopConsensus(LocalWorld()), []
    for step in range(steps):
        if step in restarts:
            consensus.restart()
        now[0] += step_seconds(step)
        if consensus.due():
            consensus.all_reduce(StopRequest.NONE, 0, checkpoint_due=False)
            times.append(now[0])
    return times


@pytest.mark.parametrize("seconds", [0.02, 0.3, 2.5])
def test_ranks_agree_about_once_a_second(seconds: float, monkeypatch: pytest.MonkeyPatch) -> None:
    times = agreed_at(lambda step: seconds, 600, monkeypatch)
    late = [after - before for before, after in itertools.pairwise(times)][8:]
    assert all(max(seconds, 0.5) - 0.01 <= gap <= max(seconds, 1.0) + 0.01 for gap in late), late


def test_ranks_agree_at_the_latest_after_64_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    times = agreed_at(lambda step: 1e-4 if step < 1000 else 1.0, 1200, monkeypatch)
    assert max(after - before for before, after in itertools.pairwise(times)) <= 64.0


def test_ranks_agree_at_once_where_other_steps_begin(monkeypatch: pytest.MonkeyPatch) -> None:
    times = agreed_at(lambda step: 1e-4 if step < 1000 else 1.0, 1200, monkeypatch, 1000)
    assert max(after - before for before, after in itertools.pairwise(times)) <= 2.0
