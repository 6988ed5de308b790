"""A step is one write into memory that the supervisor reads, and nothing at all where there is none."""

from __future__ import annotations

import os
import subprocess
import sys
import timeit
from collections.abc import Iterator

import pytest

import srunddp
from srunddp.observe import marks
from srunddp.observe.marks import Marks, heartbeat, install


@pytest.fixture
def ours() -> Iterator[Marks]:
    found = Marks()
    install(found)
    yield found
    marks._marks = None


def in_child(*calls: dict[str, bool]) -> None:
    child = os.fork()
    if child == 0:
        for call in calls:
            heartbeat(**call)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0


def test_the_supervisor_reads_how_many_steps_its_worker_has_made(ours: Marks) -> None:
    assert ours.read() == 0
    in_child({}, {}, {})
    assert ours.read() == 3


def test_after_the_last_step_none_is_expected_and_the_count_goes_on_with_the_next(ours: Marks) -> None:
    in_child({}, {}, {"last": True})
    assert ours.read() == 0
    in_child({}, {}, {"last": True}, {})
    assert ours.read() == 3


def test_without_a_supervisor_a_heartbeat_does_nothing() -> None:
    assert marks._marks is None
    heartbeat()
    heartbeat(last=True)


def test_a_heartbeat_costs_less_than_ten_microseconds(ours: Marks) -> None:
    assert min(timeit.repeat(heartbeat, number=10_000, repeat=5)) / 10_000 < 10e-6


def test_a_heartbeat_is_found_in_the_package_and_does_not_bring_torch() -> None:
    assert srunddp.heartbeat is heartbeat
    program = "import sys, srunddp; srunddp.heartbeat(); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program]).returncode == 0


def test_the_worker_sees_that_a_verdict_stands_and_its_steps_do_not_hide_it(ours: Marks) -> None:
    child = os.fork()
    if child == 0:
        before = marks.is_condemned()
        heartbeat()
        ours.condemn()
        heartbeat()
        heartbeat(last=True)
        os._exit(0 if (before, marks.is_condemned()) == (False, True) else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert marks.is_condemned()
    assert ours.read() == 0


def test_without_a_supervisor_no_verdict_stands_and_there_is_no_guard(ours: Marks) -> None:
    assert marks.is_guarded()
    marks._marks = None
    assert not marks.is_guarded()
    assert not marks.is_condemned()
