"""A step is one write into memory that the supervisor reads, and nothing at all where there is
none.
"""

from __future__ import annotations

import math
import os
import signal
import time
from collections.abc import Callable, Iterator
from functools import partial

import pytest

from srunddp import telemetry
from srunddp.telemetry import TelemetryPage, heartbeat, install, stall_limit_suspended
from tests.support.cost import in_empty_calls
from tests.support.starting import until


@pytest.fixture
def ours(request: pytest.FixtureRequest) -> Iterator[TelemetryPage]:
    """A page for this process and those that it forks; one that is recorded where a test asks for
    `recording`.
    """
    found = TelemetryPage(recording="recording" in request.fixturenames)
    install(found)
    yield found
    install(None)


@pytest.fixture
def recording(ours: TelemetryPage) -> TelemetryPage:
    return ours


def in_child(*calls: Callable[[], object]) -> int:
    """How a child that makes these calls ended."""
    child = os.fork()
    if child == 0:
        for call in calls:
            call()
        os._exit(0)
    return os.waitpid(child, 0)[1]


last = partial(heartbeat, last=True)


def test_the_supervisor_reads_how_many_steps_its_worker_has_made(ours: TelemetryPage) -> None:
    assert ours.read() == 0
    assert in_child(heartbeat, heartbeat, heartbeat) == 0
    assert ours.read() == 3


def test_a_reader_amid_a_write_finds_no_figure_lower_than_before(recording: TelemetryPage) -> None:
    child = os.fork()
    if child == 0:
        while True:
            recording.add_step(1 << 24, 1.0, 0.5, 0.25)
            recording.beat()
    try:
        until(recording.read)
        end = time.monotonic() + 1.0
        found = (0.0,) * 8
        while time.monotonic() < end:
            before = found
            found = (recording.read(), *recording.read_steps())
            assert all(now >= then for now, then in zip(found, before, strict=True)), (
                before,
                found,
            )
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def test_after_the_last_step_none_is_expected_until_the_next(ours: TelemetryPage) -> None:
    assert in_child(heartbeat, heartbeat, last) == 0
    assert ours.read() == 0
    assert in_child(heartbeat, heartbeat, last, heartbeat) == 0
    assert ours.read() == 3


def test_a_heartbeat_costs_no_more_than_some_empty_calls(ours: TelemetryPage) -> None:
    assert in_empty_calls(heartbeat) < 60


def test_the_worker_sees_an_announced_termination_and_its_steps(ours: TelemetryPage) -> None:
    assert in_child(heartbeat, lambda: os._exit(telemetry.is_terminating())) == 0
    ours.announce_termination()
    assert ours.read() == 1
    assert in_child(heartbeat, last, lambda: os._exit(not telemetry.is_terminating())) == 0
    assert ours.read() == 0


def test_without_a_supervisor_a_heartbeat_does_nothing(ours: TelemetryPage) -> None:
    """Nor is a termination announced."""
    assert telemetry.is_supervised()
    install(None)
    assert not telemetry.is_supervised()
    assert not telemetry.is_terminating()
    heartbeat()
    last()
    assert (ours.count, ours.read()) == (0, 0)


def test_events_outlive_the_worker_with_their_time_and_figure(recording: TelemetryPage) -> None:
    began = time.time()
    tell = [partial(telemetry.event, "epoch", 3), partial(telemetry.event, "evaluation")]
    assert in_child(*tell, lambda: os.kill(os.getpid(), signal.SIGKILL)) == signal.SIGKILL
    events, seen = recording.events(0)
    assert ([event.name for event in events], seen) == (["epoch", "evaluation"], 2)
    assert events[0].value == 3
    assert math.isnan(events[1].value)
    assert began <= events[0].time <= events[1].time <= time.time()
    assert recording.events(seen) == ([], 2)


def test_of_more_events_than_have_room_the_newest_are_left(recording: TelemetryPage) -> None:
    for number in range(5000):
        telemetry.event("epoch", number)
    events, seen = recording.events(100)
    assert seen == 5000
    assert [event.value for event in events] == list(range(5000 - 4096, 5000))


def test_the_first_step_is_an_event_and_the_others_are_not(recording: TelemetryPage) -> None:
    for _ in range(3):
        heartbeat()
    assert [event.name for event in recording.events(0)[0]] == ["step"]


def test_without_monitoring_there_are_no_events_and_no_steps(ours: TelemetryPage) -> None:
    telemetry.event("epoch", 1)
    assert telemetry.active_page() is None
    assert ours.events(0) == ([], 0)


def test_the_longest_step_is_reset_when_it_was_read(recording: TelemetryPage) -> None:
    recording.start_epoch(1)
    for seconds in (0.25, 0.5, 0.25):
        recording.add_step(8, seconds, seconds / 2, seconds / 4)
    assert recording.snapshot() == (3, 24, 1.0, 0.5, 0.25, 0.5, 1)
    recording.add_step(8, 0.25, 0.125, 0.0625)
    assert recording.snapshot().longest_step_s == 0.25


def test_a_pause_can_be_told_from_a_start_without_a_step(ours: TelemetryPage) -> None:
    """Also before the first step, as for a long evaluation at the beginning."""
    assert not ours.is_paused()
    with stall_limit_suspended():
        assert ours.is_paused()
        with stall_limit_suspended():
            pass
        assert ours.is_paused()
    assert (ours.is_paused(), ours.read()) == (False, 0)
    last()
    assert ours.is_paused()
    with stall_limit_suspended():
        pass
    assert ours.is_paused(), "no step is expected until the next one"
    heartbeat()
    assert (ours.is_paused(), ours.read()) == (False, 1)


def test_what_is_suspended_is_no_step_and_no_limit_counts(ours: TelemetryPage) -> None:
    """Before the first step, and after the last one, it leaves things as they are."""
    seen = []
    steps: tuple[Callable[[], object], ...] = (lambda: None, heartbeat, last)
    for before in steps:
        before()
        with stall_limit_suspended():
            seen.append(ours.read())
        seen.append(ours.read())
    assert seen == [0, 0, 0, 1, 0, 0]
