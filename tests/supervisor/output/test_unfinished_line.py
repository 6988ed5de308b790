"""What srunddp says while a script has left a line unfinished, as a progress bar does, begins a
line of its own.
"""

from __future__ import annotations

import signal
import subprocess
from pathlib import Path

import pytest

from tests.support.starting import LONG, SRUNDDP, bare, read_line, started, write

BAR = "epoch 1:  25% 4/16"
KILLED = f"""
import os, signal, sys
sys.stderr.write({BAR!r})
sys.stderr.flush()
os.kill(os.getpid(), signal.SIGKILL)
"""
WAITING = f"""
import sys, time
sys.stderr.write({BAR!r})
sys.stderr.flush()
print("ready", flush=True)
time.sleep({LONG})
"""


def after(folder: Path, where: str) -> list[str]:
    """The lines on standard error of a script that is killed while its bar is shown."""
    script = write(folder / "train.py", KILLED)
    command = [*SRUNDDP, "--quiet", script.name]
    if where == "pipe":
        done = subprocess.run(
            command, cwd=folder, env=bare(), stderr=subprocess.PIPE, text=True, timeout=LONG
        )
        return done.stderr.split("\n")
    path = folder / "err.txt"
    with open(path, "w") as file:
        subprocess.run(command, cwd=folder, env=bare(), stderr=file, timeout=LONG)
    return path.read_text().split("\n")


@pytest.mark.parametrize("where", ["pipe", "file"])
def test_a_failure_summary_begins_a_line(where: str, tmp_path: Path) -> None:
    bar, summary, *_ = after(tmp_path, where)
    assert bar == BAR
    assert summary.startswith("srunddp: rank 0 on ")


def test_a_stack_begins_a_line(tmp_path: Path) -> None:
    write(tmp_path / "train.py", WAITING)
    with started("--quiet", "train.py", folder=tmp_path) as process:
        assert read_line(process) == "ready"
        process.send_signal(signal.SIGURG)
        assert process.stderr
        assert process.stderr.readline() == f"{BAR}\n"
        assert process.stderr.readline().startswith("srunddp: rank 0 on ")
