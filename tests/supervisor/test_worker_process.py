"""A worker that is stopped, by times: for how long it may be, and how it is made to go. And what it
has started, which ends with it.
"""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import pytest

from srunddp.supervisor.limits import Limits
from srunddp.supervisor.worker_messages import Leave, ScriptIsDone, StartedMpi
from srunddp.supervisor.worker_process import WorkerProcess, pipe
from tests.conftest import ROOT
from tests.support.starting import LONG, python, until
from tests.support.worlds import is_gone, named, run, world


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
        assert (
            worker.overdue(110.0) == worker.overdue(110.0) == ("stopped by SIGSTOP for 10 s", 147)
        )
        assert worker.tick(110.0) is None
        child.send_signal(signal.SIGCONT)
        os.waitid(os.P_PID, child.pid, os.WCONTINUED | os.WNOWAIT)
        assert worker.overdue(111.0) is None  # SIGCHLD has not been handled yet
        worker.collect(111.0)
        assert worker.overdue(200.0) is None
    finally:
        child.kill()
        child.wait()


def test_a_stopped_worker_that_is_to_end_is_killed_at_once() -> None:
    child, worker = stopped_worker()
    worker.end(105.0, ask=True, within=1.0)
    assert worker.overdue(120.0) is None
    worker.tick(105.0)
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    worker.collect(105.1)
    assert (worker.ended, worker.status) == (True, -signal.SIGKILL)


def test_a_worker_that_is_stopped_while_it_is_to_end_is_killed_at_once() -> None:
    """What time it has been given it does not use."""
    child = subprocess.Popen(["sleep", "600"])
    worker = WorkerProcess(child.pid)
    worker.end(100.0, ask=False, within=30.0)
    child.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, child.pid, os.WSTOPPED | os.WNOWAIT)
    worker.collect(101.0)
    worker.tick(101.0)
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    worker.collect(101.1)
    assert worker.status == -signal.SIGKILL


def test_what_a_worker_has_said_can_be_read_when_it_has_ended() -> None:
    """Also where it has not read all that it was sent, for which its kernel resets the pipe."""
    ours, theirs = pipe()
    assert ours.read() == []
    assert ours.open
    ours.send(Leave())
    theirs.send(ScriptIsDone(waits=True))
    theirs.send(StartedMpi())
    theirs.end.close()
    assert ours.read() == [ScriptIsDone(waits=True), StartedMpi()]
    assert not ours.open
    ours.end.close()


def test_a_worker_that_ignores_sigterm_is_killed_when_its_time_is_over() -> None:
    """It is asked once, and an earlier end may be set later on, but no later one."""
    command = ["env", "--ignore-signal=TERM", "cat"]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe) as child:  # which ends with its input
        assert child.stdin
        assert child.stdout
        child.stdin.write(b"ignores it\n")
        child.stdin.flush()
        assert child.stdout.readline() == b"ignores it\n"
        worker = WorkerProcess(child.pid)
        worker.end(100.0, ask=True, within=5.0)
        worker.end(100.0, ask=True, within=2.0)
        worker.end(101.0, ask=True, within=20.0)
        assert worker.tick(101.5) == pytest.approx(0.5)
        assert child.poll() is None
        worker.tick(102.0)
        assert child.wait(LONG) == -signal.SIGKILL


def test_a_worker_that_cannot_be_killed_is_given_up() -> None:
    """As in a kernel call that does not return; here one that nobody collects."""
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as child:
        worker = WorkerProcess(child.pid, limits=Limits(gives_up_after=10.0))
        worker.end(100.0, ask=False, within=1.0)
        assert worker.tick(101.0) == pytest.approx(10.0)
        worker.tick(110.9)
        assert not worker.ended
        worker.tick(111.0)
        assert (worker.ended, worker.given_up, worker.tick(112.0)) == (True, True, None)


FAMILY = """
import subprocess

def child(name, work=rest):
    if os.fork() == 0:
        say(name, os.getpid())
        work()
        os._exit(0)

def daemon():
    os.setsid()
    child("daemon")

child("forked")
child("between", daemon)
say("started", subprocess.Popen(["sleep", "600"], stdin=subprocess.DEVNULL).pid)
say("session", subprocess.Popen(["sleep", "600"], start_new_session=True).pid)
names = ("forked", "daemon", "started", "session")
wait_for(*(f"{name}.{RANK}" for name in names))
say("all")
wait_for(*(f"all.{rank}" for rank in range(SIZE)))
"""
NAMES = ("forked", "daemon", "started", "session")


def pids(folder: Path, rank: int, names: tuple[str, ...] = NAMES) -> list[int]:
    return [int((folder / f"{name}.{rank}").read_text()) for name in names]


@pytest.mark.parametrize(
    ("end", "code"),
    [
        ("", 0),
        ("raise ValueError('boom')", 1),
        ("os.kill(os.getpid(), signal.SIGKILL)", 137),
        ("os._exit(9)", 9),
    ],
)
def test_however_a_script_ends_none_of_its_processes_is_left(
    tmp_path: Path, end: str, code: int
) -> None:
    ended = run(tmp_path, f"{FAMILY}\n{end}", size=1)
    assert ended.codes == [code], ended.text
    assert [is_gone(pid) for pid in pids(tmp_path, 0)] == [True] * 4


def test_the_processes_of_all_ranks_end_with_the_world(tmp_path: Path) -> None:
    ended = run(tmp_path, f"{FAMILY}\nif RANK == 1: raise ValueError('boom')\nrest()")
    named(ended, 1, 1, "ValueError: boom")
    assert [is_gone(pid) for rank in range(3) for pid in pids(tmp_path, rank)] == [True] * 12


def test_what_python_forked_ends_with_a_killed_supervisor(tmp_path: Path) -> None:
    with world(tmp_path, f"{FAMILY}\nrest()", size=1) as it:
        until(lambda: it.has_said("all.0"))
        family = dict(zip(NAMES, pids(tmp_path, 0), strict=True))
        it.ranks[0].kill()
        try:
            until(lambda: is_gone(it.worker(0)) and is_gone(family["forked"]))
        finally:
            for pid in family.values():
                if not is_gone(pid):
                    it.send(signal.SIGKILL, pid)


LATE = """
import os, signal, sys, time
from srunddp.supervisor.limits import Limits
from srunddp.supervisor.worker_process import kill_forks_on_exit

def wait():  # the child gets no processor before its parent has ended
    while os.getppid() == parent: time.sleep(0.001)

parent = os.getpid()
os.register_at_fork(after_in_child=wait)
kill_forks_on_exit(parent)
if os.fork() == 0:
    print("alive", flush=True)
    os._exit(0)
os._exit(0)
"""


def test_a_fork_ends_whose_parent_was_gone_before_it_ran(tmp_path: Path) -> None:
    done = python("-c", LATE, folder=tmp_path, PYTHONPATH=str(ROOT))
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_what_a_thread_forked_goes_on_when_the_thread_has_ended(tmp_path: Path) -> None:
    script = """
import threading
def start():
    global child
    child = os.fork()
    if child == 0:
        wait_for("go")
        os._exit(7)
thread = threading.Thread(target=start)
thread.start()
thread.join()
while len(os.listdir("/proc/self/task")) > 1: time.sleep(0.01)
Path("go").touch()
sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
    assert run(tmp_path, script, size=1).codes == [7]


def test_a_daemon_of_the_script_lives_as_long_as_it(tmp_path: Path) -> None:
    script = (
        f"{FAMILY}\nsay('alive', all(not is_gone(Path(f'{{name}}.0').read_text()) for name in"
        " names))"
    )
    assert run(tmp_path, script, size=1).codes == [0]
    assert (tmp_path / "alive.0").read_text() == "True"
