"""A signal, or the known end of the job, requests a stop; all else goes on as if nothing had happened."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from srunddp import telemetry
from srunddp.errors import ConfigError, Stopped
from srunddp.train.config import PreemptionConfig
from srunddp.train.preemption import signals as module
from srunddp.train.preemption.signals import Preemption, StopRequest, query_end_time
from tests.support.cost import in_empty_calls
from tests.support.starting import until
from tests.train.conftest import HERE, ROOT, fake_command

NOTHING = (StopRequest.NONE, 0)


@pytest.fixture(autouse=True)
def no_pending_requests() -> Iterator[None]:
    """What a test leaves is not for the next one."""
    yield
    module._pending_requests.clear()


def preemption(rank: int = 0, environ: dict[str, str] | None = None, **settings: Any) -> Preemption:
    return Preemption(PreemptionConfig(**settings), rank, environ or {})


# Signals.


@pytest.mark.parametrize(
    ("number", "request_"),
    [(signal.SIGUSR1, StopRequest.REQUEUE), (signal.SIGUSR2, StopRequest.REQUEUE), (signal.SIGTERM, StopRequest.STOP)],
)
def test_a_signal_is_a_request_on_every_rank(number: signal.Signals, request_: StopRequest) -> None:
    with preemption(rank=1) as it:
        assert it.pending() == NOTHING
        os.kill(os.getpid(), number)
        assert it.pending() == (request_, number)
        assert it.pending() == (request_, number)


@pytest.mark.parametrize("order", [(signal.SIGUSR2, signal.SIGTERM), (signal.SIGTERM, signal.SIGUSR2)])
def test_sigterm_goes_before_a_requeue_whichever_came_first(order: tuple[int, int]) -> None:
    with preemption() as it:
        for number in order:
            os.kill(os.getpid(), number)
        assert it.pending() == (StopRequest.STOP, signal.SIGTERM)


def test_what_a_signal_did_before_it_does_again_afterwards() -> None:
    got: list[int] = []
    before = signal.signal(signal.SIGUSR1, lambda number, _: got.append(number))
    try:
        with preemption() as it:
            os.kill(os.getpid(), signal.SIGUSR1)
        assert (it.pending()[0], got) == (StopRequest.REQUEUE, [])
        os.kill(os.getpid(), signal.SIGUSR1)
        assert got == [signal.SIGUSR1]
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_an_interrupt_while_leaving_ends_nothing() -> None:
    with pytest.raises(KeyboardInterrupt), preemption():
        os.kill(os.getpid(), signal.SIGINT)
    for leaves in (lambda it: os.kill(os.getpid(), signal.SIGTERM), Preemption.ignore_interrupts):
        with preemption() as it:
            leaves(it)
            os.kill(os.getpid(), signal.SIGINT)
            os.kill(os.getpid(), signal.SIGTERM)
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)


def test_a_signal_that_was_ignored_stays_so() -> None:
    before = signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    try:
        with preemption() as it:
            os.kill(os.getpid(), signal.SIGUSR1)
            assert it.pending() == NOTHING
        assert signal.getsignal(signal.SIGUSR1) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_outside_the_main_thread_no_handler_is_set() -> None:
    found = []

    def elsewhere() -> None:
        with preemption() as it:
            found.append((it.pending(), signal.getsignal(signal.SIGUSR2)))

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert found == [(NOTHING, signal.SIG_DFL)]


@pytest.mark.parametrize(
    ("name", "hint"),
    [("SIGUSR2", "write USR2"), ("usr1", "write USR1"), ("URS2", "write USR2"), ("TERM", "leave it out")],
)
def test_an_unknown_signal_is_an_error_that_names_the_nearest(name: str, hint: str) -> None:
    with pytest.raises(ConfigError, match=f"preemption.signals has '{name}'; expected .*USR2.* -> {hint}"):
        preemption(signals=(name,))


def exit_code_of(action: Callable[[], None]) -> int:
    """Of a process that is forked for it; 75 where the action ends well."""
    child, code = os.fork(), 1
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
        with preemption():
            page.announce_termination()
            os.kill(os.getpid(), signal.SIGTERM)

    assert exit_code_of(terminated) == -signal.SIGTERM


def test_after_the_agreement_no_signal_changes_the_exit_code() -> None:
    def stopped() -> None:
        with contextlib.suppress(Stopped), preemption():
            raise Stopped("stopped", 75)
        for number in (signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM):
            os.kill(os.getpid(), number)

    assert exit_code_of(stopped) == 75


def test_a_look_costs_no_more_than_some_empty_calls() -> None:
    """About 9 of them, or 0.2 microseconds."""
    with preemption() as it:
        assert in_empty_calls(it.pending) < 13


# The known end of the job.


def requested_after(**variables: str) -> float:
    """Seconds until rank 0 requests a requeue."""
    began = time.monotonic()
    with preemption(environ=variables) as it:
        until(lambda: it.pending() == (StopRequest.REQUEUE, 0))
    return time.monotonic() - began


def test_rank_0_requests_a_requeue_half_way_to_the_jobs_end() -> None:
    end = str(int(time.time()) + 4)
    with preemption(1, {"SLURM_JOB_END_TIME": end}) as other:
        assert 1.3 < requested_after(SLURM_JOB_END_TIME=end) < 2.5
        assert other.pending() == NOTHING


def test_the_lead_counts_where_it_is_less_than_half() -> None:
    it = preemption(environ={"SLURM_JOB_END_TIME": str(int(time.time()) + 1000)}, lead_seconds=100.0)
    with it:
        assert it._stop_at - time.monotonic() == pytest.approx(900, abs=2)


@pytest.mark.parametrize("end_time", [{}, {"SLURM_JOB_END_TIME": "0"}, {"SLURM_JOB_END_TIME": "soon"}])
def test_without_the_variable_slurm_is_asked_for_the_end_once(tmp_path: Path, end_time: dict[str, str]) -> None:
    end = int(time.time()) + 2
    assert (
        requested_after(**fake_command(tmp_path, "squeue", f'[ "$SLURM_TIME_FORMAT" = %s ] && echo {end}'), **end_time)
        < 2
    )
    assert (tmp_path / "calls").read_text() == "--noheader --jobs=1207 --format=%e\n"


@pytest.mark.parametrize("said", ["N/A", "Unknown", "UNLIMITED", "NONE", "", "1", "99999999999999999999", "2026-11-21"])
def test_an_end_that_is_none_is_none(tmp_path: Path, said: str) -> None:
    asked = threading.active_count()
    with preemption(environ=fake_command(tmp_path, "squeue", f"echo '{said}'")) as it:
        until(lambda: threading.active_count() == asked)
        assert it.pending() == NOTHING
        assert it._stop_at == float("inf")


def test_a_squeue_that_hangs_or_is_missing_delays_nobody(tmp_path: Path) -> None:
    began = time.monotonic()
    with preemption(environ=fake_command(tmp_path, "squeue", "exec sleep 60")):
        pass
    assert time.monotonic() - began < 10.0
    hangs = {"SLURM_JOB_ID": "1207", "PATH": f"{tmp_path}/bin:/usr/bin:/bin"}
    assert query_end_time(hangs, 0.3) == ""
    assert query_end_time(hangs | {"PATH": str(tmp_path)}) == ""


def test_without_a_job_nothing_is_asked(tmp_path: Path) -> None:
    variables = fake_command(tmp_path, "squeue", "") | {"SLURM_JOB_ID": "1; reboot"}
    threads = threading.active_count()
    for settings in ({"environ": variables}, {"environ": {}}, {"environ": variables, "lead_seconds": 0.0}):
        with preemption(**settings):
            assert threading.active_count() == threads
    assert not (tmp_path / "calls").exists()


# torch's own processes.


@pytest.mark.parametrize("method", ["fork", "forkserver", "spawn"])
def test_a_steps_signals_do_not_reach_loader_workers(method: str) -> None:
    command = [sys.executable, str(HERE / "shielded_workers.py"), method]
    with subprocess.Popen(
        command, env=os.environ | {"PYTHONPATH": str(ROOT)}, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
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


def test_a_signal_after_a_run_s_last_step_is_for_the_next_run() -> None:
    with Preemption(PreemptionConfig(lead_seconds=0), rank=0) as first:
        os.kill(os.getpid(), signal.SIGUSR1)
        until(lambda: first.pending() == (StopRequest.REQUEUE, signal.SIGUSR1))
    with Preemption(PreemptionConfig(lead_seconds=0), rank=0) as second:
        assert second.pending() == (StopRequest.REQUEUE, signal.SIGUSR1)
