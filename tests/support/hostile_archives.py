"""Archives nobody thought of, and that they change nothing outside; shared with the long campaign."""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
import tarfile
from collections.abc import Iterable

from hypothesis import strategies as st

from srunddp.errors import SrunddpError
from tests.stage.conftest import Scene
from tests.support.archives import Member, member, snapshot, unpacked, written

_NAMES = st.sampled_from(["a", "b", "c", "d"])
_PARTS = st.one_of(_NAMES, _NAMES, _NAMES, st.sampled_from(["..", ".", "", "\0", "outside", "victim", "x" * 300]))
_KINDS = st.sampled_from([tarfile.DIRTYPE] * 4 + [tarfile.REGTYPE] * 2 + [tarfile.SYMTYPE] * 4 + [tarfile.LNKTYPE])


@st.composite
def archives_of(draw: st.DrawFn) -> list[Member]:
    """Some are good, most are nearly so."""
    found: list[Member] = []
    folders = [""]
    for _ in range(draw(st.integers(1, 12))):
        above = draw(st.sampled_from(folders))
        wild = draw(st.integers(0, 9)) == 0
        name = "/".join(draw(st.lists(_PARTS, min_size=1, max_size=4))) if wild else f"{above}{draw(_NAMES)}"
        kind = draw(_KINDS)
        up = "../" * draw(st.integers(0, name.count("/") + wild))
        target = up + "/".join(draw(st.lists(_NAMES if not wild else _PARTS, min_size=1, max_size=4)))
        found.append(member(name, kind, linkname=target if kind in (tarfile.SYMTYPE, tarfile.LNKTYPE) else ""))
        if kind == tarfile.DIRTYPE and not wild:
            folders.append(f"{name}/")
    return found


def inside_alone(scene: Scene, members: list[Member]) -> bool:
    """Unpack; whether it was taken. Nothing outside has changed, and no link that was made leads there."""
    archive = written(scene.own / "a.tar", members)
    return _kept_inside(scene, archive.read_bytes())


def flipped(scene: Scene, data: bytes, bits: Iterable[int]) -> int:
    """How many of the archives with one flipped bit were refused."""
    refused = 0
    for bit in bits:
        spoiled = bytearray(data)
        spoiled[bit // 8] ^= 1 << bit % 8
        refused += not _kept_inside(scene, bytes(spoiled))
    return refused


def _kept_inside(scene: Scene, data: bytes) -> bool:
    archive = scene.own / "a.tar"
    archive.write_bytes(data)
    before = snapshot(scene.top, lambda path: path == str(scene.place))
    taken = False
    with contextlib.suppress(SrunddpError):
        unpacked(archive, scene.place)
        taken = True
    assert snapshot(scene.top, lambda path: path == str(scene.place)) == before
    assert os.path.lexists(scene.place) == taken
    if taken:
        _require_inside(scene)
        shutil.rmtree(scene.place)
    return taken


def _require_inside(scene: Scene) -> None:
    root = os.path.realpath(scene.place)
    for path, (mode, *_) in snapshot(scene.place).items():
        assert os.path.realpath(path).startswith(root + "/") or os.path.realpath(path) == root, path
        assert stat.S_ISLNK(mode) or stat.S_IMODE(mode) in (0o600, 0o700)
