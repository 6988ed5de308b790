"""A worker that is stopped, by times: for how long it may be, and how it is made to go."""

from __future__ import annotations

import os
import signal
import subprocess

import pytest

from srunddp.supervisor.worker_process import WorkerProcess


def stopped_worker() -> tuple[subprocess.Popen[bytes], WorkerProcess]:
    child = subprocess.Popen(["sleep", "600"])
    worker = WorkerProcess(child.pid)
    child.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, child.pid, os.WSTOPPED | os.WNOWAIT)
    worker.collect(100.0)
    return child, worker


def test_a_stopped_worker_is_overdue_after_ten_seconds() -> None:
    """Asking changes nothing, and nothing is due again and again afterwards."""
    child, worker = stopped_worker()
    try:
        assert worker.overdue(109.9) is None
        assert worker.tick(109.5) == pytest.approx(0.5)
        assert worker.overdue(110.0) == worker.overdue(110.0) == ("stopped by SIGSTOP for 10 s", 147)
        assert worker.tick(110.0) is None
        child.send_signal(signal.SIGCONT)
        os.waitid(os.P_PID, child.pid, os.WCONTINUED | os.WNOWAIT)
        worker.collect(111.0)
        assert worker.overdue(200.0) is None
    finally:
        child.kill()
        child.wait()


def test_a_stopped_worker_that_is_to_end_is_killed_at_once() -> None:
    child, worker = stopped_worker()
    worker.end(105.0, ask=True)
    assert worker.overdue(120.0) is None
    worker.tick(105.0)
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    worker.collect(105.1)
    assert (worker.ended, worker.status) == (True, -signal.SIGKILL)
