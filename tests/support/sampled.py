"""Runs a sampler under a supervisor in a separate process, and reads what the sampler has
written.
"""

from __future__ import annotations

import csv
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from tests.conftest import ROOT
from tests.support.starting import bare

NODE = "n1"
RANK = "SLURM_PROCID"
# A supervisor that starts a sampler, and then evaluates each line of its input. The processes that
# it starts are those of its task.
SUPERVISOR = """
import os, sys
from pathlib import Path
from srunddp.monitor.config import MonitorConfig
from srunddp.monitor.sampler.process import SamplerConfig, start
from srunddp.supervisor import signals
signals.become_subreaper()
signals.block()
held = os.pipe()
os.dup2(held[1], 77)
folder, seconds, variable, launcher = sys.argv[1:]
run = MonitorConfig(Path(folder), "n1", 0, True, float(seconds))
sampler = start(SamplerConfig(run, "eth0", variable, os.getpid(), int(launcher)))
print(sampler.pid, flush=True)
for line in sys.stdin:
    print(repr(eval(line)), flush=True)
"""


class Supervised:
    """A sampler, its supervisor and its files."""

    def __init__(self, process: subprocess.Popen[str], folder: Path) -> None:
        self.process = process
        self.folder = folder
        assert process.stdout is not None
        self.sampler = int(process.stdout.readline())

    def do(self, expression: str) -> str:
        """Have the supervisor evaluate a Python expression, and return the value as text."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(expression + "\n")
        self.process.stdin.flush()
        return self.process.stdout.readline().strip()

    def finish(self) -> str:
        return self.do("sampler.finish(5.0)").strip("'\"")

    def rows(self, name: str) -> list[dict[str, str]]:
        """Return the rows that are complete by now in one of the node's files."""
        return rows(self.folder / f"{NODE}.{name}.csv")


def rows(path: Path) -> list[dict[str, str]]:
    """Return the rows of a file that are complete by now; none if there is no file yet."""
    if not path.exists():
        return []
    return list(
        csv.DictReader(
            line for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")
        )
    )


@contextmanager
def supervised(
    folder: Path, seconds: float = 0.1, variable: str = "", launcher: int = 0, **variables: str
) -> Iterator[Supervised]:
    pipe = subprocess.PIPE
    with subprocess.Popen(
        [sys.executable, "-c", SUPERVISOR, str(folder), str(seconds), variable, str(launcher)],
        stdin=pipe,
        stdout=pipe,
        text=True,
        env=bare({"PYTHONPATH": str(ROOT), RANK: "0"} | variables),
        start_new_session=True,
    ) as process:
        try:
            yield Supervised(process, folder)
        finally:
            # The sampler is in the supervisor's process group, so this also kills a sampler that
            # has wrongly outlived the supervisor.
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
