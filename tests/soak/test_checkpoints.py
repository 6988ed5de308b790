"""Checkpoints that are killed, cut off and damaged, again and again: the newest acknowledged one is always there."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT

pytestmark = pytest.mark.soak

KILLS, CUTS, DAMAGES = 1000, 200, 10_000
HALF = KILLS // 2  # at least so many fall into the writing itself, rather than before or after


def campaign(script: str, folder: Path, number: int, capsys: pytest.CaptureFixture[str], *before: str) -> str:
    done = subprocess.run(
        [*before, sys.executable, str(ROOT / "tests" / "train" / script), str(folder), str(number)],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=1800,
    )
    assert done.returncode == 0, done.stderr
    with capsys.disabled():
        print("\n" + done.stdout, end="")
    return done.stdout


def test_a_thousand_kills_amid_saves_lose_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert int(campaign("killed_saves.py", tmp_path, KILLS, capsys).split()[2]) >= HALF


@pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("mkfs.ext4"), reason="needs root and mkfs.ext4")
def test_power_cuts_amid_saves_lose_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    campaign("power_cuts.py", tmp_path, CUTS, capsys, "unshare", "--mount")


def test_every_damage_is_found_and_the_checkpoint_before_loaded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    campaign("damaged_files.py", tmp_path, DAMAGES, capsys)
