"""A command that cannot print its answer says so in one line, and no traceback; nothing where its
reader has enough.
"""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.support.made_up_run import MadeUp

PRINTING = pytest.mark.parametrize(
    "words",
    [("triage", "a.log"), ("report", "--text", "4711.0"), ("sbatch", "train.py")],
    ids=" ".join,
)


@pytest.mark.parametrize(
    "words",
    [
        ("--version",),
        ("--help",),
        ("help", "sbatch"),
        ("ifaces", "--help"),
        ("explain",),
        ("completion", "bash"),
        ("triage", "a.log"),
        ("report", "--text", "4711.0"),
        ("sbatch", "train.py"),
    ],
    ids=" ".join,
)
def test_a_reader_that_has_enough_ends_it_without_a_word(
    tmp_path: Path, words: tuple[str, ...]
) -> None:
    """As with ``srunddp report 4711 | head -6``: by SIGPIPE, as any command."""
    (tmp_path / "a.log").write_text("step 1\n")
    MadeUp(nodes=1, seconds=60).write(tmp_path)
    command = [sys.executable, str(ROOT / "bin" / "srunddp"), *words]
    with subprocess.Popen(
        command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as printing:
        assert printing.stdout
        assert printing.stderr
        printing.stdout.close()
        said = printing.stderr.read()
    assert printing.returncode == -signal.SIGPIPE
    assert "standard output" not in said


@PRINTING
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
