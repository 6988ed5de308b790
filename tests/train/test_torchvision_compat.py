"""torchvision beside a torch that it was not built for."""

from __future__ import annotations

import os
import subprocess
import sys

from tests.train.conftest import HERE, ROOT

IMPORT = "operator torchvision::nms does not exist"


def test_after_a_failed_import_torchvision_works_or_raises() -> None:
    program = [sys.executable, str(HERE / "torchvision_after_a_failure.py")]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    run = subprocess.run(program, env=environment, capture_output=True, text=True, timeout=180)
    assert run.returncode == 0, run.stderr
    *failures, first, second = run.stdout.splitlines()
    if not failures:  # a build that fits
        assert [first, second] == ["kept [1]"] * 2
        return
    assert failures == [IMPORT] * 2
    assert first == "error Couldn't load custom C++ ops"
    assert second.startswith("error Could not run 'torchvision::nms'")
