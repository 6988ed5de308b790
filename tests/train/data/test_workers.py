"""How many CPUs, threads and loader workers a rank has, and how the workers start."""

from __future__ import annotations

import multiprocessing.util
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch

from srunddp.bootstrap.environment import cpus
from srunddp.bootstrap.environment.cpus import Cpus
from srunddp.train.data import workers
from srunddp.train.data.workers import default_workers, set_threads, share, start_method
from tests.support.starting import python, write
from tests.train.conftest import ROOT
from tests.train.local_world import LocalWorld, run_ranks


def test_workers_leave_the_rank_a_cpu() -> None:
    assert [default_workers(cpus) for cpus in (1, 4, 9, 64)] == [0, 3, 8, 8]


GUARDED = 'if __name__ == "__main__":\n    main()\n'
PLAIN = "main()\n"
MPI = "from mpi4py import MPI\n"


@pytest.mark.parametrize(
    ("method", "mpi", "rdma", "backend", "text", "expected"),
    [
        (None, False, False, "gloo", GUARDED, "fork"),
        (None, False, True, "gloo", GUARDED, "fork"),
        (None, False, False, "nccl", GUARDED, "fork"),
        (None, False, True, "nccl", GUARDED, "forkserver"),
        (None, True, False, "gloo", GUARDED, "forkserver"),
        (None, True, True, "nccl", PLAIN, "fork"),
        # MPI does not run where the script is imported, so it must not be used there.
        (None, True, False, "gloo", MPI + GUARDED, "forkserver"),
        (None, True, False, "gloo", f"{MPI}comm = MPI.COMM_WORLD\n{GUARDED}", "forkserver"),
        (None, True, False, "gloo", f"{MPI}def f(): return MPI.Wtime()\n{GUARDED}", "forkserver"),
        (None, True, False, "gloo", f"{GUARDED}    from mpi4py import MPI\n", "forkserver"),
        (None, True, False, "gloo", f"{MPI}rank = MPI.COMM_WORLD.rank\n{GUARDED}", "fork"),
        (
            None,
            True,
            False,
            "gloo",
            f"import mpi4py.MPI as M\ntry:\n  w = M.COMM_WORLD\n  r = w.Get_rank()\n"
            f"finally:\n  pass\n{GUARDED}",
            "fork",
        ),
        ("fork", True, True, "nccl", GUARDED, "fork"),
        ("spawn", False, False, "gloo", GUARDED, "spawn"),
        ("forkserver", False, False, "gloo", GUARDED, "forkserver"),
    ],
)
def test_workers_are_not_forked_from_mpi_or_rdma_unless_asked(
    method: Any,
    mpi: bool,
    rdma: bool,
    backend: str,
    text: str,
    expected: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "infiniband" / ("mlx5_0" if rdma else "")).mkdir(parents=True)
    (tmp_path / "script.py").write_text(text)
    preloaded: list[list[str]] = []
    monkeypatch.setattr(workers, "_INFINIBAND", tmp_path / "infiniband")
    monkeypatch.setattr("srunddp.bootstrap.environment.mpi.is_running", lambda: mpi)
    monkeypatch.setattr(
        sys.modules["__main__"], "__file__", str(tmp_path / "script.py"), raising=False
    )
    monkeypatch.setattr(multiprocessing, "set_forkserver_preload", preloaded.append)
    assert start_method(method, backend) == expected
    assert preloaded == ([["torch"]] if expected == "forkserver" else [])


TENSORS = """
import sys, tempfile
from pathlib import Path
import torch, torch.distributed as dist
from torch.utils.data import Dataset
from srunddp.bootstrap.environment import mpi
from srunddp.train import DistributedDataLoader
from tests.support.starting import python, write
from tests.train.conftest import ROOT
from tests.train.local_world import LocalWorld

class Tensors(Dataset):
    def __len__(self): return 8
    def __getitem__(self, index): return torch.ones(3)

if __name__ == "__main__":
    mpi.is_running = lambda: True  # so that none is forked
    for method in (None, "fork"):
        loader = DistributedDataLoader(
            Tensors(), LocalWorld(), batch_size=2, num_workers=1, multiprocessing_context=method
        )
        print(sum(float(batch.data.sum()) for batch in loader))
    print(tempfile.gettempdir())
"""


def test_a_long_tmpdir_leaves_room_for_the_workers_sockets(tmp_path: Path) -> None:
    long = tmp_path / ("x" * 100)
    long.mkdir()
    write(tmp_path / "script.py", TENSORS)
    done = python("script.py", folder=tmp_path, TMPDIR=str(long), PYTHONPATH=str(ROOT))
    assert done.stdout.split() == ["24.0", "24.0", str(long)], done.stderr


def test_without_room_for_its_socket_no_fork_server_is_chosen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    long = tmp_path / ("x" * 100)
    long.mkdir()
    monkeypatch.setattr("srunddp.bootstrap.environment.mpi.is_running", lambda: True)
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    # As where the script has used multiprocessing before.
    monkeypatch.setattr(multiprocessing.util, "get_temp_dir", lambda: str(long / "pymp-1"))
    assert start_method(None, "gloo") == "fork"
    assert start_method("forkserver", "gloo") == "forkserver"
    assert tempfile.gettempdir() == str(long)


def test_a_rank_alone_has_its_affinity_and_not_the_machine() -> None:
    before = os.sched_getaffinity(0)
    assert share(LocalWorld()) == len(before)
    os.sched_setaffinity(0, {min(before)})
    try:
        assert share(LocalWorld()) == Cpus.here().allowed == 1
        assert Cpus.here().machine == os.cpu_count()
    finally:
        os.sched_setaffinity(0, before)


def shares(world: LocalWorld) -> list[int]:
    """CPUs of each rank: all with one mask of 9, with two masks of 8 and 6, each on its node, and
    with few CPUs.
    """
    of_rank = [
        (range(9), "one"),
        (range(8) if world.rank < 2 else range(8, 14), "one"),
        (range(8), f"node{world.rank}"),
        (range(2), "one"),
    ]
    found = []
    for mask, node in of_rank:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(os, "sched_getaffinity", lambda _, mask=mask: set(mask))
            patch.setattr("socket.gethostname", lambda node=node: node)
            found.append(share(world))
    return found


def test_ranks_of_a_node_divide_the_mask_that_they_share(tmp_path: Path) -> None:
    """But not one that is a task's own, nor with another node; and each has one CPU at least."""
    assert run_ranks(3, tmp_path, shares) == [[3, 4, 8, 1], [3, 4, 8, 1], [3, 6, 8, 1]]


@pytest.mark.parametrize(("found", "expected"), [(2.5, 2), (0.5, 1), (100.0, 16), (None, 16)])
def test_a_quota_below_the_affinity_counts(
    found: float | None, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpus, "cpu_quota", lambda: found)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(16)))
    assert share(LocalWorld()) == expected


@pytest.mark.parametrize(
    ("before", "cpus", "wanted", "variable", "after"),
    [
        (4, 2, None, "", 2),
        (1, 2, None, "", 1),
        (4, 2, None, "OMP_NUM_THREADS", 4),
        (4, 2, None, "MKL_NUM_THREADS", 4),
        (4, 2, 3, "OMP_NUM_THREADS", 3),
        (1, 1, 2, "", 2),
    ],
)
def test_torch_has_no_more_threads_than_cpus_unless_set(
    before: int,
    cpus: int,
    wanted: int | None,
    variable: str,
    after: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    if variable:
        monkeypatch.setenv(variable, "4")
    own = torch.get_num_threads()
    torch.set_num_threads(before)
    try:
        set_threads(cpus, wanted)
        assert torch.get_num_threads() == after
    finally:
        torch.set_num_threads(own)
