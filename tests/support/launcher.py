"""Runs a launcher in a separate process: it starts a world, and sends a signal to all processes of
the world, as Slurm does.

``python -m tests.support.launcher FOLDER SCRIPT [OPTIONS]`` reads one line: the number of the
signal. If the input ends without a line, no signal is sent.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tests.conftest import ROOT
from tests.support.starting import bare
from tests.support.worlds import Ended, world


@dataclass
class Launcher:
    """A launcher that runs.

    Attributes:
        process: The launcher's process.
        supervisors: The process ids of the ranks' supervisors.
        workers: The process ids of the ranks' workers.
    """

    process: subprocess.Popen[str]
    supervisors: list[int]
    workers: list[int]

    def send(self, number: int) -> None:
        """Have the launcher send a signal to all processes of its ranks."""
        assert self.process.stdin
        self.process.stdin.write(f"{number}\n")
        self.process.stdin.flush()

    def wait(self) -> Ended:
        return Ended(**_read(self.process))


@contextmanager
def launched(folder: Path, script: str, *options: str, **variables: str) -> Iterator[Launcher]:
    """Start a launcher, which passes on the options and ``PYTHONPATH`` to the ranks. Kill it at the
    end of the block.
    """
    pipe = subprocess.PIPE
    command = [sys.executable, "-m", "tests.support.launcher", str(folder), script, *options]
    with subprocess.Popen(
        command, cwd=ROOT, env=bare(variables), stdin=pipe, stdout=pipe, text=True
    ) as process:
        try:
            yield Launcher(process, **_read(process))
        finally:
            process.kill()


def _read(process: subprocess.Popen[str]) -> dict[str, Any]:
    assert process.stdout
    return dict(json.loads(process.stdout.readline()))


def main(folder: str, script: str, *options: str) -> None:
    passed = {name: os.environ[name] for name in ("PYTHONPATH",) if name in os.environ}
    with world(Path(folder), script, *options, variables=passed) as it:
        supervisors = [rank.pid for rank in it.ranks]
        workers = it.workers()
        print(json.dumps({"supervisors": supervisors, "workers": workers}), flush=True)
        if number := sys.stdin.readline():
            it.launcher_sends(int(number))
        print(json.dumps(asdict(it.wait())), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
