"""Checkpoints that are killed, cut off and damaged, again and again: the newest acknowledged one is always there."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
import torch

from tests.soak.conftest import Show, campaign

pytestmark = pytest.mark.soak

KILLS, CUTS, DAMAGES = 1000, 200, 10_000
HALF = KILLS // 2  # at least so many fall into the writing itself, rather than before or after
SHARD_KILLS = 40
CUT = pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("mkfs.ext4"), reason="needs root and mkfs.ext4")


@pytest.mark.parametrize(
    ("script", "number", "before"),
    [
        ("killed_saves.py", KILLS, ()),
        pytest.param("power_cuts.py", CUTS, ("unshare", "--mount"), marks=CUT),
        ("damaged_files.py", DAMAGES, ()),
    ],
    ids=["kills", "power cuts", "damages"],
)
def test_nothing_that_was_acknowledged_is_lost(
    script: str, number: int, before: tuple[str, ...], tmp_path: Path, show: Show
) -> None:
    said = campaign(script, tmp_path, number, before=before)
    show(said.rstrip())
    if number == KILLS:
        assert int(said.split()[2]) >= HALF


def test_forty_kills_amid_saves_of_shards_change_no_bit(tmp_path: Path) -> None:
    campaign("sharded.py", tmp_path, SHARD_KILLS)
    results = torch.load(tmp_path / "results.pt", weights_only=False)
    amid, again, left = results["killed"]
    print(f"{amid} of {SHARD_KILLS} kills met a save")
    assert amid > SHARD_KILLS / 4
    for rank, plain in zip(again, results["alike"]["fsdp"], strict=True):
        assert rank["records"] == plain["records"]
        assert all(torch.equal(rank["weights"][name], tensor) for name, tensor in plain["weights"].items())
        for own, other in zip(rank["state"], plain["state"], strict=True):
            assert all(torch.equal(own[name], tensor) for name, tensor in other.items())
    assert left == sorted(2 * list(set(left)))
