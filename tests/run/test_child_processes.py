"""What a script forks or starts by multiprocessing is no rank, and goes on as in plain Python."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import PROGRAMS
from tests.support.starting import ended, python, slurm, started, write

METHODS = ["fork", "spawn", "forkserver"]

# As mpi4py: the import of MPI starts it, unless told otherwise. It notes each start.
MPI4PY = """
class rc:
    initialize = True
"""
MPI = """
import os, mpi4py
_STARTS = os.path.join(os.path.dirname(__file__), "starts")
def Init():
    with open(_STARTS, "a") as file:
        print(os.getpid(), file=file)
def Is_initialized():
    return os.path.exists(_STARTS) and str(os.getpid()) in open(_STARTS).read().split()
def Is_finalized():
    return False
def Finalize():
    pass
COMM_WORLD = object()
if mpi4py.rc.initialize:
    Init()
"""


def write_mpi4py(folder: Path) -> Path:
    """A package that takes mpi4py's place, and the file that will have a line for each start of
    MPI.
    """
    write(folder / "mpi4py" / "__init__.py", MPI4PY)
    write(folder / "mpi4py" / "MPI.py", MPI)
    return folder / "mpi4py" / "starts"


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_a_rank_s_processes_do_what_those_of_plain_python_do(tmp_path: Path, method: str) -> None:
    """And they start no MPI, as the one that they have the variables of is their rank's."""
    starts = write_mpi4py(tmp_path)
    shutil.copy(PROGRAMS / "children.py", tmp_path)
    step: dict[str, Any] = slurm(0, 1, PROBE="of the launcher")
    plain = python("children.py", method, folder=tmp_path, **step)
    starts.unlink()
    with started("--quiet", "children.py", method, folder=tmp_path, **step) as rank:
        code, out, errors = ended(rank)
    assert (code, errors) == (plain.returncode, plain.stderr) == (0, "")
    assert out == plain.stdout
    assert "Pool [0, 1, 4, 9]\nvariables ['of the launcher', '0']\n" in out
    assert "terminated -15\n" in out
    assert out.endswith("the script is over\nthe last process has ended\n")
    assert len(starts.read_text().split()) == 1


MPI_IN_CHILD = """
import multiprocessing, sys
def work():
    from mpi4py import MPI
    assert MPI.Is_initialized()
if __name__ == "__main__":
    child = multiprocessing.get_context(sys.argv[1]).Process(target=work)
    child.start()
    child.join()
    sys.exit(child.exitcode)
"""


@pytest.mark.parametrize("method", METHODS)
def test_mpi_may_be_one_process_s_that_the_script_starts_for_it(
    tmp_path: Path, method: str
) -> None:
    starts = write_mpi4py(tmp_path)
    write(tmp_path / "train.py", MPI_IN_CHILD)
    with started("--quiet", "train.py", method, folder=tmp_path, **slurm(0, 1)) as rank:
        assert ended(rank) == (0, "", "")
    assert len(starts.read_text().split()) == 1


BLOCKED = """
import json, multiprocessing.util, sys
from srunddp.bootstrap.environment import child_processes, mpi
try:
    from mpi4py import MPI
except ImportError:
    MPI = None
def work(_):
    return MPI is None
if __name__ == "__main__":
    child_processes.prepare_processes(multiprocessing.util)
    mpi.block()
    with multiprocessing.get_context(sys.argv[1]).Pool(1) as pool:
        print(json.dumps([MPI is None, *pool.map(work, [0])]))
"""


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_what_is_refused_in_the_rank_is_refused_below_it(tmp_path: Path, method: str) -> None:
    write_mpi4py(tmp_path)
    write(tmp_path / "train.py", BLOCKED)
    done = python("train.py", method, folder=tmp_path)
    assert json.loads(done.stdout) == [False, True]


INIT = """
import multiprocessing, os, sys
import srunddp
def join():
    srunddp.init("gloo")
def fork_and_join():
    if child := os.fork():
        sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    join()
if __name__ == "__main__":
    if sys.argv[1] == "os.fork":
        fork_and_join()
    child = multiprocessing.get_context(sys.argv[1]).Process(target=join)
    child.start()
    child.join()
    sys.exit(child.exitcode)
"""


@pytest.mark.slow
@pytest.mark.parametrize("method", [*METHODS, "os.fork"])
def test_only_the_rank_joins_the_world(tmp_path: Path, method: str) -> None:
    """Not a second process with its variables, for which nobody would wait."""
    write(tmp_path / "train.py", INIT)
    with started("--quiet", "train.py", method, folder=tmp_path, **slurm(0, 1)) as rank:
        code, _, errors = ended(rank)
    assert code == (78 if method == "os.fork" else 1)
    assert "srunddp.init() in a process that" in errors
    assert "expected one call per rank" in errors
