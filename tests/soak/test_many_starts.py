"""Starting works every time: on a machine that is overloaded, and to the last millisecond of a good
run.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import pytest

from tests.conftest import PROGRAMS
from tests.mpirun.conftest import there
from tests.slurm.conftest import SRUNDDP, SlurmJobRunner

pytestmark = pytest.mark.soak

STARTS = 100
ENDS = 60


@pytest.fixture
def overload() -> Iterator[None]:
    """Six processes that do nothing but compute."""
    burners = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(6)]
    yield
    for burner in burners:
        burner.kill()
        burner.wait()


@pytest.mark.usefixtures("overload")
def test_twelve_ranks_meet_on_an_overloaded_machine(runner: SlurmJobRunner) -> None:
    kinds = ("none", "pmi2", "pmix")
    failures = []
    for start in range(STARTS):
        words = (
            f"--mpi={kinds[start % 3]}",
            "-N6",
            "--ntasks-per-node=2",
            SRUNDDP,
            "--quiet",
            "--timeout",
            "60",
        )
        done = runner.srun(*words, str(PROGRAMS / "report.py"), timeout=100)
        if done.code or sorted(done.by_rank()) != list(range(12)):
            failures.append((start, done.code, done.errors))
    assert failures == []


def test_a_good_run_exits_with_zero_while_gloos_threads_run() -> None:
    mpi = there("mpich")
    codes = [
        mpi.run(2, SRUNDDP, "--quiet", str(PROGRAMS / "torchrun_style.py")).code
        for _ in range(ENDS)
    ]
    assert codes == [0] * ENDS
