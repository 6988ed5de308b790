"""What README promises under mpirun, once for each MPI and without torch: the gate runs these
tests.

Most are answered by one run: two ranks start, get a signal that mpirun was sent, and then rank 1
fails.
"""

from __future__ import annotations

import json
import re
import signal
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.chaos.verdict import verdicts
from tests.mpirun.conftest import LIMIT, MPI_NAMES, Mpi, there
from tests.slurm.conftest import SRUNDDP
from tests.support.starting import NODE, until, write
from tests.support.worlds import is_gone

pytestmark = [pytest.mark.mpirun, pytest.mark.gate]

CODE = 17  # of the rank that fails

# Each rank says who it is, and waits for SIGUSR1. Then rank 1 fails, as soon as rank 0 has got the
# signal too.
SIGNALLED = f"""
import json, os, signal, sys, time
from pathlib import Path

FOLDER, RANK = Path(sys.argv[1]), os.environ["RANK"]

def say(what, text=""):
    new = FOLDER / f".{{what}}.{{RANK}}"
    new.write_text(text)
    new.rename(FOLDER / f"{{what}}.{{RANK}}")

signal.signal(signal.SIGUSR1, lambda *_: say("signalled"))
say("ready", json.dumps({{"pid": os.getpid(), "variables": dict(os.environ)}}))
while RANK == "0" or not all((FOLDER / f"signalled.{{rank}}").exists() for rank in "01"):
    time.sleep(0.01)
sys.exit({CODE})
"""

# In its first start rank 1 fails, and rank 0 waits to be ended.
RESTARTED = """
import os, sys, time

START = os.environ["TORCHELASTIC_RESTART_COUNT"]
if START == "0" and os.environ["RANK"] == "1":
    sys.exit(3)
while START == "0":
    time.sleep(0.01)
print(f"rank {os.environ['RANK']} in start {START}")
"""


@dataclass(frozen=True)
class Job:
    """One run that is over.

    Attributes:
        code: mpirun's exit code; errors: all that was written on standard error.
        variables: what each rank's script found in its environment.
        signalled: the ranks whose scripts got the signal.
        left: the process ids of the scripts that were still there when mpirun had ended.
    """

    mpi: Mpi
    code: int
    errors: str
    variables: list[dict[str, str]]
    signalled: list[int]
    left: list[int]


def finished(mpi: Mpi, folder: Path) -> Job:
    """Start the job, send mpirun the signal when both ranks wait for it, and wait for the end."""
    script = write(folder / "train.py", SIGNALLED)
    words = [mpi.mpirun, *mpi.options, "-n", "2", SRUNDDP, str(script), str(folder)]
    errors = folder / "errors"
    with errors.open("w") as file:
        mpirun = subprocess.Popen(
            words, env=mpi.here(), stdin=subprocess.DEVNULL, stdout=file, stderr=file
        )
    try:
        until(lambda: len(list(folder.glob("ready.*"))) == 2, LIMIT, errors.read_text)
        said: list[dict[str, Any]] = [
            json.loads((folder / f"ready.{rank}").read_text()) for rank in (0, 1)
        ]
        mpirun.send_signal(signal.SIGUSR1)
        code = mpirun.wait(LIMIT)
        left = [rank["pid"] for rank in said if not is_gone(rank["pid"])]
    finally:
        end(mpirun)
    signalled = [rank for rank in (0, 1) if (folder / f"signalled.{rank}").exists()]
    variables = [rank["variables"] for rank in said]
    return Job(mpi, code, errors.read_text(), variables, signalled, left)


def end(mpirun: subprocess.Popen[bytes]) -> None:
    """If it is still there; by SIGTERM it ends its ranks too."""
    mpirun.terminate()
    try:
        mpirun.wait(30)
    except subprocess.TimeoutExpired:
        mpirun.kill()
        mpirun.wait()


@pytest.fixture(scope="module", params=MPI_NAMES)
def job(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Job:
    return finished(there(request.param), tmp_path_factory.mktemp(request.param))


def test_every_script_finds_the_variables_of_torchrun(job: Job) -> None:
    for rank, variables in enumerate(job.variables):
        expected = {
            "RANK": rank,
            "LOCAL_RANK": rank,
            "WORLD_SIZE": 2,
            "LOCAL_WORLD_SIZE": 2,
            "GROUP_RANK": 0,
        }
        assert {name: int(variables[name]) for name in expected} == expected
        assert variables["MASTER_ADDR"]
        assert 0 < int(variables["MASTER_PORT"]) < 65536
        assert variables["TORCHELASTIC_RUN_ID"]
    for name in ("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID"):
        assert job.variables[0][name] == job.variables[1][name], name


def test_rank_0_says_what_was_chosen(job: Job) -> None:
    chosen = f"2 ranks on 1 node, launcher {job.mpi.name}, channel {job.mpi.channel}, "
    assert job.errors.count(chosen) == 1, job.errors


def test_a_signal_to_mpirun_reaches_every_script(job: Job) -> None:
    assert job.signalled == [0, 1]


def test_when_one_rank_fails_all_end_with_its_code_and_one_summary(job: Job) -> None:
    # When MPICH 4.0's mpiexec has got a signal, it may miss how its ranks have ended: with plain
    # Python, too.
    lost = job.mpi == there("mpich4") and job.code == 0
    assert job.code == CODE or lost, job.errors
    (summary,) = verdicts(job.errors)
    assert (summary.ranks, summary.node, summary.code) == ((1,), NODE, CODE), job.errors
    assert "exit" in summary.cause
    assert job.left == []


def test_over_pmi_all_ranks_start_anew_when_one_fails(tmp_path: Path) -> None:
    script = write(tmp_path / "train.py", RESTARTED)
    done = there("mpich").run(2, SRUNDDP, "--restarts=1", str(script))
    assert done.code == 0, done.errors
    # Not by lines: mpiexec may put the words of one rank before the end of the other's line.
    assert sorted(re.findall(r"rank \d in start \d", done.output)) == [
        "rank 0 in start 1",
        "rank 1 in start 1",
    ]
    assert "srunddp: ended with 0 after 1 restart\n" in done.errors


@pytest.mark.parametrize("name", ["openmpi4", "openmpi5"])
def test_over_mpi_restarts_are_refused_with_the_hint(name: str, tmp_path: Path) -> None:
    """Before the ranks meet. Rank 1 never comes here: mpirun would end rank 0 amid its words if
    another ended first.
    """
    script = write(tmp_path / "train.py", RESTARTED)
    done = there(name).run(1, SRUNDDP, "--restarts=1", str(script), ":", "-n", "1", "sleep", "600")
    assert done.code == 78, done.errors
    assert done.output == ""
    assert re.search(
        r"^srunddp: error: --restarts over MPI; expected .* -> ", done.errors, re.MULTILINE
    ), done.errors
