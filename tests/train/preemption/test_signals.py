"""A signal, or the known end of the job, requests a stop; all else goes on as if nothing had
happened.
"""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import psutil
import pytest

from srunddp import telemetry
from srunddp.errors import ConfigError, Stopped
from srunddp.train.config import PreemptionConfig
from srunddp.train.preemption.signals import StopRequest, StopRequests, query_end_time
from tests.support.starting import LONG, until
from tests.train.conftest import HERE, ROOT, fake_command

FORK = multiprocessing.get_context("fork")
NOTHING = (StopRequest.NONE, 0)


def requests(rank: int = 0, environ: dict[str, str] | None = None, **settings: Any) -> StopRequests:
    return StopRequests(PreemptionConfig(**settings), rank, environ or {})


# Signals.


@pytest.mark.parametrize(
    ("number", "request_"),
    [
        (signal.SIGUSR1, StopRequest.REQUEUE),
        (signal.SIGUSR2, StopRequest.REQUEUE),
        (signal.SIGTERM, StopRequest.STOP),
    ],
)
def test_a_signal_is_a_request_on_every_rank(number: signal.Signals, request_: StopRequest) -> None:
    with requests(rank=1) as it:
        assert it.pending() == NOTHING
        os.kill(os.getpid(), number)
        assert it.pending() == (request_, number)
        assert it.pending() == (request_, number)


@pytest.mark.parametrize(
    "order", [(signal.SIGUSR2, signal.SIGTERM), (signal.SIGTERM, signal.SIGUSR2)]
)
def test_sigterm_goes_before_a_requeue_whichever_came_first(order: tuple[int, int]) -> None:
    with requests() as it:
        for number in order:
            os.kill(os.getpid(), number)
        assert it.pending() == (StopRequest.STOP, signal.SIGTERM)


@pytest.mark.parametrize("ignored", [False, True])
def test_what_a_signal_did_before_it_does_again_afterwards(ignored: bool) -> None:
    """And one that was ignored stays so."""
    got: list[int] = []
    handler: Any = signal.SIG_IGN if ignored else lambda number, _: got.append(number)
    before = signal.signal(signal.SIGUSR1, handler)
    try:
        with requests() as it:
            os.kill(os.getpid(), signal.SIGUSR1)
        assert (it.pending()[0], got) == (StopRequest.NONE if ignored else StopRequest.REQUEUE, [])
        assert signal.getsignal(signal.SIGUSR1) is handler
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_an_interrupt_while_leaving_ends_nothing() -> None:
    with pytest.raises(KeyboardInterrupt), requests():
        os.kill(os.getpid(), signal.SIGINT)
    for leaves in (lambda it: os.kill(os.getpid(), signal.SIGTERM), StopRequests.ignore_interrupts):
        with requests() as it:
            leaves(it)
            os.kill(os.getpid(), signal.SIGINT)
            os.kill(os.getpid(), signal.SIGTERM)
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)


def test_outside_the_main_thread_no_handler_is_set(caplog: pytest.LogCaptureFixture) -> None:
    """Which rank 0 says, as a signal then ends the process."""
    caplog.set_level(logging.WARNING, "srunddp")
    found = []

    def elsewhere() -> None:
        with requests() as it:
            found.append((it.pending(), signal.getsignal(signal.SIGUSR2)))

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert found == [(NOTHING, signal.SIG_DFL)]
    assert "outside the main thread" in caplog.text


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("SIGUSR2", "write USR2"),
        ("usr1", "write USR1"),
        ("URS2", "write USR2"),
        ("TERM", "leave it out"),
    ],
)
def test_an_unknown_signal_is_an_error_that_names_the_nearest(name: str, hint: str) -> None:
    with pytest.raises(
        ConfigError, match=f"preemption.signals has '{name}'; expected .*USR2.* -> {hint}"
    ):
        requests(signals=(name,))


def exit_code_of(action: Callable[[], None]) -> int:
    """Of a process that is forked for it; 75 where the action ends well."""
    child = os.fork()
    code = 1
    if child == 0:
        try:
            action()
            code = 75
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_a_sigterm_after_an_announced_termination_ends_at_once() -> None:
    def terminated() -> None:
        page = telemetry.TelemetryPage()
        telemetry.install(page)
        with requests():
            page.announce_termination()
            os.kill(os.getpid(), signal.SIGTERM)

    assert exit_code_of(terminated) == -signal.SIGTERM


def test_after_the_agreement_no_signal_changes_the_exit_code() -> None:
    def stopped() -> None:
        with contextlib.suppress(Stopped), requests():
            raise Stopped("stopped", 75)
        for number in (signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM):
            os.kill(os.getpid(), number)

    assert exit_code_of(stopped) == 75


# The known end of the job.


NOW = 1_700_000_000


class Clock:
    """The time that the requests see: so many seconds have passed since NOW."""

    def __init__(self) -> None:
        self.passed = 0.0

    def time(self) -> float:
        return NOW + self.passed

    def monotonic(self) -> float:
        return 1000.0 + self.passed


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr("srunddp.train.preemption.signals.time", clock)
    return clock


def requested_after(it: StopRequests, clock: Clock, *seconds: float) -> list[bool]:
    """Whether it requests a requeue when so many seconds have passed."""
    found = []
    for passed in seconds:
        clock.passed = passed
        assert it.pending() in (NOTHING, (StopRequest.REQUEUE, 0))
        found.append(it.pending() != NOTHING)
    return found


def wait_for_squeue(before: set[threading.Thread]) -> None:
    """Until the thread that asks it has ended; ``before``: those that were there before."""
    until(lambda: not {*threading.enumerate()} - before)


def end_sleep() -> bool:
    """Whether a process below this one was a ``sleep``, which is killed."""
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if process.name() == "sleep":
                process.kill()
                return True
    return False


def test_rank_0_requests_a_requeue_half_way_to_the_jobs_end(clock: Clock) -> None:
    variables = {"SLURM_JOB_END_TIME": str(NOW + 4)}
    with requests(1, variables) as other, requests(0, variables) as it:
        assert requested_after(it, clock, 0.0, 1.9, 2.1) == [False, False, True]
        assert other.pending() == NOTHING


def test_the_lead_counts_where_it_is_less_than_half(clock: Clock) -> None:
    with requests(environ={"SLURM_JOB_END_TIME": str(NOW + 1000)}, lead_seconds=100.0) as it:
        assert requested_after(it, clock, 0.0, 899.0, 901.0) == [False, False, True]


@pytest.mark.parametrize(
    "end_time", [{}, {"SLURM_JOB_END_TIME": "0"}, {"SLURM_JOB_END_TIME": "soon"}]
)
def test_without_the_variable_slurm_is_asked_for_the_end_once(
    tmp_path: Path, clock: Clock, end_time: dict[str, str]
) -> None:
    variables = fake_command(tmp_path, "squeue", f'[ "$SLURM_TIME_FORMAT" = %s ] && echo {NOW + 4}')
    before = {*threading.enumerate()}
    with requests(environ=variables | end_time) as it:
        wait_for_squeue(before)
        assert requested_after(it, clock, 0.0, 1.9, 2.1) == [False, False, True]
    assert (tmp_path / "calls").read_text() == "--noheader --jobs=1207 --format=%e\n"


@pytest.mark.parametrize(
    "said", ["N/A", "Unknown", "UNLIMITED", "NONE", "", "1", "99999999999999999999", "2026-11-21"]
)
def test_an_end_that_is_none_is_none(tmp_path: Path, clock: Clock, said: str) -> None:
    before = {*threading.enumerate()}
    with requests(environ=fake_command(tmp_path, "squeue", f"echo '{said}'")) as it:
        wait_for_squeue(before)
        assert requested_after(it, clock, 0.0, 1e6, 1e12) == [False, False, False]


def test_a_squeue_that_hangs_or_is_missing_delays_nobody(tmp_path: Path) -> None:
    """The loop begins and ends while squeue has not answered."""
    before = {*threading.enumerate()}
    with requests(environ=fake_command(tmp_path, "squeue", "exec sleep 600")):
        pass
    assert {*threading.enumerate()} - before, "squeue was waited for"
    until(lambda: end_sleep() or not {*threading.enumerate()} - before)
    wait_for_squeue(before)
    hangs = {"SLURM_JOB_ID": "1207", "PATH": f"{tmp_path}/bin:/usr/bin:/bin"}
    assert query_end_time(hangs, 0.3) == ""
    assert query_end_time(hangs | {"PATH": str(tmp_path)}) == ""


def test_without_a_job_nothing_is_asked(tmp_path: Path) -> None:
    variables = fake_command(tmp_path, "squeue", "") | {"SLURM_JOB_ID": "1; reboot"}
    before = {*threading.enumerate()}
    cases: tuple[dict[str, Any], ...] = (
        {"environ": variables},
        {"environ": {}},
        {"environ": variables, "lead_seconds": 0.0},
    )
    for settings in cases:
        with requests(**settings):
            assert not {*threading.enumerate()} - before
    assert not (tmp_path / "calls").exists()


# Processes of the script.


def wait_for_ever(begun: Connection) -> None:
    begun.send(None)
    time.sleep(10 * LONG)


def end_of_fork(number: signal.Signals, *, at_once: bool) -> int | None:
    """The exit code of a process that is forked and gets a signal."""
    reader, writer = FORK.Pipe(duplex=False)
    process = FORK.Process(target=wait_for_ever, args=(writer,))
    process.start()
    assert process.pid
    if not at_once:
        assert reader.poll(LONG)
    os.kill(process.pid, number)
    process.join(LONG)
    code = process.exitcode
    process.kill()
    return code


def test_what_a_rank_forks_is_ended_by_sigterm_however_soon() -> None:
    """As many times as find a signal that would come too early."""
    with requests() as it:
        codes = {end_of_fork(signal.SIGTERM, at_once=True) for _ in range(50)}
        assert codes == {end_of_fork(signal.SIGTERM, at_once=False)} == {-signal.SIGTERM}
        assert it.pending() == NOTHING
        os.kill(os.getpid(), signal.SIGTERM)
        assert it.pending() == (StopRequest.STOP, signal.SIGTERM)


def test_so_is_what_a_thread_of_the_rank_forks() -> None:
    codes = []
    with requests():
        thread = threading.Thread(
            target=lambda: codes.append(end_of_fork(signal.SIGTERM, at_once=True))
        )
        thread.start()
        thread.join()
    assert codes == [-signal.SIGTERM]


def end_with_7(*_: object) -> None:
    os._exit(7)


@pytest.mark.parametrize("when", ["before", "since"])
def test_what_a_rank_forks_has_the_script_s_own_handler(when: str) -> None:
    before = signal.getsignal(signal.SIGTERM)
    try:
        if when == "before":
            signal.signal(signal.SIGTERM, end_with_7)
        with requests():
            if when == "since":
                signal.signal(signal.SIGTERM, end_with_7)
            assert end_of_fork(signal.SIGTERM, at_once=False) == 7
    finally:
        signal.signal(signal.SIGTERM, before)


def test_what_a_rank_forks_after_a_request_is_ended_by_ctrl_c() -> None:
    with requests() as it:
        it.ignore_interrupts()
        # By a KeyboardInterrupt, as in plain Python.
        assert end_of_fork(signal.SIGINT, at_once=False) == 1


def test_processes_beside_loader_workers_are_ended_by_sigterm(tmp_path: Path) -> None:
    """Also those of the fork server that was started for the loader."""
    done = subprocess.run(
        [sys.executable, str(HERE / "terminated_beside_workers.py")],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=LONG,
        check=False,
    )
    for method in ("fork", "spawn", "forkserver"):
        assert done.stdout.count(f"{method} ended with -15\n") == 2, done.stdout + done.stderr


# torch's own processes.


@pytest.mark.parametrize("method", ["fork", "forkserver", "spawn"])
def test_a_steps_signals_do_not_reach_loader_workers(method: str) -> None:
    command = [sys.executable, str(HERE / "shielded_workers.py"), method]
    with subprocess.Popen(
        command,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as rank:
        assert rank.stdin is not None
        assert rank.stdout is not None
        assert rank.stdout.readline() == "reading\n"
        below = psutil.Process(rank.pid).children(recursive=True)
        assert len(below) == {"fork": 2, "forkserver": 4, "spawn": 3}[method]
        for number in (signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM):
            for process in below:
                process.send_signal(number)
        print("go on", file=rank.stdin, flush=True)
        assert rank.stdout.readline() == "read on; the worker that hung ended with 0\n"
        still = [process for process in below if process.is_running()]
        assert len(still) == len(below) - 1
        rank.kill()
        until(lambda: not any(running(process) for process in still))


def running(process: psutil.Process) -> bool:
    return process.is_running() and process.status() != psutil.STATUS_ZOMBIE


@pytest.mark.parametrize(
    "ends", [contextlib.nullcontext(), pytest.raises(MemoryError)], ids=["well", "by an error"]
)
def test_a_signal_after_a_loop_s_end_is_for_the_next_one(
    ends: contextlib.AbstractContextManager[Any],
) -> None:
    """However it ended: a script may try again with a smaller batch."""
    with ends, requests() as first:
        os.kill(os.getpid(), signal.SIGUSR1)
        until(lambda: first.pending() == (StopRequest.REQUEUE, signal.SIGUSR1))
        if not isinstance(ends, contextlib.nullcontext):
            raise MemoryError
    with requests() as second:
        assert second.pending() == (StopRequest.REQUEUE, signal.SIGUSR1)
