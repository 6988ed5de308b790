"""The start: a rank 0 that is late, files that rank 0 has open, and heterogeneous jobs."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.gpu.ranks import ran, started
from tests.gpu.requirements import need_nccl_ranks, need_slurm, need_tool
from tests.gpu.site import STARTS_WITHIN, command, options
from tests.support.starting import write

LATE = """
if RANK == 0:
    time.sleep(25)
world = srunddp.init(timeout=datetime.timedelta(seconds=120))
total = ones(world)
if RANK == 0:
    time.sleep(15)
dist.all_reduce(total)
print(total.sum().item(), dist.distributed_c10d._get_default_store().timeout.total_seconds())
world.close()
"""


def test_a_rank_0_that_prepares_data_may_be_late(tmp_path: Path) -> None:
    """NCCL's first collective takes an id from the store, whose limit is that of init() and not of
    the meeting.
    """
    assert (
        ran(tmp_path, LATE, "--timeout", "10", variables=need_nccl_ranks(2)) == ["8.0 120.0\n"] * 2
    )


MANY = """
import resource, socket
from srunddp.bootstrap.process_group.store import current_context

world = srunddp.init()
total = ones(world)
dist.all_reduce(total)
if RANK == 1:
    there = (os.environ["MASTER_ADDR"], current_context().meeting.store_port)
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    held = [socket.create_connection(there, timeout=30) for _ in range(1100)]
    dist.distributed_c10d._get_default_store().set("many", "1")
else:
    dist.distributed_c10d._get_default_store().get("many")
group = dist.new_group([0, 1], timeout=datetime.timedelta(seconds=60))
dist.all_reduce(total, group=group)
say("files", len(os.listdir("/proc/self/fd")))
print(total.sum().item())
world.close()
"""


def test_rank_0_serves_more_ranks_than_its_soft_limit_of_files(tmp_path: Path) -> None:
    """Played by connections to its store; a new communicator is made while they are there."""
    variables = need_nccl_ranks(2)
    low = ["bash", "-c", 'ulimit -Sn 1024; exec "$@"', "bash"]
    with started(tmp_path, MANY, variables=variables, below={0: low, 1: low}) as it:
        done = it.wait()
    assert done.codes == [0, 0], done.text
    files = [int((tmp_path / f"files.{rank}").read_text()) for rank in range(2)]
    print(
        f"files that the workers of ranks 0 and 1 have open, 1,100 connections among them: {files}"
    )
    assert files[0] > 1100


@pytest.mark.gpu(0)
def test_a_step_of_one_part_of_a_heterogeneous_job_starts(shared_folder: Path) -> None:
    need_slurm()
    need_tool("salloc")
    write(shared_folder / "train.py", "import os\nprint('rank', os.environ['RANK'])\n")
    job = ["salloc", *options(), "-N1", ":", *options(), "-N1", *command("--het-group=0")]
    done = subprocess.run(
        job, cwd=shared_folder, capture_output=True, text=True, timeout=STARTS_WITHIN
    )
    assert done.returncode == 0, done.stderr
    assert "rank 0" in done.stdout
