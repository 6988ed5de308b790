"""A helper that a wrapper has started before it becomes srunddp, by ``helper & exec srunddp …``."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tests.mpirun.conftest import Mpi
from tests.slurm.conftest import SRUNDDP
from tests.support.starting import write
from tests.support.worlds import is_gone

pytestmark = pytest.mark.mpirun

# MPICH 4.0 leaves pipes of its own open in the ranks, and its mpirun waits until nobody has them.
WRAPPER = """#!/bin/bash
(
    for descriptor in /proc/self/fd/*; do
        descriptor=${descriptor##*/}
        [[ $descriptor -gt 2 ]] && eval "exec $descriptor>&-"
    done
    exec sleep 600
) < /dev/null > /dev/null 2>&1 &
echo $! > "$FOLDER/helper.$$"
exec "$@"
"""
SCRIPT = """
import os, subprocess, sys, time
from pathlib import Path

folder = Path(os.environ["FOLDER"])
start = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
if "srunddp" in sys.argv:
    supervisor = os.getppid()
else:
    supervisor = os.getpid()
helper = (folder / f"helper.{supervisor}").read_text().strip()
state = Path(f"/proc/{helper}/stat").read_text().rpartition(")")[2].split()[0]
(folder / f"state{start}.{supervisor}").write_text(state)
if "restarts" in sys.argv and start == "0":
    import srunddp
    srunddp.heartbeat()
    if os.environ["RANK"] == "0":
        # Not before the other rank has written, too.
        while len(list(folder.glob("state0.*"))) < 2:
            time.sleep(0.05)
        sys.exit(3)
    time.sleep(600)
"""


def left(folder: Path) -> list[bool]:
    """Whether each helper is there at the end; they are ended then."""
    found = []
    for file in folder.glob("helper.*"):
        pid = int(file.read_text())
        found.append(not is_gone(pid))
        if found[-1]:
            os.kill(pid, signal.SIGKILL)
    return found


def test_it_outlives_the_end_and_restarts_as_below_plain_python(mpi: Mpi, tmp_path: Path) -> None:
    wrapper = write(tmp_path / "wrapper.sh", WRAPPER)
    wrapper.chmod(0o755)
    script = str(write(tmp_path / "train.py", SCRIPT))
    variables = {"FOLDER": str(tmp_path)}
    plain = mpi.run(2, str(wrapper), mpi.python, script, env=variables)
    assert plain.code == 0, plain.errors
    expected = left(tmp_path)
    assert len(expected) == 2
    for file in tmp_path.glob("*.[0-9]*"):
        file.unlink()
    # Over MPI there are no restarts.
    if mpi.channel == "pmi":
        options: tuple[str, ...] = ("--quiet", "--restarts=1")
        words: tuple[str, ...] = ("srunddp", "restarts")
    else:
        options = ("--quiet",)
        words = ("srunddp",)
    done = mpi.run(2, str(wrapper), SRUNDDP, *options, script, *words, env=variables)
    assert done.code == 0, done.errors
    states = [file.read_text() for file in tmp_path.glob("state*")]
    assert states == ["S"] * 2 * len(words)
    assert left(tmp_path) == expected
