"""A training below mpirun that is asked to leave, by a signal to one rank: all stop with 75, and it
can go on.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.mpirun.conftest import LIMIT, Mpi, there
from tests.slurm.conftest import SRUNDDP
from tests.support.starting import until
from tests.trained import PROGRAM, Trained

pytestmark = pytest.mark.mpirun

STOPPED = (
    r"srunddp: stopped after step (\d+) by SIGUSR2; checkpoint \S+; not requeued: no job of Slurm"
    r" -> start it again "
    r"with resume=auto \(exit code 75\)"
)


@pytest.fixture
def open_mpi() -> Mpi:
    return there("openmpi5")


def command(folder: Path, *settings: str) -> Sequence[str]:
    return (SRUNDDP, "--quiet", str(PROGRAM), f"--output-dir={folder}", "--epochs=1", *settings)


def test_a_signal_to_one_rank_stops_both_with_75_and_it_resumes(
    open_mpi: Mpi, tmp_path: Path
) -> None:
    trained = Trained(tmp_path / "run")
    words = [open_mpi.mpirun, *open_mpi.options, "-n", "2", *command(trained.folder, "--pace=0.2")]
    with subprocess.Popen(words, env=open_mpi.here(), stderr=subprocess.PIPE, text=True) as process:
        until(lambda: trained.trains() or process.poll() is not None, LIMIT)
        assert process.poll() is None, process.stderr and process.stderr.read()
        os.kill(trained.processes()[1], signal.SIGUSR2)
        _, errors = process.communicate(timeout=LIMIT)
    assert process.returncode == 75, errors
    stopped = re.search(STOPPED, errors)
    assert stopped, errors
    done = open_mpi.run(2, *command(trained.folder, "--start=1", "--resume=auto"))
    assert done.code == 0, done.errors
    assert trained.wrong(int(stopped[1]), epochs=1) == []
