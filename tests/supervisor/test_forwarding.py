"""The worker gets each signal once: from its sender, or from the supervisor."""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from srunddp.supervisor.forwarding import HeldSignals, MissedSignal, SignalForwarding
from srunddp.supervisor.limits import Limits
from srunddp.supervisor.sentinel import Sentinel
from srunddp.supervisor.signals import is_safe_for
from srunddp.supervisor.worker_process import WorkerProcess
from tests.conftest import ROOT
from tests.support.starting import until

LIMITS = Limits(signal_settles=0.05, sentinel_answers_within=5.0)
USR1 = signal.SIGUSR1
TERM = signal.SIGTERM


class MadeUpSentinel(Sentinel):
    """Answers when the test says so.

    Attributes:
        now: The time, by both clocks.
    """

    now = 0.0

    def __init__(self) -> None:
        ours, self.theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)
        super().__init__(0, ours)

    def say(self, *numbers: int, at: float | None = None) -> None:
        """Answer that it has got these signals, now if ``at`` is not given."""
        time_of_marks = self.now if at is None else at
        marks = [struct.pack("=Bd", number, time_of_marks) for number in numbers]
        self.theirs.send(b"!" + b"".join(marks))

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
    return SignalForwarding(sentinel, LIMITS, monotonic=lambda: sentinel.now)


def add(
    it: SignalForwarding,
    number: int,
    now: float,
    *,
    is_passed_on: bool = False,
    of_rank: bool = False,
) -> None:
    assert isinstance(it.sentinel, MadeUpSentinel | None)
    if it.sentinel:
        it.sentinel.now = now
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


def test_one_that_comes_while_the_sentinel_answers_is_another_one(
    forwarding: SignalForwarding, sentinel: MadeUpSentinel
) -> None:
    """Both to the group; and then one to the process alone."""
    add(forwarding, USR1, 1.0)
    forwarding.tick(1.06)
    add(forwarding, USR1, 1.0601)
    sentinel.theirs.send(b"!" + struct.pack("=Bd", USR1, 1.0) + struct.pack("=Bd", USR1, 1.0601))
    assert forwarding.on_answer() == []
    forwarding.tick(1.12)
    sentinel.say()
    assert forwarding.on_answer() == []
    add(forwarding, USR1, 1.3)
    forwarding.tick(1.36)
    sentinel.say()
    assert forwarding.on_answer() == [MissedSignal(USR1, of_rank=False)]


@pytest.mark.parametrize("late", ["supervisor", "sentinel"])
def test_either_may_notice_a_signal_late(
    late: str, forwarding: SignalForwarding, sentinel: MadeUpSentinel
) -> None:
    """On a busy machine, where a process gets no processor time for a while."""
    add(forwarding, USR1, 1.0)
    forwarding.tick(1.06)
    sentinel.say(USR1, at=0.4 if late == "supervisor" else 2.5)
    assert forwarding.on_answer() == []


def test_an_old_mark_says_nothing_of_a_new_signal(
    forwarding: SignalForwarding, sentinel: MadeUpSentinel
) -> None:
    add(forwarding, TERM, 1.0)
    forwarding.tick(1.06)
    sentinel.say(TERM, USR1)  # as after a kill of the sentinel alone
    assert forwarding.on_answer() == []
    add(forwarding, USR1, 9.0)
    forwarding.tick(9.06)
    sentinel.say()
    assert forwarding.on_answer() == [MissedSignal(USR1, of_rank=False)]


@pytest.mark.parametrize(
    ("first", "second"), [(signal.SIGTSTP, signal.SIGCONT), (signal.SIGCONT, signal.SIGTSTP)]
)
def test_of_a_stop_and_its_opposite_only_the_later_counts(
    first: int, second: int, forwarding: SignalForwarding, sentinel: MadeUpSentinel
) -> None:
    """The worker must not be stopped after it was continued."""
    add(forwarding, first, 1.0)
    add(forwarding, second, 1.02)
    forwarding.tick(1.08)
    sentinel.say()
    assert forwarding.on_answer() == [MissedSignal(second, of_rank=False)]


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


def test_an_answer_counts_that_this_process_reads_late(
    forwarding: SignalForwarding, sentinel: MadeUpSentinel
) -> None:
    """As after it was stopped itself."""
    add(forwarding, TERM, 1.0)
    forwarding.tick(1.06)
    sentinel.say(TERM)
    assert forwarding.tick(9.0) == []
    assert forwarding.sentinel is sentinel
    assert forwarding.next_tick(9.0) is None


def test_a_worker_that_goes_on_is_not_stopped_by_the_signal_from_before(
    forwarding: SignalForwarding, sentinel: MadeUpSentinel
) -> None:
    add(forwarding, signal.SIGTSTP, 1.0)
    add(forwarding, TERM, 1.0)
    forwarding.tick(1.06)
    forwarding.go_on(9.0)
    assert forwarding.tick(9.0) == []
    sentinel.say()
    assert forwarding.on_answer() == [MissedSignal(TERM, of_rank=False)]


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
    print(json.dumps([mark.number for mark in sentinel.answer()]), flush=True)
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
        assert sorted(asked(parent)) == sorted(numbers)
        assert asked(parent) == []


def test_the_sentinel_ends_with_its_parent_and_keeps_no_descriptor() -> None:
    with real_sentinel() as (parent, pid):
        # Its socket, and the descriptor of the signals.
        until(lambda: len(os.listdir(f"/proc/{pid}/fd")) == 2)
        parent.kill()
        until(
            lambda: not Path(f"/proc/{pid}/fd").exists() or not os.path.exists(f"/proc/{pid}/exe")
        )


WAITS = """
import signal, sys, threading, time
print("began", flush=True)
sys.stdin.readline()
"""


@pytest.mark.parametrize(
    "takes",
    [
        "signal.signal(signal.SIGUSR1, lambda *_: print('got', flush=True)); time.sleep(60)",
        # In a thread, as the kernel shows no signal as blocked that the main thread waits for.
        "signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1]); threading.Thread(target="
        "lambda: print(signal.sigwait([signal.SIGUSR1]) and 'got', flush=True)).start();"
        " time.sleep(60)",
    ],
    ids=["handles", "blocks"],
)
def test_a_held_signal_comes_when_the_script_can_take_it(takes: str) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", WAITS + takes],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as worker:
        try:
            assert worker.stdin
            assert worker.stdout
            assert worker.stdout.readline() == "began\n"
            held = HeldSignals(WorkerProcess(worker.pid))

            def looks() -> bool:
                return held.tick(lambda: None) is not None

            assert not looks()
            held.add([signal.SIGUSR1])
            for _ in range(5):
                assert looks()
            assert worker.poll() is None
            # The worker imports torch: it has a handler now, which is not the script's.
            held.worker_notes = True
            worker.stdin.write("\n")
            worker.stdin.flush()
            until(lambda: is_safe_for(worker.pid, signal.SIGUSR1))
            assert looks()
            held.add([])
            assert not looks()
            assert worker.stdout.readline() == "got\n"
        finally:
            worker.kill()


def test_a_signal_that_nobody_takes_is_looked_at_less_and_less_often() -> None:
    held = HeldSignals(WorkerProcess(os.getpid()), LIMITS)
    held.add([signal.SIGUSR2])
    waits = [held.tick(lambda: None) for _ in range(8)]
    assert waits[0] == LIMITS.held_signal_looks
    assert waits[-1] == LIMITS.held_signal_looks_at_least
