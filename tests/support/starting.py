"""Starts bin/srunddp as a user would, without the variables that a launcher sets."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from srunddp.util.kernel_file import children_of
from tests.conftest import ROOT

SRUNDDP = (sys.executable, str(ROOT / "bin" / "srunddp"))
NODE = socket.gethostname()
LONG = 180.0  # seconds; nothing takes this long unless it is broken
T = TypeVar("T")


def until(
    condition: Callable[[], T | None],
    limit: float = LONG,
    why: Callable[[], object] = lambda: "never",
) -> T:
    """Wait until a condition holds, and return its value. Between two calls of the condition, this
    sleeps nine times as long as a call takes, because the condition may start a command.

    Args:
        condition: Returns a true value once the wait is over.
        limit: Seconds after which the wait fails with an AssertionError.
        why: Returns the message of the AssertionError.
    """
    began = time.monotonic()
    end = began + limit
    while not (found := condition()):
        now = time.monotonic()
        assert now < end, why()
        time.sleep(min(max(0.01, 9 * (now - began)), 1.0))
        began = time.monotonic()
    return found


def bare(variables: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the environment variables of a login shell, and the given ones."""
    names = ("PATH", "HOME", "LANG", "TZ", "TMPDIR")
    return {name: os.environ[name] for name in names if name in os.environ} | dict(variables or {})


def python(
    *arguments: object, folder: Path, limit: float = LONG, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run plain Python, for a comparison with srunddp."""
    return _run((sys.executable, *map(str, arguments)), folder, variables, limit)


def srunddp(*arguments: object, folder: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    return _run((*SRUNDDP, *map(str, arguments)), folder, variables)


def _run(
    command: tuple[str, ...], folder: Path, variables: Mapping[str, str], limit: float = LONG
) -> subprocess.CompletedProcess[str]:
    null = subprocess.DEVNULL
    return subprocess.run(
        command,
        cwd=folder,
        env=bare(variables),
        capture_output=True,
        text=True,
        timeout=limit,
        stdin=null,
    )


@contextmanager
def started(*arguments: object, folder: Path, **variables: str) -> Iterator[subprocess.Popen[str]]:
    """Start srunddp in its own process group, with pipes. If it still runs at the end of the block,
    it is killed.
    """
    command = (*SRUNDDP, *map(str, arguments))
    pipe = subprocess.PIPE
    with subprocess.Popen(
        command,
        cwd=folder,
        env=bare(variables),
        text=True,
        stdin=pipe,
        stdout=pipe,
        stderr=pipe,
        start_new_session=True,
    ) as process:
        try:
            yield process
        finally:
            if process.poll() is None:
                process.kill()  # and its worker with it


def read_line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def ended(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    """Wait until a process has ended. Return its exit code, and the rest of its standard output and
    standard error.
    """
    out, errors = process.communicate(timeout=LONG)
    return process.returncode, out, errors


def workers_of(supervisor: int) -> list[int]:
    """Return the process ids of a supervisor's children, without its sentinel. As long as the
    sentinel cannot be recognized, the result is empty: it is forked before the others.
    """
    children = children_of(supervisor)
    workers = [pid for pid in children if not is_sentinel(pid)]
    return workers if workers != children else []


def is_sentinel(pid: int) -> bool:
    """Return whether a child of a supervisor is the sentinel, which alone has a signalfd."""
    with contextlib.suppress(OSError):
        files = Path(f"/proc/{pid}/fd").iterdir()
        return any(os.readlink(file) == "anon_inode:[signalfd]" for file in files)
    return False


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


# The port of a run follows from the job's number, so worlds of tests that run at the same time do
# not see each other.
JOB = str(os.getpid())


def slurm(rank: int, size: int = 2, /, **changes: str) -> dict[str, str]:
    """Return the variables of a task in a made-up job step, whose tasks all run on this node."""
    variables = {
        "SLURM_JOB_ID": JOB,
        "SLURM_STEP_ID": "3",
        "SLURM_PROCID": str(rank),
        "SLURM_LOCALID": str(rank),
        "SLURM_NODEID": "0",
        "SLURM_STEP_NUM_TASKS": str(size),
        "SLURM_STEP_NODELIST": NODE,
        "SLURM_STEP_TASKS_PER_NODE": str(size),
        "SLURM_GTIDS": ",".join(map(str, range(size))),
        "SLURM_TASK_PID": "1",
        "SLURMD_NODENAME": NODE,
    }
    return variables | changes


def one_message(done: subprocess.CompletedProcess[str], code: int = 78) -> str:
    """Check that a process has ended with one error message of one line, and return the message."""
    assert done.returncode == code
    assert done.stdout == ""
    assert "Traceback" not in done.stderr
    assert done.stderr.startswith("srunddp: error: ")
    assert done.stderr.count("\n") == 1
    assert "; expected " in done.stderr
    assert " -> " in done.stderr
    return done.stderr.removeprefix("srunddp: error: ").rstrip()
