"""What a checkpoint file promises."""

from __future__ import annotations

import os
import pickle
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import HERE, ROOT

from srunddp.train import load_checkpoint, save_checkpoint


def test_a_killed_save_leaves_the_previous_checkpoint(tmp_path: Path) -> None:
    run = subprocess.run(
        [sys.executable, str(HERE / "killed_saves.py"), str(tmp_path), "60"],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert run.returncode == 0, run.stderr
    amid = int(run.stdout.split()[2])
    assert amid >= 10, f"too few kills fell into a save to prove anything: {run.stdout}"


def test_a_save_reaches_the_disk_before_its_name_and_the_name_after(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A power cut keeps only what was synchronised, so the order is the promise."""
    events: list[str] = []
    fsync, replace = os.fsync, os.replace

    def noted_fsync(descriptor: int) -> None:
        found = os.fstat(descriptor)
        is_folder = stat.S_ISDIR(found.st_mode)
        events.append("folder" if is_folder else f"file of {found.st_size}")
        fsync(descriptor)

    def noted_replace(source: Any, target: Any) -> None:
        events.append("replace")
        replace(source, target)

    monkeypatch.setattr(os, "fsync", noted_fsync)
    monkeypatch.setattr(os, "replace", noted_replace)
    save_checkpoint(tmp_path / "checkpoint.pt", {"values": torch.ones(1000)})
    size = (tmp_path / "checkpoint.pt").stat().st_size
    assert events == [f"file of {size}", "replace", "folder"]


def test_a_failed_save_leaves_the_previous_checkpoint_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint.pt"
    save_checkpoint(path, {"epoch": 1})
    with pytest.raises((AttributeError, pickle.PicklingError)):
        save_checkpoint(path, {"epoch": lambda: 2})
    assert load_checkpoint(path) == {"epoch": 1}
    assert list(tmp_path.iterdir()) == [path]


class Hostile:
    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self) -> Any:
        return Path.touch, (self.trace,)


def test_loading_executes_nothing(tmp_path: Path) -> None:
    torch.save({"model": Hostile(tmp_path / "executed")}, tmp_path / "checkpoint.pt")
    with pytest.raises(pickle.UnpicklingError):
        load_checkpoint(tmp_path / "checkpoint.pt")
    assert not (tmp_path / "executed").exists()


def test_tensors_are_loaded_to_the_cpu_wherever_they_were(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        # As if saved from a fourth GPU, which loading would otherwise ask for.
        patch.setattr("torch.serialization.location_tag", lambda storage: "cuda:3")
        save_checkpoint(tmp_path / "checkpoint.pt", {"values": torch.ones(3)})
    assert load_checkpoint(tmp_path / "checkpoint.pt")["values"].device == torch.device("cpu")
