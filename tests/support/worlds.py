"""Whole worlds on this node: real ranks of srunddp, each with a script that knows how far the
others are.
"""

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

# Above every script: all ranks are there before any goes on. `over` is said when a script's end has
# been reported.
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
        codes: Of the ranks; errors, printed: what each wrote on standard error and standard output.
        verdicts: All that were said, by whichever rank.
    """

    codes: list[int]
    errors: list[str]
    printed: list[str]

    @property
    def text(self) -> str:
        return "".join(self.errors)

    @property
    def verdicts(self) -> list[Verdict]:
        return verdicts(self.text)


class World:
    """The running ranks of one world; whoever made it is their launcher."""

    def __init__(self, folder: Path, ranks: list[subprocess.Popen[bytes]], limit: float) -> None:
        self.folder = folder
        self.ranks = ranks
        self.limit = limit

    def worker(self, rank: int) -> int:
        """The process id of a rank's script, when that is there."""
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
            # Each has a session of its own. A process that has ended gets nothing.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.ranks[rank].pid, number)

    def wait_until_handled(self, rank: int) -> None:
        """Until a supervisor has handled all that has come to it, as the end of a connection.

        It is asked twice for its worker's stack, which it prints: what had come before the first
        question has been seen with it at the latest, and what follows from that is done before the
        second.
        """
        for _ in range(2):
            before = self.written("stderr")[rank]
            self.send(signal.SIGURG, self.ranks[rank].pid)
            self._wait_for_output(rank, before)

    def _wait_for_output(self, rank: int, before: str) -> None:
        """Until a rank has written more on standard error than this."""
        until(lambda: self.written("stderr")[rank] != before)

    def written(self, stream: str) -> list[str]:
        """By each rank to ``stdout`` or ``stderr``."""
        files = [self.folder / f"{stream}.{rank}" for rank in range(len(self.ranks))]
        return [file.read_text(errors="replace") for file in files]

    def wait(self) -> Ended:
        """Until all ranks have ended; what they said is the message if they do not."""
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
    """Start one; whatever of it is still there at the end is killed.

    Args:
        variables: For all ranks; below: for a rank the command that is to start it.
        limit: Seconds until their end.
        limits: The supervisors', where they are not the usual ones.
    """
    write(folder / "train.py", TOGETHER + script)
    # The port follows from it: worlds that run at once do not see each other.
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
                    # What is sent to a rank's process group is not for the tests.
                    start_new_session=True,
                )
                ranks.append(process)
        yield World(folder, ranks, limit)
    finally:
        for process in ranks:
            process.kill()
            process.wait()


def run(folder: Path, script: str, *options: str, **how: Any) -> Ended:
    """A world from its start to its end."""
    with world(folder, script, *options, **how) as it:
        return it.wait()


def named(ended: Ended, rank: int, code: int, cause: str) -> None:
    """There is one verdict, upon this rank, and its code is that of all."""
    assert [(each.ranks, each.code) for each in ended.verdicts] == [((rank,), code)], ended.text
    assert ended.verdicts[0].node == NODE
    assert cause in ended.verdicts[0].cause, ended.text
    assert ended.codes == [code] * len(ended.codes), ended.text


def has_handled_signals(pid: int) -> bool:
    """Whether a process has none before it, of those that it blocks and reads, as a supervisor
    does.
    """
    status = Path(f"/proc/{pid}/status").read_text()
    return not any(
        int(mask, 16) for mask in re.findall(r"^(?:SigPnd|ShdPnd):\s*(\w+)", status, re.MULTILINE)
    )


def is_stopped(pid: int) -> bool:
    """Whether a process is stopped by a signal."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"


def is_gone(pid: int) -> bool:
    """Whether a process has ended; a zombie has."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True
