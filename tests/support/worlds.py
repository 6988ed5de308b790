"""Runs complete worlds on this node: real ranks of srunddp whose scripts wait for each other."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.chaos.verdict import Verdict, verdicts
from tests.conftest import PROGRAMS
from tests.support.starting import LONG, NODE, SRUNDDP, bare, slurm, until, write

SIZE = 3
_jobs = itertools.count(os.getpid() * 100)

# The beginning of every script, which waits until the scripts of all ranks run. A rank says `over`
# when the end of its script has been reported to its supervisor.
TOGETHER = """
import atexit, ctypes, os, signal, sys, time
from pathlib import Path

RANK, SIZE = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])

def say(what, text=""):
    new = Path(f".{what}.{RANK}")
    new.write_text(str(text))
    new.rename(f"{what}.{RANK}")

def wait_for(*names):
    while not all(Path(name).exists() for name in names):
        time.sleep(0.01)

def state(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "Z"

def is_gone(pid):
    return state(pid) == "Z"

def wait_for_end(rank):
    wait_for(f"over.{rank}")
    while state(Path(f"supervisor.{rank}").read_text()) not in "SZ":  # it is passing that on
        time.sleep(0.01)

def miss_peer():
    # As torch says that a peer is gone: raised by C++ in a call, and by no raise statement.
    text = b"[gloo/transport/tcp/pair.cc:534] Connection closed by peer"
    ctypes.pythonapi.PyErr_SetString(ctypes.py_object(RuntimeError), text)

def rest():
    while True:
        time.sleep(0.05)

atexit.register(say, "over")
say("supervisor", os.getppid())
say("ready", os.getpid())
wait_for(*(f"ready.{rank}" for rank in range(SIZE)))
"""


@dataclass(frozen=True)
class Ended:
    """A world that is over.

    Attributes:
        codes: The exit codes of the ranks.
        errors: What each rank wrote to standard error.
        printed: What each rank wrote to standard output.
    """

    codes: list[int]
    errors: list[str]
    printed: list[str]

    @property
    def text(self) -> str:
        return "".join(self.errors)

    @property
    def verdicts(self) -> list[Verdict]:
        """All verdicts that any rank has printed."""
        return verdicts(self.text)


class World:
    """The running ranks of one world. This process is their launcher.

    Args:
        folder: The working directory, and the folder of the files by which the ranks wait for each
            other.
        ranks: The processes of the ranks, in their order.
        limit: Seconds after which :meth:`wait` gives up.
    """

    def __init__(self, folder: Path, ranks: list[subprocess.Popen[bytes]], limit: float) -> None:
        self.folder = folder
        self.ranks = ranks
        self.limit = limit

    def worker(self, rank: int) -> int:
        """Wait until a rank's script runs, and return its process id."""
        until((self.folder / f"ready.{rank}").exists)
        return int((self.folder / f"ready.{rank}").read_text())

    def workers(self) -> list[int]:
        return [self.worker(rank) for rank in range(len(self.ranks))]

    def has_said(self, what: str) -> bool:
        return (self.folder / what).exists()

    def send(self, number: int, *pids: int) -> None:
        for pid in pids:
            os.kill(pid, number)

    def launcher_sends(self, number: int, *ranks: int) -> None:
        """Send a signal to all processes of some ranks, or of all ranks, as a launcher does."""
        for rank in ranks or range(len(self.ranks)):
            # Each rank leads its own process group. The processes of a rank that has ended get no
            # signal.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.ranks[rank].pid, number)

    def wait_until_handled(self, rank: int) -> None:
        """Wait until a supervisor has handled everything that has reached it by now, such as the
        end of a connection.

        The supervisor is asked twice for its worker's stack, which it prints. When it answers the
        first time, it has seen everything that came before the question. When it answers the second
        time, it has done what followed from that.
        """
        for _ in range(2):
            before = self.written("stderr")[rank]
            self.send(signal.SIGURG, self.ranks[rank].pid)
            self._wait_for_output(rank, before)

    def _wait_for_output(self, rank: int, before: str) -> None:
        """Wait until a rank has written more to standard error than ``before``."""
        until(lambda: self.written("stderr")[rank] != before)

    def written(self, stream: str) -> list[str]:
        """Return what each rank has written so far to ``stdout`` or ``stderr``."""
        files = [self.folder / f"{stream}.{rank}" for rank in range(len(self.ranks))]
        return [file.read_text(errors="replace") for file in files]

    def wait(self) -> Ended:
        """Wait until all ranks have ended. If they do not end in time, the AssertionError has what
        they have written.
        """
        until(
            lambda: None not in [rank.poll() for rank in self.ranks],
            self.limit,
            lambda: self.written("stderr"),
        )
        return Ended(
            [rank.returncode for rank in self.ranks], self.written("stderr"), self.written("stdout")
        )


@contextmanager
def world(
    folder: Path,
    script: str,
    *options: str,
    size: int = SIZE,
    variables: dict[str, str] | None = None,
    below: dict[int, list[str]] | None = None,
    limit: float = LONG,
    limits: dict[str, float] | None = None,
) -> Iterator[World]:
    """Start a world. At the end of the block, the ranks that still run are killed.

    Args:
        folder: The ranks' working directory.
        script: The text of the script, which follows on :data:`TOGETHER`.
        options: Options of srunddp run.
        size: The number of ranks.
        variables: Further environment variables of all ranks.
        below: By rank, a command that starts the rank, such as a wrapper.
        limit: Seconds within which the ranks have to end.
        limits: The supervisor's times that differ from the usual ones.
    """
    write(folder / "train.py", TOGETHER + script)
    # The port of a run follows from the job's number, so worlds with different numbers can run at
    # the same time.
    job = str(next(_jobs))
    start: tuple[str, ...] = SRUNDDP
    if limits is not None:
        start = (sys.executable, str(PROGRAMS / "limited.py"), json.dumps(limits))
    ranks = []
    try:
        for rank in range(size):
            with (
                open(folder / f"stdout.{rank}", "wb") as out,
                open(folder / f"stderr.{rank}", "wb") as errors,
            ):
                environ = slurm(rank, size, SLURM_JOB_ID=job) | (variables or {})
                words = ("--quiet", f"--timeout={LONG}", *options, "train.py")
                command = [*(below or {}).get(rank, []), *start, *words]
                process = subprocess.Popen(
                    command,
                    cwd=folder,
                    env=bare(environ),
                    stdout=out,
                    stderr=errors,
                    # A signal to a rank's process group must not reach the tests.
                    start_new_session=True,
                )
                ranks.append(process)
        yield World(folder, ranks, limit)
    finally:
        for process in ranks:
            process.kill()
            process.wait()


def run(folder: Path, script: str, *options: str, **how: Any) -> Ended:
    """Start a world, and wait until its ranks have ended. The arguments are those of
    :func:`world`.
    """
    with world(folder, script, *options, **how) as it:
        return it.wait()


def named(ended: Ended, rank: int, code: int, cause: str) -> None:
    """Check that there is one verdict, that it names this rank, with this exit code and cause, and
    that all ranks have ended with the exit code.
    """
    assert [(each.ranks, each.code) for each in ended.verdicts] == [((rank,), code)], ended.text
    assert ended.verdicts[0].node == NODE
    assert cause in ended.verdicts[0].cause, ended.text
    assert ended.codes == [code] * len(ended.codes), ended.text


def has_handled_signals(pid: int) -> bool:
    """Return whether no signal is pending for a process. A supervisor blocks its signals and reads
    them, so none is pending once it has read all of them.
    """
    status = Path(f"/proc/{pid}/status").read_text()
    return not any(
        int(mask, 16) for mask in re.findall(r"^(?:SigPnd|ShdPnd):\s*(\w+)", status, re.MULTILINE)
    )


def is_stopped(pid: int) -> bool:
    """Return whether a process is stopped by a signal."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"


def is_gone(pid: int) -> bool:
    """Return whether a process has ended, even if it is still a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True
