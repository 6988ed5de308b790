"""Checkpoints that are killed, cut off and damaged, again and again: the newest acknowledged one is
always there.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from tests.soak.conftest import Show, campaign
from tests.train.checkpoint.test_file import damage_and_load

pytestmark = pytest.mark.soak

KILLS = 1000
CUTS = 200
DAMAGES = 10_000
HALF = KILLS // 2  # at least so many fall into the writing itself, rather than before or after
CUT = pytest.mark.skipif(
    os.geteuid() != 0 or not shutil.which("mkfs.ext4"), reason="needs root and mkfs.ext4"
)


@pytest.mark.parametrize(
    ("words", "before"),
    [((KILLS,), ()), pytest.param((CUTS, "power-cuts"), ("unshare", "--mount"), marks=CUT)],
    ids=["kills", "power cuts"],
)
def test_nothing_that_was_acknowledged_is_lost(
    words: tuple[object, ...], before: tuple[str, ...], tmp_path: Path, show: Show
) -> None:
    said = campaign("killed_saves.py", tmp_path, *words, before=before)
    show(said.rstrip())
    if words == (KILLS,):
        assert int(said.split()[2]) >= HALF


def test_ten_thousand_damaged_files_are_named_and_passed_over(tmp_path: Path) -> None:
    damage_and_load(tmp_path, DAMAGES)
