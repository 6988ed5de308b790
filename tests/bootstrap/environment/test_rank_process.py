"""What a rank starts is a single process, unless a launcher or exec is in between."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from srunddp.bootstrap.environment.detect import detect
from srunddp.bootstrap.environment.rank_process import RANK_PROCESS, is_below_rank, rank_mark
from tests.conftest import ROOT
from tests.mpirun.conftest import there
from tests.support.facts import tells
from tests.support.launchers import hydra, open_mpi, step
from tests.support.starting import LONG, SRUNDDP, slurm, write
from tests.support.worlds import world

pytestmark = pytest.mark.slow

# One write for each line: those of two ranks must not mix.
PLACE = """import os, sys
sys.stdout.write(" ".join([os.environ["RANK"], os.environ["WORLD_SIZE"], *sys.argv[1:]]) + "\\n")
"""
OURS = {
    "RANK": "1",
    "LOCAL_RANK": "1",
    "WORLD_SIZE": "2",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29500",
}
# Above it: a rank; below it: what rank 0 starts, which is through before the ranks end.
STARTS = f"""
import subprocess
def start(*command, **variables):
    done = subprocess.run(
        command, capture_output=True, text=True, timeout={LONG}, env=os.environ | variables
    )
    say("started", done.stdout + done.stderr + str(done.returncode))
if RANK == 0:
    SRUNDDP = {SRUNDDP!r}
"""


def started(folder: Path, command: str, **variables: str) -> list[str]:
    """The lines of a process that rank 0 of two starts; the last one is its exit code."""
    write(folder / "place.py", PLACE)
    write(
        folder / "own.py",
        "import srunddp\nwith srunddp.init() as it: print(it.rank, it.world_size)\n",
    )
    with world(folder, f"{STARTS}    start({command})\n", size=2, variables=variables) as it:
        ended = it.wait()
    assert ended.codes == [0, 0], ended.text
    return (folder / "started.0").read_text().splitlines()


@pytest.mark.parametrize(
    "command",
    [
        "*SRUNDDP, '--quiet', 'place.py'",
        "'sh', '-c', ' '.join(SRUNDDP) + ' --quiet place.py; true'",
        "sys.executable, 'own.py'",
    ],
)
def test_what_a_rank_starts_is_a_single_process(tmp_path: Path, command: str) -> None:
    place, note, code = started(tmp_path, command, PYTHONPATH=str(ROOT))
    assert (place, code) == ("0 1", "0")
    assert tells(note, "srunddp: ", "one process", "world size 1", "srun srunddp")


def test_a_step_that_a_rank_starts_has_its_own_rank(tmp_path: Path) -> None:
    """As srun within a step of srun: another step's variables."""
    inner = slurm(0, 1, SLURM_STEP_ID="4")
    assert started(tmp_path, f"*SRUNDDP, '--quiet', 'place.py', **{inner!r}") == ["0 1", "0"]


@pytest.mark.parametrize("name", ["openmpi5", "mpich"])
def test_mpirun_below_a_rank_starts_its_own_world(tmp_path: Path, name: str) -> None:
    mpi = there(name)
    words = (mpi.mpirun, *mpi.options, "-n", "2", mpi.python, SRUNDDP[1], "--quiet", "place.py")
    said = started(tmp_path, f"*{words!r}, **{mpi.here()!r}")
    assert (sorted(said[:2]), said[-1]) == (["0 2", "1 2"], "0")


INNER = """
import os, socket, torch.distributed as dist, torch.multiprocessing as mp
def free():
    with socket.create_server(("", 0)) as server:
        return server.getsockname()[1:]
def inner(rank, port=0):
    if port:
        os.environ.update(RANK=str(rank), WORLD_SIZE="2")
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
        # Below torchrun, too, torch would otherwise take that for another's store.
        del os.environ["TORCHELASTIC_USE_AGENT_STORE"]
    dist.init_process_group("gloo")
    dist.barrier()
    os.write(1, b"%d of %d\\n" % (dist.get_rank(), dist.get_world_size()))
    dist.destroy_process_group()
"""


@pytest.mark.parametrize(
    ("command", "last"),
    [
        (
            (
                "sys.executable, '-m', 'torch.distributed.run', '--standalone',"
                " '--nproc-per-node=2', 'inner.py'"
            ),
            "inner(-1)",
        ),
        (
            "sys.executable, 'inner.py'",
            "if __name__ == '__main__': mp.spawn(inner, args=free(), nprocs=2)",
        ),
    ],
    ids=["torchrun", "mp.spawn"],
)
def test_torchs_own_launchers_below_a_rank_have_their_world(
    tmp_path: Path, command: str, last: str
) -> None:
    write(tmp_path / "inner.py", f"{INNER}{last}\n")
    said = started(tmp_path, command)
    assert ({"0 of 2", "1 of 2"} <= {*said}, said[-1]) == (True, "0"), said


def test_a_rank_that_becomes_another_program_stays_the_rank(tmp_path: Path) -> None:
    script = """
if len(sys.argv) == 1:
    os.execv(sys.executable, [sys.executable, "train.py", "again"])
import torch.distributed as dist
dist.init_process_group("gloo")
say("size", dist.get_world_size())
dist.barrier()
dist.destroy_process_group()
"""
    with world(tmp_path, script, size=2) as it:
        ended = it.wait()
    assert ended.codes == [0, 0], ended.text
    assert [(tmp_path / f"size.{rank}").read_text() for rank in range(2)] == ["2", "2"]


@pytest.mark.parametrize(
    "outer", [step(), open_mpi(0), hydra(0), {}], ids=["Slurm", "Open MPI", "Hydra", "none"]
)
def test_the_mark_holds_for_what_is_below(outer: dict[str, str]) -> None:
    marked = outer | OURS
    marked[RANK_PROCESS] = rank_mark(marked, 4711)
    assert not is_below_rank(marked, 4711)  # the rank itself, also after exec
    assert is_below_rank(marked, 4712)
    assert not is_below_rank(marked | {"SLURM_STEP_ID": "77"}, 4712)
    assert not is_below_rank(marked | {"MASTER_PORT": "29511"}, 4712)  # torchrun, mp.spawn
    found = detect(marked, pid=4712)
    assert (found.launcher, found.rank, found.world_size, found.channels) == ("none", 0, 1, ())
    for broken in ("", "4711", "x,y", ",,"):
        is_below_rank(marked | {RANK_PROCESS: broken}, 4712)


def test_another_socket_of_pmi_is_another_launcher() -> None:
    """MPICH's mpirun may give the same numbers again."""
    ours, theirs = os.pipe()
    try:
        variables = hydra(0) | {"PMI_FD": str(ours)}
        variables[RANK_PROCESS] = rank_mark(variables, 4711)
        assert is_below_rank(variables, 4712)
        os.dup2(os.open(os.devnull, os.O_RDONLY), ours)
        assert not is_below_rank(variables, 4712)
        os.close(ours)
        assert is_below_rank(variables, 4712)
    finally:
        os.close(theirs)
