"""A script below srunddp gets the signals that plain Python gets from the same mpirun, in kind,
number and order.
"""

from __future__ import annotations

import signal
import subprocess
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from tests.chaos.plan import HYDRA
from tests.mpirun.conftest import MPI_NAMES, Mpi, there
from tests.recorded_signals import LIMIT, RECORDER, Recorded, differences, table
from tests.slurm.conftest import SRUNDDP
from tests.support.starting import until, write
from tests.support.worlds import is_gone

pytestmark = pytest.mark.mpirun

# With how many signals plain Python gets, at least.
ROWS = {"SIGUSR1": 1, "SIGUSR2": 1, "SIGINT": 2, "SIGTERM": 2}
# Hydra's mpiexec forwards SIGINT as it is.
LEAST = {name: {"SIGUSR2": 0, "SIGINT": 1, "SIGTERM": 1} for name in HYDRA}
# Hydra's mpiexec dies of SIGUSR2 itself. Its proxies then end the ranks by SIGTERM and SIGKILL, one
# right after the other, so that not even two scripts of one plain run record the same.
ENDS_MPIEXEC = {name: {"SIGUSR2"} for name in HYDRA}
SETTLED = 2.5  # seconds without a signal after which none is expected any more

Jobs = dict[str, dict[str, Recorded]]


def start(mpi: Mpi, name: str, kind: str, folder: Path, script: str = "") -> Recorded:
    """Start two ranks of the recorder, or of a script, with the folder as its argument."""
    folder.mkdir()
    program = write(folder / "script.py", script) if script else RECORDER
    command = [mpi.python] if kind == "plain" else [SRUNDDP, "--quiet"]
    words = [mpi.mpirun, *mpi.options, "-n", "2", *command, str(program), str(folder)]
    null = subprocess.DEVNULL
    job = subprocess.Popen(words, env=mpi.here(), stdin=null, stdout=null, stderr=null, text=True)
    return Recorded(folder, name, job)


def wait_until_settled(jobs: list[Recorded]) -> None:
    """Until none of them has got a signal for some time."""
    last = time.monotonic()
    while time.monotonic() < last + SETTLED:
        time.sleep(0.1)
        if any([job.read() for job in jobs]):
            last = time.monotonic()


@pytest.fixture(scope="module", params=MPI_NAMES)
def jobs(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[str, Jobs]]:
    mpi = there(request.param)
    folder = tmp_path_factory.mktemp(request.param)
    started = {
        name: {
            kind: start(mpi, name, kind, folder / f"{kind}-{name}") for kind in ("plain", "srunddp")
        }
        for name in ROWS
    }
    each = [job for kinds in started.values() for job in kinds.values()]
    try:
        until(lambda: all([job.is_ready(2) for job in each]), LIMIT, lambda: table(started))
        for name, kinds in started.items():
            for job in kinds.values():
                assert job.srun
                job.srun.send_signal(signal.Signals[name])
        least = ROWS | LEAST.get(request.param, {})
        until(
            lambda: all(
                job.has(least[name]) for name, kinds in started.items() for job in kinds.values()
            ),
            LIMIT,
            lambda: table(started),
        )
        wait_until_settled(each)
        print(f"{request.param}\n{table(started)}")
        yield request.param, started
    finally:
        for job in each:
            assert job.srun
            job.srun.terminate()
            try:
                job.srun.wait(30)
            except subprocess.TimeoutExpired:
                job.srun.kill()


@pytest.mark.parametrize("row", ROWS)
def test_a_script_gets_what_plain_python_gets(row: str, jobs: tuple[str, Jobs]) -> None:
    mpi, rows = jobs
    if row in ENDS_MPIEXEC.get(mpi, set()):
        ours = rows[row]["srunddp"]
        assert {each for name in ours.records for each in ours.signals(name)} <= {"SIGTERM"}
    else:
        assert not differences(rows[row]["plain"], rows[row]["srunddp"])


# A script that ignores what asks for an end, and its child, which does so too.
UNMOVED = """
import os, signal, sys, time
from pathlib import Path
for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
    signal.signal(number, signal.SIG_IGN)
child = os.fork()
if child:
    file = Path(sys.argv[1], f"{child}.new")
    file.touch()
    file.rename(file.with_suffix(".child"))
time.sleep(300)
"""


@pytest.mark.parametrize("mpi", MPI_NAMES)
def test_no_child_of_a_script_is_left_by_mpirun_s_sigkill(mpi: str, tmp_path: Path) -> None:
    """Open MPI sends it to what a SIGTERM has not ended, and Hydra when its mpiexec has ended."""
    number = signal.SIGUSR2 if mpi in ENDS_MPIEXEC else signal.SIGTERM
    for kind in ("plain", "srunddp"):
        folder = tmp_path / kind
        job = start(there(mpi), number.name, kind, folder, UNMOVED)
        assert job.srun
        try:
            children = until(partial(children_in, folder), LIMIT)
            job.srun.send_signal(number)
            job.srun.wait(60.0)
            until(partial(all_gone, children), 60.0, partial(str, kind))
        finally:
            job.srun.kill()


def children_in(folder: Path) -> list[int]:
    """The process ids of both children, once they are there."""
    found = [int(file.stem) for file in folder.glob("*.child")]
    return found if len(found) == 2 else []


def all_gone(pids: list[int]) -> bool:
    return all(map(is_gone, pids))
