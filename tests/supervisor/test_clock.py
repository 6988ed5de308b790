"""A supervisor's clock counts the time in which it could run, so that nobody is blamed for a job's suspension."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest

from srunddp.supervisor import clock
from srunddp.supervisor.clock import ActiveClock


class Monotonic:
    """The kernel's clock, moved by hand."""

    def __init__(self) -> None:
        self.now = 5000.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Monotonic:
    found = Monotonic()
    monkeypatch.setattr(clock, "time", found)
    return found


def test_a_wait_counts_as_long_as_it_took(kernel: Monotonic) -> None:
    ours = ActiveClock()
    for passed in (0.0, 0.3, 2.0):
        kernel.now += passed
        ours.advance(2.0)
    assert ours.now == pytest.approx(2.3)


def test_of_a_suspension_a_second_counts_at_most(kernel: Monotonic) -> None:
    ours = ActiveClock()
    kernel.now += 3600.0
    assert ours.advance(5.0) == pytest.approx(6.0)
    kernel.now += 3600.0
    assert ours.advance(0.0) == pytest.approx(7.0)


def test_a_process_that_was_stopped_has_not_lived_that_time() -> None:
    program = (
        "import time; from srunddp.supervisor.clock import ActiveClock\n"
        "clock, began = ActiveClock(), time.monotonic()\n"
        "print('ready', flush=True)\n"
        "while time.monotonic() < began + 2.0:\n    time.sleep(0.1); clock.advance(0.1)\n"
        "print(clock.now)\n"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        process.stdout.readline()
        os.kill(process.pid, signal.SIGSTOP)
        time.sleep(2.0)
        os.kill(process.pid, signal.SIGCONT)
        assert float(process.stdout.readline()) < 1.5
