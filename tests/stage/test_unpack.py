"""Whatever an archive holds: nothing outside the new folder is written, and a broken or foreign one leaves nothing."""

from __future__ import annotations

import os
import random
import stat
import tarfile
from collections.abc import Callable

import pytest
from hypothesis import HealthCheck, given, settings

from srunddp.errors import ConfigError
from srunddp.stage.archive import ArchiveError
from srunddp.stage.unpack import unpack
from tests.stage.conftest import Scene
from tests.support.archives import (
    AMPLE,
    Member,
    folder,
    good,
    link,
    member,
    sha256_of,
    snapshot,
    unpacked,
    written,
)
from tests.support.hostile_archives import archives_of, flipped, inside_alone

F, D, L, H = tarfile.REGTYPE, tarfile.DIRTYPE, tarfile.SYMTYPE, tarfile.LNKTYPE

HOSTILE: dict[str, tuple[Callable[[Scene], list[Member]], str]] = {
    "absolute name": (lambda s: [member(f"{s.outside}/victim", content=b"x")], "no name that stays"),
    "absolute folder": (lambda s: [folder(f"{s.outside}/new")], "no name that stays"),
    "above": (lambda s: [member("../../outside/victim", content=b"x")], "no name that stays"),
    "above from below": (lambda s: [folder("a"), member("a/../../x")], "no name that stays"),
    "dot": (lambda s: [folder(".")], "no name that stays"),
    "empty name": (lambda s: [member("")], "no name that stays"),
    "empty part": (lambda s: [folder("a"), member("a//b")], "no name that stays"),
    "NUL": (lambda s: [member("ä\0b", pax_headers={"path": "a\0b"})], "no name that stays"),
    "long part": (lambda s: [member("a" * 256)], "no name that stays"),
    "long name": (lambda s: [folder("/".join(["a" * 200] * n)) for n in range(1, 25)], "too long a name"),
    "duplicate": (lambda s: [member("a"), member("a", content=b"x")], "is there twice"),
    "duplicate folder": (lambda s: [folder("a"), folder("a")], "is there twice"),
    "folder replaced by a link": (lambda s: [folder("a"), link("a", "b")], "is there twice"),
    "link replaced by a folder": (lambda s: [folder("b"), link("a", "b"), folder("a")], "is there twice"),
    "no folder": (lambda s: [member("a/b")], "in no folder"),
    "file in a file": (lambda s: [member("a"), member("a/b")], "in no folder"),
    "file through a link": (lambda s: [folder("b"), link("a", "b"), member("a/x")], "in no folder"),
    "file through a link out": (lambda s: [link("a", str(s.outside)), member("a/victim")], "is a link that may"),
    "link to an absolute path": (lambda s: [link("a", str(s.outside / "victim"))], "is a link that may lead out"),
    "link above": (lambda s: [link("a", "..")], "is a link that may lead out"),
    "link above from below": (lambda s: [folder("d"), link("d/a", "../../x")], "is a link that may lead out"),
    "link with .. after a name": (lambda s: [folder("d"), link("a", "d/..")], "is a link that may lead out"),
    "link to nothing": (lambda s: [link("a", "")], "is a link that may lead out"),
    "link with a NUL": (lambda s: [member("a", L, pax_headers={"linkpath": "ä\0"})], "is a link that may lead out"),
    "chain of links": (
        lambda s: [
            folder("d"),
            *(link(f"d/{n}", f"{n + 1}/..") for n in range(50)),
            link("out", "d/0/../.."),
            member("out/outside/victim"),
        ],
        "is a link that may lead out",
    ),
    "path of links longer than PATH_MAX": (  # CVE-2025-4517
        lambda s: [
            *(x for n in range(16) for x in _deep(n)),
            link("a/" * 16 + "l" * 254, "../" * 16),
            link("escape", "a/" * 16 + "l" * 254 + "/../../outside"),
            member("escape/victim", content=b"x"),
        ],
        "in no folder",
    ),
    "hard link outside": (lambda s: [member("a", H, linkname=str(s.outside / "victim"))], "is a hard link"),
    "hard link inside": (lambda s: [member("b"), member("a", H, linkname="b")], "is a hard link"),
    "character device": (lambda s: [member("a", tarfile.CHRTYPE, devmajor=1, devminor=3)], "is a device"),
    "block device": (lambda s: [member("a", tarfile.BLKTYPE)], "is a device"),
    "FIFO": (lambda s: [member("a", tarfile.FIFOTYPE)], "is a FIFO"),
    "old sparse file": (lambda s: [member("a", tarfile.GNUTYPE_SPARSE)], "is a sparse file"),
    "contiguous file": (lambda s: [member("a", tarfile.CONTTYPE)], "of the unknown type"),
    "unknown type": (lambda s: [member("a", b"Z")], "of the unknown type"),
    "folder with content": (lambda s: [member("a", D, content=b"x")], "has a size, and is no file"),
    "sparse file by pax": (lambda s: [member("a", pax_headers={"GNU.sparse.major": "1"})], "not known"),
    "pax time": (lambda s: [member("a", pax_headers={"mtime": "1.5"})], "not known"),
    "global header": (lambda s: [member("a", tarfile.XGLTYPE)], "of the unknown type"),
    "huge pax header": (lambda s: [member("a", pax_headers={"path": "b" * (1 << 16)})], "a pax header of"),
    "size below 0": (lambda s: [member("a", pax_headers={"size": "-512"})], "a number that is none"),
    "size of 100 digits": (lambda s: [member("a", pax_headers={"size": "9" * 100})], "a number that is none"),
    "size beyond the end": (lambda s: [member("a", pax_headers={"size": "999999"})], "is cut off"),
    "bomb by size": (lambda s: [member("a", content=bytes(1 << 20)), member("b", content=b"x")], "more bytes than"),
    "bomb by count": (lambda s: [member(str(n)) for n in range(1001)], "more members than"),
    "bomb of folders": (lambda s: [folder(str(n)) for n in range(1001)], "more members than"),
}


def _deep(number: int) -> list[Member]:
    """A folder with a long name, and a short link to it, ever deeper."""
    above = "".join(f"{'d' * 247}/" for _ in range(number))
    return [folder(f"{above}{'d' * 247}"), link(f"{'a/' * number}a" if not number else f"{above}a", "d" * 247)]


@pytest.mark.parametrize("case", HOSTILE)
def test_a_hostile_member_is_refused_before_anything_is_written(scene: Scene, case: str) -> None:
    members, why = HOSTILE[case]
    archive = written(scene.own / "a.tar", [*good(), *members(scene)])
    before = snapshot(scene.top)
    with pytest.raises(ArchiveError, match=why) as refused:
        unpacked(archive, scene.place)
    assert refused.value.exit_code == 78
    assert "\n" not in str(refused.value)
    assert snapshot(scene.top) == before


def test_the_long_names_of_gnu_are_not_read(scene: Scene) -> None:
    archive = written(scene.own / "a.tar", [member("x" * 200)], tarfile.GNU_FORMAT)
    with pytest.raises(ArchiveError, match="broken header"):
        unpacked(archive, scene.place)


@pytest.mark.parametrize("mask", [0, 0o077, 0o277])
def test_what_is_packed_well_comes_out_with_modes_of_its_own(scene: Scene, mask: int) -> None:
    archive = written(scene.own / "a.tar", good())
    old = os.umask(mask)
    try:
        unpacked(archive, scene.place, size=1210, files=7)
    finally:
        os.umask(old)
    modes = {path: stat.S_IMODE(mode) for path, (mode, *_) in snapshot(scene.place).items() if not stat.S_ISLNK(mode)}
    tools = {path for path, mode in modes.items() if mode == 0o700}
    assert set(modes.values()) == {0o600, 0o700}
    assert tools == {str(scene.place / name) for name in ("bin", "bin/tool", "lib")}
    assert stat.S_IMODE(scene.place.stat().st_mode) == 0o700
    assert (scene.place / "lib" / "up").read_text() == (scene.place / "lib64" / "up").read_text() == "#!/bin/sh\n"
    assert set(os.listdir(scene.own)) == {"a.tar", "new"}


@pytest.mark.parametrize(("size", "files"), [(1209, 7), (1210, 6), (0, 7), (1210, 0)])
def test_no_more_comes_out_than_was_packed(scene: Scene, size: int, files: int) -> None:
    archive = written(scene.own / "a.tar", good())
    with pytest.raises(ArchiveError, match=r"more (bytes|members) than were packed"):
        unpacked(archive, scene.place, size=size, files=files)
    assert os.listdir(scene.own) == ["a.tar"]


def test_an_archive_with_another_hash_is_refused_before_anything_is_written(scene: Scene) -> None:
    archive = written(scene.own / "a.tar", good())
    data, right = archive.read_bytes(), sha256_of(archive)
    with pytest.raises(ArchiveError, match="has the SHA-256"):
        unpacked(archive, scene.place, sha256="0" * 64)
    for position in range(0, len(data), 97):
        spoiled = bytearray(data)
        spoiled[position] ^= 1
        archive.write_bytes(spoiled)
        with pytest.raises(ArchiveError, match="has the SHA-256"):
            unpacked(archive, scene.place, sha256=right)
    assert os.listdir(scene.own) == ["a.tar"]


def test_an_archive_cut_off_anywhere_is_refused(scene: Scene) -> None:
    archive = written(scene.own / "a.tar", good())
    data = archive.read_bytes()
    for end in sorted({*range(0, len(data), 512), *range(1, len(data), 411), len(data) - 1}):
        archive.write_bytes(data[:end])
        with pytest.raises(ArchiveError):
            unpacked(archive, scene.place)
    assert os.listdir(scene.own) == ["a.tar"]


@pytest.mark.parametrize("more", [b"x", bytes(511) + b"x", bytes(20480), b"x" * 512])
def test_nothing_follows_the_end(scene: Scene, more: bytes) -> None:
    archive = written(scene.own / "a.tar", good())
    archive.write_bytes(archive.read_bytes() + more)
    with pytest.raises(ArchiveError, match="no proper end"):
        unpacked(archive, scene.place)


def test_flipped_bits_with_a_right_hash_change_nothing_outside(scene: Scene) -> None:
    data = written(scene.own / "a.tar", good()).read_bytes()
    assert flipped(scene, data, random.Random(1).sample(range(8 * len(data)), 400)) > 100


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(members=archives_of())
def test_no_names_and_links_lead_outside(scene: Scene, members: list[Member]) -> None:
    inside_alone(scene, members)


def test_links_that_came_by_another_way_are_made(scene: Scene) -> None:
    archive = written(scene.own / "a.tar", [*good(), link("bin/python3", "python")])
    unpacked(archive, scene.place, links={"bin/python": "/usr/bin/env"})
    assert os.readlink(scene.place / "bin" / "python") == "/usr/bin/env"
    assert os.path.realpath(scene.place / "bin" / "python3") == os.path.realpath("/usr/bin/env")


@pytest.mark.parametrize(
    ("name", "target"),
    [
        ("python", "/usr/bin/env"),
        ("lib/python", "/usr/bin/env"),
        ("bin/../python", "/usr/bin/env"),
        ("bin/..", "/usr/bin/env"),
        ("bin/", "/usr/bin/env"),
        ("bin/a/b", "/usr/bin/env"),
        ("bin/tool", "/usr/bin/env"),
        ("bin/python", "env"),
        ("bin/python", "/usr\0"),
    ],
)
def test_only_new_names_in_bin_are_linked_to_an_interpreter(scene: Scene, name: str, target: str) -> None:
    archive = written(scene.own / "a.tar", good())
    with pytest.raises(ArchiveError, match="cannot be made a link"):
        unpacked(archive, scene.place, links={name: target})
    assert os.listdir(scene.own) == ["a.tar"]


def test_a_failure_in_the_middle_leaves_nothing(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    archive = written(scene.own / "a.tar", good())

    def fail(*args: object, **kwargs: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "symlink", fail)
    with pytest.raises(ConfigError, match="cannot be written: Operation not permitted"):
        unpacked(archive, scene.place)
    assert os.listdir(scene.own) == ["a.tar"]


@pytest.mark.parametrize("what", ["file", "folder", "empty folder", "link", "dangling link"])
def test_what_is_at_the_destination_stays_as_it_is(scene: Scene, what: str) -> None:
    archive = written(scene.own / "a.tar", good())
    if what == "file":
        scene.place.write_text("mine")
    elif "folder" in what:
        scene.place.mkdir()
    else:
        scene.place.symlink_to(scene.outside if what == "link" else scene.outside / "none")
    if what == "folder":
        (scene.place / "mine").touch()
    before = snapshot(scene.top)
    with pytest.raises(ConfigError, match="new is there"):
        unpacked(archive, scene.place)
    assert snapshot(scene.top) == before


@pytest.mark.parametrize("mode", [0o777, 0o770, 0o1777])
def test_nothing_is_unpacked_into_a_folder_that_others_may_write(scene: Scene, mode: int) -> None:
    archive = written(scene.own / "a.tar", good())
    scene.own.chmod(mode)
    with pytest.raises(ConfigError, match="may be changed by others"):
        unpacked(archive, scene.place)
    assert os.listdir(scene.own) == ["a.tar"]


def test_an_archive_that_is_no_file_of_ones_own_is_refused_at_once(scene: Scene) -> None:
    real = written(scene.own / "a.tar", good())
    os.mkfifo(scene.own / "fifo")
    (scene.own / "link").symlink_to(real)
    os.link(real, scene.own / "second")
    expected = {"fifo": "no regular file", "link": "cannot be opened", "second": "has 2 names", "none": "No such file"}
    for name, why in expected.items():
        with pytest.raises(ArchiveError, match=why):
            unpack(str(scene.own / name), str(scene.place), sha256=sha256_of(real), **AMPLE)
    assert not scene.place.exists()
