from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import ROOT

Show = Callable[[str], None]


@pytest.fixture
def show(capsys: pytest.CaptureFixture[str]) -> Show:
    """Prints figures also where a test passes."""

    def shown(text: str) -> None:
        with capsys.disabled():
            print(f"\n{text}", flush=True)

    return shown


def campaign(
    script: str,
    folder: Path,
    *arguments: object,
    before: tuple[str, ...] = (),
    limit: float = 1800.0,
) -> str:
    """Run a script of tests/train to its end; what it printed."""
    variables = {"PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    command = [
        *before,
        sys.executable,
        str(ROOT / "tests" / "train" / script),
        str(folder),
        *map(str, arguments),
    ]
    done = subprocess.run(
        command, env=os.environ | variables, capture_output=True, text=True, timeout=limit
    )
    assert done.returncode == 0, done.stderr[-5000:]
    return done.stdout
