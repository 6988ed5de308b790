"""A training in shards that is killed again and again, amid its saves."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT

pytestmark = pytest.mark.soak
KILLS = 40


def test_forty_kills_amid_saves_of_shards_change_no_bit(tmp_path: Path) -> None:
    import torch

    variables = {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(ROOT / "tests" / "train" / "sharded.py"), str(tmp_path), str(KILLS)]
    done = subprocess.run(command, env=os.environ | variables, capture_output=True, text=True, timeout=1200)
    assert done.returncode == 0, done.stderr
    results = torch.load(tmp_path / "results.pt", weights_only=False)
    amid, again, left = results["killed"]
    print(f"{amid} of {KILLS} kills met a save")
    assert amid > KILLS / 4
    for rank, plain in zip(again, results["alike"]["fsdp"], strict=True):
        assert rank["records"] == plain["records"]
        assert all(torch.equal(rank["weights"][name], tensor) for name, tensor in plain["weights"].items())
        for own, other in zip(rank["state"], plain["state"], strict=True):
            assert all(torch.equal(own[name], tensor) for name, tensor in other.items())
    assert left == sorted(2 * list(set(left)))
