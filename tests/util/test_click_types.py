"""A command that cannot print its answer says so in one line, and no traceback."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.support.made_up_run import MadeUp


@pytest.mark.parametrize(
    "words",
    [("triage", "a.log"), ("report", "--text", "4711.0"), ("sbatch", "train.py")],
    ids=" ".join,
)
def test_a_full_disk_below_standard_output_is_reported(
    tmp_path: Path, words: tuple[str, ...]
) -> None:
    (tmp_path / "a.log").write_text("step 1\n")
    MadeUp(nodes=1, seconds=60).write(tmp_path)
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, str(ROOT / "bin" / "srunddp"), *words],
            cwd=tmp_path,
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
        )
    said = (
        "srunddp: error: standard output: No space left on device; expected one that can be"
        " written\n"
    )
    assert (done.returncode, done.stderr.splitlines(keepends=True)[-1]) == (74, said)
    assert "Traceback" not in done.stderr
