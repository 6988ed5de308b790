"""Ranks of two versions of srunddp, as on a node whose environment was not renewed."""

from __future__ import annotations

import shutil
import subprocess
import time
from pathlib import Path

import pytest

from srunddp import __version__
from tests.conftest import ROOT
from tests.support.facts import tells
from tests.support.starting import LONG, NODE, SRUNDDP, bare, slurm, write

TIMEOUT = 300.0


def newer(folder: Path) -> Path:
    """A copy of srunddp, of another version, whose hello and meeting have more fields."""
    shutil.copytree(
        ROOT / "srunddp", folder / "srunddp", ignore=shutil.ignore_patterns("__pycache__")
    )
    messages = "bootstrap/rendezvous/messages.py"
    for name, before, after in (
        ("_version.py", f'__version__ = "{__version__}"', '__version__ = "99.0"'),
        (messages, '    version: str = ""\n', '    version: str = ""\n    more: str = "more"\n'),
        (messages, "    sharers: int = 1\n", '    sharers: int = 1\n    most: str = "most"\n'),
    ):
        path = folder / "srunddp" / name
        text = path.read_text()
        assert before in text
        write(path, text.replace(before, after))
    return folder


@pytest.mark.parametrize("newer_rank", [0, 1])
def test_two_versions_are_refused_at_once_and_named(tmp_path: Path, newer_rank: int) -> None:
    paths = [str(ROOT)] * 2
    versions = [__version__] * 2
    paths[newer_rank] = str(newer(tmp_path / "other"))
    versions[newer_rank] = "99.0"
    words = (
        SRUNDDP[0],
        "-m",
        "srunddp",
        "--quiet",
        f"--timeout={TIMEOUT}",
        write(tmp_path / "train.py", ""),
    )
    began = time.monotonic()
    ranks = [
        subprocess.Popen(
            words,
            cwd=tmp_path,
            env=bare(slurm(rank, 2)) | {"PYTHONPATH": paths[rank]},
            text=True,
            stderr=subprocess.PIPE,
        )
        for rank in range(2)
    ]
    errors = [rank.communicate(timeout=LONG)[1] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [69, 69], errors
    assert time.monotonic() - began < TIMEOUT / 2
    own, other = (f"rank {rank} on {NODE}" for rank in (1, 0))
    assert tells(errors[0], own, versions[1], other, versions[0], "; expected ", " -> ")
    assert "".join(errors).count("\n") == 1
