"""The worker gets each signal once: from its sender, or from the supervisor."""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from srunddp.supervisor.forwarding import HeldSignals, MissedSignal, SignalForwarding
from srunddp.supervisor.limits import Limits
from srunddp.supervisor.sentinel import Sentinel
from srunddp.supervisor.worker_process import WorkerProcess
from tests.conftest import ROOT
from tests.support.starting import until

LIMITS = Limits(signal_settles=0.05, sentinel_answers_within=5.0)
USR1 = signal.SIGUSR1
TERM = signal.SIGTERM


class MadeUpSentinel(Sentinel):
    """Answers when the test says so."""

    def __init__(self) -> None:
        ours, self.theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)
        super().__init__(0, ours)

    def say(self, *numbers: int) -> None:
        self.theirs.send(bytes((0, *numbers)))

    def questions(self) -> int:
        """How many have been asked since the last call."""
        count = 0
        while select.select([self.theirs], [], [], 0.0)[0]:
            self.theirs.recv(1)
            count += 1
        return count


@pytest.fixture
def sentinel() -> Iterator[MadeUpSentinel]:
    made_up = MadeUpSentinel()
    yield made_up
    made_up.close()
    made_up.theirs.close()


@pytest.fixture
def forwarding(sentinel: MadeUpSentinel) -> SignalForwarding:
    return SignalForwarding(sentinel, LIMITS)


def add(
    it: SignalForwarding,
    number: int,
    now: float,
    *,
    is_passed_on: bool = False,
    of_rank: bool = False,
) -> None:
    it.add(number, now, is_passed_on=is_passed_on, of_rank=of_rank)


@pytest.mark.parametrize("of_rank", [False, True])
def test_what_the_sentinel_has_not_got_is_passed_on_once(
    of_rank: bool, forwarding: SignalForwarding, sentinel: MadeUpSentinel
) -> None:
    assert forwarding.next_tick(1.0) is None
    add(forwarding, USR1, 1.0, of_rank=of_rank)
    assert forwarding.tick(1.0) == []
    assert forwarding.next_tick(1.0) == pytest.approx(0.05)
    assert sentinel.questions() == 0
    assert forwarding.tick(1.06) == []
    assert sentinel.questions() == 1
    sentinel.say()
    assert forwarding.on_answer() == [MissedSignal(USR1, of_rank)]
    assert forwarding.next_tick(1.06) is None


def test_what_the_sentinel_has_got_too_is_not(
    forwarding: SignalForwarding, sentinel: MadeUpSentinel
) -> None:
    add(forwarding, USR1, 1.0)
    add(forwarding, TERM, 1.0)
    forwarding.tick(1.06)
    sentinel.say(USR1)
    assert forwarding.on_answer() == [MissedSignal(TERM, of_rank=False)]
    # The answer to one question is none to the next.
    add(forwarding, USR1, 2.0)
    forwarding.tick(2.06)
    sentinel.say()
    assert forwarding.on_answer() == [MissedSignal(USR1, of_rank=False)]


def test_an_answer_counts_for_a_signal_whose_turn_comes_later(
    forwarding: SignalForwarding, sentinel: MadeUpSentinel
) -> None:
    add(forwarding, USR1, 1.0)
    add(forwarding, TERM, 1.04)
    forwarding.tick(1.06)
    sentinel.say(USR1, TERM)
    assert forwarding.on_answer() == []
    assert forwarding.next_tick(1.06) == pytest.approx(0.03)
    forwarding.tick(1.1)
    sentinel.say()
    assert forwarding.on_answer() == []


@pytest.mark.parametrize("reached", [(), (USR1,)])
def test_what_is_passed_on_already_says_nothing_of_the_next(
    reached: tuple[int, ...], forwarding: SignalForwarding, sentinel: MadeUpSentinel
) -> None:
    """As a signal from before the worker's time."""
    add(forwarding, USR1, 1.0, is_passed_on=True)
    forwarding.tick(1.06)
    sentinel.say(*reached)
    assert forwarding.on_answer() == []
    add(forwarding, USR1, 2.0)
    forwarding.tick(2.06)
    sentinel.say()
    assert forwarding.on_answer() == [MissedSignal(USR1, of_rank=False)]


def test_several_of_a_number_count_as_one_and_are_anybody_s_if_one_is(
    forwarding: SignalForwarding, sentinel: MadeUpSentinel
) -> None:
    add(forwarding, TERM, 1.0, of_rank=True)
    add(forwarding, TERM, 1.01, of_rank=False)
    add(forwarding, TERM, 1.02, of_rank=True)
    forwarding.tick(1.06)
    sentinel.say()
    assert forwarding.on_answer() == [MissedSignal(TERM, of_rank=False)]


def test_without_a_sentinel_each_is_passed_on(
    forwarding: SignalForwarding, sentinel: MadeUpSentinel
) -> None:
    add(forwarding, USR1, 1.0)
    sentinel.theirs.close()
    assert forwarding.on_answer() == [MissedSignal(USR1, of_rank=False)]
    assert forwarding.sentinel is None
    add(forwarding, TERM, 2.0)
    assert forwarding.tick(2.06) == [MissedSignal(TERM, of_rank=False)]


def test_a_sentinel_that_does_not_answer_is_given_up(
    forwarding: SignalForwarding, sentinel: MadeUpSentinel
) -> None:
    add(forwarding, USR1, 1.0)
    forwarding.tick(1.06)
    assert forwarding.tick(6.0) == []
    assert forwarding.next_tick(6.0) == pytest.approx(0.06)
    assert forwarding.tick(6.1) == [MissedSignal(USR1, of_rank=False)]
    sentinel.say(USR1)  # late
    assert forwarding.on_answer() == []
    add(forwarding, USR1, 7.0)
    assert forwarding.tick(7.06) == [MissedSignal(USR1, of_rank=False)]


# A real one, whose parent is a process group of its own.
REAL = """
import json, os, select, signal, sys
from srunddp.supervisor import signals
from srunddp.supervisor.sentinel import Sentinel
signals.block()
sentinel = Sentinel.start()
print(sentinel.pid, flush=True)
for line in sys.stdin:
    sentinel.ask()
    select.select([sentinel], [], [], 30.0)
    print(json.dumps(sorted(sentinel.answer())), flush=True)
"""


@contextmanager
def real_sentinel() -> Iterator[tuple[subprocess.Popen[str], int]]:
    """A process with a sentinel, and the sentinel's process id."""
    with subprocess.Popen(
        [sys.executable, "-c", REAL],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as parent:
        assert parent.stdout
        try:
            yield parent, int(parent.stdout.readline())
        finally:
            parent.kill()


def asked(parent: subprocess.Popen[str]) -> list[int]:
    assert parent.stdin
    assert parent.stdout
    parent.stdin.write("\n")
    parent.stdin.flush()
    return list(json.loads(parent.stdout.readline()))


def test_the_sentinel_notes_what_comes_to_its_group_and_lives_on() -> None:
    with real_sentinel() as (parent, _):
        assert asked(parent) == []
        os.kill(parent.pid, signal.SIGUSR1)
        assert asked(parent) == []
        # Those that the parent blocks too, as it is to go on.
        numbers = [signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM, signal.SIGTSTP]
        for number in numbers:
            os.killpg(parent.pid, number)
        assert asked(parent) == sorted(numbers)
        assert asked(parent) == []


def test_the_sentinel_ends_with_its_parent_and_keeps_no_descriptor() -> None:
    with real_sentinel() as (parent, pid):
        # Its socket, and the descriptor of the signals.
        until(lambda: len(os.listdir(f"/proc/{pid}/fd")) == 2)
        parent.kill()
        until(
            lambda: not Path(f"/proc/{pid}/fd").exists() or not os.path.exists(f"/proc/{pid}/exe")
        )


def test_a_held_signal_comes_when_the_worker_can_take_it() -> None:
    code = (
        "import signal, sys, time; print('began', flush=True); sys.stdin.readline();"
        " signal.signal(signal.SIGUSR1, lambda *_: print('got', flush=True)); time.sleep(60)"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as worker:
        assert worker.stdin
        assert worker.stdout
        assert worker.stdout.readline() == "began\n"
        held = HeldSignals(WorkerProcess(worker.pid))
        assert held.tick() is None
        held.add([signal.SIGUSR1])
        for _ in range(5):
            assert held.tick() is not None
        assert worker.poll() is None
        worker.stdin.write("\n")
        worker.stdin.flush()
        end = time.monotonic() + 30.0
        while held.tick() is not None:
            assert time.monotonic() < end
            time.sleep(0.02)
        assert worker.stdout.readline() == "got\n"
        worker.kill()
