"""Whether a process that is being ended does anything."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from srunddp.supervisor.activity import WorkerActivity
from srunddp.supervisor.stacks import StackDump
from srunddp.telemetry import TelemetryPage
from tests.conftest import ROOT
from tests.support.starting import until, write
from tests.support.worlds import is_gone

LIMIT = 30.0
PROGRAM = """
import ctypes, os, sys, threading, time
from pathlib import Path
from srunddp.supervisor.activity import arm
from srunddp.supervisor.stacks import StackDump
from srunddp.telemetry import TelemetryPage

def block():
    libc = ctypes.CDLL(None)
    lock = ctypes.create_string_buffer(64)
    libc.pthread_mutex_lock(lock)
    Path("ready").touch()
    libc.pthread_mutex_lock(lock)

def write():
    with open("file", "wb", buffering=0) as file:
        while True:
            file.write(bytes(8192))
            time.sleep(0.01)

StackDump(int(sys.argv[2])).arm()
arm(TelemetryPage(descriptor=int(sys.argv[1])).answer_probe)
"""
SLEEP = "Path('ready').touch(); time.sleep(600)"
READ = "Path('ready').touch(); os.read(os.pipe()[0], 1)"
LOCK = "lock = threading.Lock(); lock.acquire(); Path('ready').touch(); lock.acquire()"
COMPUTE = "Path('ready').touch()\nwhile True: pass"
WRITES = "threading.Thread(target=write, daemon=True).start(); block()"
SAVES = "from torch import serialization; serialization.save(block)"
FORKS = "if os.fork(): block()\nwhile True: time.sleep(0.01)"
COMMAND = "os.system('touch ready; while :; do echo; sleep 0.05; done > file')"
EXECS = "os.execv('/bin/sh', ['sh', '-c', 'touch ready; read line'])"


@contextmanager
def worker(folder: Path, program: str) -> Iterator[WorkerActivity]:
    """A process that is at work."""
    page = TelemetryPage()
    dump = StackDump()
    script = write(folder / "work.py", PROGRAM + program)
    # A module of that name, as torch takes seconds to import.
    write(folder / "torch" / "__init__.py", "")
    write(folder / "torch" / "serialization.py", "def save(block):\n    block()\n")
    with subprocess.Popen(
        [sys.executable, script, str(page.descriptor), str(dump.descriptor)],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": f"{folder}:{ROOT}"},
        pass_fds=(page.descriptor, dump.descriptor),
        stdin=subprocess.PIPE,
        start_new_session=True,
    ) as process:
        try:
            until((folder / "ready").exists)
            yield WorkerActivity(process.pid, page.answered_probes, dump)
        finally:
            os.killpg(process.pid, signal.SIGKILL)  # what it has forked, too


@pytest.mark.slow
@pytest.mark.parametrize("program", [SLEEP, READ, LOCK, COMPUTE, WRITES, COMMAND, SAVES, EXECS])
def test_what_runs_python_or_writes_is_active(tmp_path: Path, program: str) -> None:
    """And a program that the script has become cannot be asked."""
    with worker(tmp_path, program) as activity:
        for _ in range(5):
            until(activity.look, LIMIT)
        assert not is_gone(activity.pid)


@pytest.mark.slow
@pytest.mark.parametrize("program", ["block()", FORKS])
def test_what_waits_in_c_is_not(tmp_path: Path, program: str) -> None:
    """What it has forked answers for nobody."""
    with worker(tmp_path, program) as activity:
        # It is ready before it waits, and until then it answers.
        wchan = Path(f"/proc/{activity.pid}/wchan")
        until(lambda: wchan.read_text().startswith("futex"), LIMIT)
        assert activity.look(), "there is nothing yet to compare with"
        until(lambda: not activity.look(), LIMIT)
        assert not any(activity.look() for _ in range(5))
