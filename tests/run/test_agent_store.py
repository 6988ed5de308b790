"""A process that is no rank may join, as under torchrun: a client, a program that each rank starts
or becomes, some of the ranks. What joins at an address of its own does that, too.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from srunddp.bootstrap.rendezvous.protocol import listen
from tests.support.starting import LONG, bare, srunddp, write
from tests.support.worlds import run

pytestmark = pytest.mark.slow

# A program that knows nothing but torchrun's variables.
JOINS = """
import sys
import torch, torch.distributed as dist
dist.init_process_group("gloo")
total = torch.ones(1)
dist.all_reduce(total)
sys.stdout.write(f"{dist.get_rank()} of {int(total)}\\n")
dist.destroy_process_group()
"""
CLIENT = """
import datetime, os
import torch.distributed as dist
where = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
store = dist.TCPStore(
    *where, is_master=False, wait_for_workers=False, timeout=datetime.timedelta(seconds=100)
)
store.set(os.environ["RANK"], "here")
store.wait(["0", "1"])
del store
"""
SUBPROCESS = """
import subprocess, sys
subprocess.run([sys.executable, "joins.py"], check=True)
"""
EXEC = """
import os, sys
import torch
os.execv(sys.executable, [sys.executable, "joins.py"])
"""
SOME_RANKS = """
import os, sys
import torch, torch.distributed as dist
rank = int(os.environ["RANK"])
if rank:
    dist.init_process_group("gloo", rank=rank - 1, world_size=2)
    total = torch.ones(1)
    dist.all_reduce(total)
    sys.stdout.write(f"{dist.get_rank()} of {int(total)}\\n")
    dist.destroy_process_group()
"""
OTHER_ORDER = """
import os, sys
import torch, torch.distributed as dist
size = int(os.environ["WORLD_SIZE"])
dist.init_process_group("gloo", rank=size - 1 - int(os.environ["RANK"]), world_size=size)
total = torch.ones(1)
dist.all_reduce(total)
sys.stdout.write(f"{dist.get_rank()} of {int(total)}\\n")
dist.destroy_process_group()
"""
FORMS = {
    "a client before the group": (CLIENT + JOINS, 2),
    "a program that each rank starts": (SUBPROCESS, 2),
    "a program that each rank becomes": (EXEC, 2),
    "some of the ranks": (SOME_RANKS, 3),
    "all ranks with other numbers": (OTHER_ORDER, 2),
}
# Under torchrun the second group finds the keys of the first one.
MORE = {
    "a program after a group": (JOINS + SUBPROCESS, 2, ["0 of 2", "1 of 2"] * 2),
    "some of the ranks, then all": (
        SOME_RANKS + JOINS,
        3,
        ["0 of 2", "0 of 3", "1 of 2", "1 of 3", "2 of 3"],
    ),
    "the name of rank 0's node": (
        "import os\nos.environ['MASTER_ADDR'] = 'localhost'\n" + JOINS,
        2,
        ["0 of 2", "1 of 2"],
    ),
}


def by_torchrun(folder: Path, script: str, size: int) -> list[str]:
    write(folder / "train.py", script)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    done = subprocess.run(
        [*command, f"--nproc-per-node={size}", "train.py"],
        cwd=folder,
        env=bare({"OMP_NUM_THREADS": "1"}),
        capture_output=True,
        text=True,
        timeout=LONG,
    )
    assert done.returncode == 0, done.stderr
    return sorted(done.stdout.splitlines())


@pytest.mark.parametrize("worker", ["fork", pytest.param("exec", marks=pytest.mark.nightly)])
@pytest.mark.parametrize("form", FORMS)
def test_it_joins_as_under_torchrun(tmp_path: Path, form: str, worker: str) -> None:
    script, size = FORMS[form]
    write(tmp_path / "joins.py", JOINS)
    ended = run(tmp_path, script, size=size, variables={"SRUNDDP_WORKER": worker})
    assert ended.codes == [0] * size, ended.text
    printed = sorted(line for text in ended.printed for line in text.splitlines())
    assert printed == by_torchrun(tmp_path, script, size)
    assert printed


@pytest.mark.parametrize("form", MORE)
def test_the_world_of_the_run_is_not_disturbed(tmp_path: Path, form: str) -> None:
    script, size, expected = MORE[form]
    write(tmp_path / "joins.py", JOINS)
    ended = run(tmp_path, script, size=size)
    assert ended.codes == [0] * size, ended.text
    printed = sorted(line for text in ended.printed for line in text.splitlines())
    assert printed == sorted(expected)


RANK_0_LEAVES = (
    CLIENT.replace("del store", "")
    + """
if os.environ["RANK"] == "0":
    store.set("left", "")
    os._exit(0)
import time
store.wait(["left"])
time.sleep(2)
store.set("after", "")
print(store.get("left"))
"""
)


def test_the_store_is_there_until_all_ranks_have_ended(tmp_path: Path) -> None:
    """Also when rank 0's worker has ended, and what it has left is killed."""
    ended = run(tmp_path, RANK_0_LEAVES, size=2)
    assert ended.codes == [0, 0], ended.text
    assert ended.printed[1] == "b''\n"


SPAWN = """
import os, sys
import torch, torch.distributed as dist, torch.multiprocessing as mp
def work(rank, here, url):
    ADDRESS
    dist.init_process_group("gloo", rank=rank, world_size=2, init_method=url)
    total = torch.ones(1)
    dist.all_reduce(total)
    sys.stdout.write(f"{rank} of {int(total)}, {os.environ['MASTER_PORT'] == here}\\n")
    dist.destroy_process_group()
if __name__ == "__main__":
    from srunddp.bootstrap.rendezvous.protocol import listen
    with listen("127.0.0.1", [0]) as found:
        port = found.getsockname()[1]
    url = URL
    arguments = os.environ["MASTER_PORT"], url
    mp.start_processes(work, arguments, nprocs=2, start_method=sys.argv[1])
"""
OURS = ('os.environ.setdefault("MASTER_PORT", "29533")', "None", True)
OWN = ('os.environ["MASTER_PORT"] = url.rpartition(":")[2]; url = None', "f'none:{port}'", False)
TCP = ("pass", "f'tcp://127.0.0.1:{port}'", True)


@pytest.mark.parametrize(
    "method",
    [
        "spawn",
        pytest.param("fork", marks=pytest.mark.nightly),
        pytest.param("forkserver", marks=pytest.mark.nightly),
    ],
)
@pytest.mark.parametrize("way", [OURS, OWN, TCP], ids=["ours", "own", "tcp"])
def test_processes_of_multiprocessing_join_at_whichever_address(
    tmp_path: Path, way: tuple[str, str, bool], method: str
) -> None:
    """At their own one, where plain Python has no launcher's store either."""
    address, url, same = way
    write(tmp_path / "train.py", SPAWN.replace("ADDRESS", address).replace("URL", url))
    done = srunddp("--quiet", "train.py", method, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == [f"0 of 2, {same}", f"1 of 2, {same}"]


NESTED = """
import sys
from torch.distributed.launcher.api import LaunchConfig, elastic_launch
def work():
    import torch, torch.distributed as dist
    dist.init_process_group("gloo")
    total = torch.ones(1)
    dist.all_reduce(total)
    dist.destroy_process_group()
    return int(total)
if __name__ == "__main__":
    config = LaunchConfig(
        min_nodes=1, max_nodes=1, nproc_per_node=2, rdzv_backend="c10d",
        rdzv_endpoint="127.0.0.1:0", run_id="inner", start_method=sys.argv[1], max_restarts=0,
    )
    print(elastic_launch(config, work)())
"""


@pytest.mark.parametrize("method", ["spawn", "fork"])
def test_ranks_of_a_launcher_that_the_script_calls_join_its_store(
    tmp_path: Path, method: str
) -> None:
    """As notebook launchers do it."""
    write(tmp_path / "train.py", NESTED)
    done = srunddp("--quiet", "train.py", method, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "{0: 2, 1: 2}\n"


# What rank 0 tells of a script that joins in another way.

# Each group has a port of its own: at the same one rank 1 may still find the first group's store,
# which rank 0 is about to end.
OWN_ADDRESS = """
import torch.distributed as dist
for port in ("FIRST", "SECOND"):
    os.environ["MASTER_PORT"] = port
    dist.init_process_group("gloo")
    dist.barrier()
    dist.destroy_process_group()
"""
FILE = """
import torch.distributed as dist
for name in ("a", "b"):
    url = f"file://{os.getcwd()}/{name}"
    dist.init_process_group("gloo", init_method=url, rank=RANK, world_size=SIZE)
    dist.barrier()
    dist.destroy_process_group()
"""


def free_port() -> str:
    with listen("127.0.0.1", [0]) as found:
        return str(found.getsockname()[1])


@pytest.mark.parametrize("script", [OWN_ADDRESS, FILE], ids=["own", "file"])
def test_a_script_that_joins_elsewhere_is_told_so_once(tmp_path: Path, script: str) -> None:
    port = free_port()
    own = script.replace("FIRST", port).replace("SECOND", free_port())
    ended = run(tmp_path, own, size=2)
    assert ended.codes == [0, 0], ended.text
    (line,) = (each for each in ended.text.splitlines() if each.startswith("srunddp:"))
    assert line in ended.errors[0]
    if script == FILE:
        assert "file://" in line
        assert "env://" in line
        assert "earlier start" in line
    else:
        assert port in line


def test_a_script_that_joins_by_srunddp_is_told_nothing(tmp_path: Path) -> None:
    """Nor is one with a group of some ranks."""
    ended = run(tmp_path, SOME_RANKS + JOINS, size=3)
    assert ended.codes == [0] * 3, ended.text
    assert "srunddp:" not in ended.text
