"""What the tests of training share."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
import torch

from srunddp import telemetry
from srunddp.telemetry import TelemetryPage
from srunddp.train import checkpoint_policy, import_torchvision
from srunddp.train.checkpoint import async_writer

HERE = Path(__file__).parent
ROOT = HERE.parents[1]

with suppress(ImportError):
    # Else torchmetrics cannot be imported where torchvision was built for another torch.
    import_torchvision()


@pytest.fixture(autouse=True)
def no_checkpoint_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Because this machine is busy: training waits as long as it takes for the write before."""
    monkeypatch.setattr(async_writer, "_PATIENCE", 300.0)


class Forgotten(dict[str, object]):
    """A process that knows of no Trainer before."""

    def setdefault(self, key: str, default: object = None) -> object:
        return default


@pytest.fixture(autouse=True)
def a_new_process_at_each_trainer(monkeypatch: pytest.MonkeyPatch) -> None:
    """A resume is tried in the process of the run before, as torch takes seconds to be imported."""
    monkeypatch.setattr(checkpoint_policy, "_runs_of_this_process", Forgotten())


@pytest.fixture
def page() -> Iterator[TelemetryPage]:
    """Where the supervisor of this process would see its steps."""
    installed = TelemetryPage()
    telemetry.install(installed)
    yield installed
    telemetry.install(None)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(HERE):
            item.add_marker(pytest.mark.slow)


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """Models this small gain nothing by more, and lose much where the cores are busy."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@contextmanager
def file_size_limit(size: int) -> Iterator[None]:
    """No file of this process may become larger: what follows fails as on a full disk."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def fake_command(folder: Path, name: str, body: str) -> dict[str, str]:
    """A job's variables, with a command of Slurm in PATH that appends its arguments to
    ``calls``.
    """
    path = folder / "bin" / name
    path.parent.mkdir()
    # Not sh: dash unblocks the signals that we have blocked.
    path.write_text(f'#!/bin/bash\necho "$@" >>{folder}/calls\n{body}\n')
    path.chmod(0o755)
    return {"SLURM_JOB_ID": "1207", "PATH": f"{path.parent}:/usr/bin:/bin"}


def run_python(*arguments: object, before: tuple[str, ...] = (), code: int = 0) -> str:
    """What a Python of its own prints that imports this tree, and ends with this exit code."""
    command = [*before, sys.executable, *map(str, arguments)]
    variables = os.environ | {
        "PYTHONPATH": str(ROOT),
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
    }
    done = subprocess.run(
        command, env=variables, cwd=ROOT, capture_output=True, text=True, timeout=400
    )
    assert done.returncode == code, done.stderr
    return done.stdout
