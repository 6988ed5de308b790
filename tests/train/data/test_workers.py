"""How many loader workers a rank has, and how they start."""

from __future__ import annotations

import multiprocessing
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from srunddp.train.config import LoadingConfig
from srunddp.train.data import workers
from srunddp.train.data.workers import default_workers, start_method


@pytest.mark.parametrize(
    ("wanted", "cpus", "in_memory", "expected"),
    [
        (None, 1, False, 0),
        (None, 4, False, 3),
        (None, 9, False, 8),
        (None, 64, False, 8),
        (None, 64, True, 0),
        (0, 64, False, 0),
        (5, 1, True, 5),
    ],
)
def test_workers_leave_the_rank_a_cpu(wanted: int | None, cpus: int, in_memory: bool, expected: int) -> None:
    assert default_workers(LoadingConfig(num_workers=wanted), cpus, in_memory) == expected


@pytest.fixture
def preloaded(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    calls: list[list[str]] = []
    monkeypatch.setattr(multiprocessing, "set_forkserver_preload", calls.append)
    return calls


def script(text: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "script.py").write_text(text)
    module: Any = ModuleType("__main__")
    module.__file__ = str(folder / "script.py")
    monkeypatch.setitem(sys.modules, "__main__", module)


GUARDED, PLAIN = 'if __name__ == "__main__":\n    main()\n', "main()\n"


@pytest.mark.parametrize(
    ("mpi", "rdma", "backend", "text", "expected"),
    [
        (False, False, "gloo", GUARDED, "fork"),
        (False, True, "gloo", GUARDED, "fork"),
        (False, False, "nccl", GUARDED, "fork"),
        (False, True, "nccl", GUARDED, "forkserver"),
        (True, False, "gloo", GUARDED, "forkserver"),
        (True, True, "nccl", PLAIN, "fork"),
    ],
)
def test_workers_are_not_forked_from_mpi_or_rdma(
    mpi: bool,
    rdma: bool,
    backend: str,
    text: str,
    expected: str,
    preloaded: list[list[str]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "infiniband").mkdir()
    if rdma:
        (tmp_path / "infiniband" / "mlx5_0").mkdir()
    monkeypatch.setattr(workers, "_INFINIBAND", tmp_path / "infiniband")
    monkeypatch.setattr("srunddp.bootstrap.environment.mpi.is_running", lambda: mpi)
    script(text, tmp_path, monkeypatch)
    assert start_method(LoadingConfig(), backend) == expected
    assert preloaded == ([["torch"]] if expected == "forkserver" else [])


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_the_user_s_start_method_counts(method: Any, preloaded: list[list[str]]) -> None:
    assert start_method(LoadingConfig(multiprocessing_context=method), "gloo") == method
    assert bool(preloaded) == (method == "forkserver")
