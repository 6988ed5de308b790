"""A folder of the user's own, and beside it one in which nothing may ever change."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import pytest


class Scene(NamedTuple):
    """``own`` for the archive and what is unpacked, ``outside`` with a victim; both in ``top``."""

    top: Path
    own: Path
    outside: Path
    place: Path


def scene_in(top: Path) -> Scene:
    own, outside = top / "own", top / "outside"
    own.mkdir(mode=0o700)
    outside.mkdir()
    (outside / "victim").write_text("as it was\n")
    return Scene(top, own, outside, own / "new")


@pytest.fixture
def scene(tmp_path: Path) -> Scene:
    return scene_in(tmp_path)
