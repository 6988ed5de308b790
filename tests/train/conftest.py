"""One start of three ranks for all tests that need them: importing torch costs two CPU seconds a rank."""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

HERE = Path(__file__).parent
ROOT = HERE.parents[1]


def start(script: Path, *arguments: str, ranks: int, folder: Path, timeout: float) -> list[str]:
    """Run a script once per rank with Gloo on the loopback; each rank's output."""
    variables = {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    variables |= {"WORLD_SIZE": str(ranks), "MEETING_FILE": str(folder / "meeting")}
    processes = [
        subprocess.Popen(
            [sys.executable, str(script), *arguments],
            env=os.environ | variables | {"RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(ranks)
    ]
    try:
        outputs = [process.communicate(timeout=timeout)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0] * ranks, "\n".join(outputs)
    return outputs


class Ranks:
    """What each scenario of ``scenarios.py`` came to on each rank."""

    def __init__(self, folder: Path) -> None:
        self.folder, outputs_file = folder, folder / "outputs.json"
        if not outputs_file.exists():
            folder.mkdir()
            outputs = start(HERE / "scenarios.py", str(folder), ranks=3, folder=folder, timeout=300)
            outputs_file.write_text(json.dumps(outputs))
        self.outputs = json.loads(outputs_file.read_text())
        self._results = [torch.load(folder / f"rank{rank}.pt", weights_only=False) for rank in range(3)]

    def __getitem__(self, scenario: str) -> list[Any]:
        results = [by_name[scenario] for by_name in self._results]
        for rank, result in enumerate(results):
            assert not isinstance(result, Exception), f"rank {rank}: {result!r}"
        return results


@pytest.fixture(scope="session")
def three_ranks(tmp_path_factory: pytest.TempPathFactory) -> Ranks:
    """One start for all workers of pytest-xdist: the first to come makes it."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "three_ranks"
    with folder.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        return Ranks(folder)


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """Models this small gain nothing by more, and lose much where the cores are busy."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def results_of(script: str, folder: Path, timeout: float) -> Any:
    """What a script that forks its own worlds has saved in ``results.pt``."""
    variables = {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(HERE / script), str(folder)]
    done = subprocess.run(command, env=os.environ | variables, capture_output=True, text=True, timeout=timeout)
    assert done.returncode == 0, done.stderr
    return torch.load(folder / "results.pt", weights_only=False)
