"""What other users have put where we unpack, and disks that are full; root alone can play these."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from srunddp.errors import ConfigError
from srunddp.stage.archive import ArchiveError
from srunddp.stage.pack import pack
from tests.conftest import missing
from tests.stage.conftest import Scene, scene_in
from tests.support.archives import folder, good, member, snapshot, unpacked, written

USER, OTHER = 61234, 61235


@pytest.fixture
def open_scene() -> Iterator[Scene]:
    """One that every user may look at; the folder for temporary files of pytest is closed to others."""
    if os.geteuid() != 0:
        missing("root, to act as other users")
    top = Path(tempfile.mkdtemp(dir="/var/tmp"))
    top.chmod(0o755)
    scene = scene_in(top)
    for path in (scene.own, scene.outside, scene.outside / "victim"):
        os.chown(path, USER, USER)
    yield scene
    shutil.rmtree(top)


def as_user(user: int, act: Callable[[], object]) -> None:
    """In a process of that user's."""
    child = os.fork()
    if child == 0:
        try:
            os.setgroups([])
            os.setgid(user)
            os.setuid(user)
            act()
            os._exit(0)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
    assert os.waitpid(child, 0)[1] == 0


def refused(scene: Scene, error: type[Exception], why: str) -> None:
    """As the user; and nothing changes anywhere."""
    before = snapshot(scene.top)

    def attempt() -> None:
        with pytest.raises(error, match=why):
            unpacked(scene.own / "a.tar", scene.place)

    as_user(USER, attempt)
    assert snapshot(scene.top) == before


def archived(scene: Scene) -> None:
    os.chown(written(scene.own / "a.tar", good()), USER, USER)


def test_a_user_unpacks_what_is_theirs(open_scene: Scene) -> None:
    archived(open_scene)
    as_user(USER, lambda: unpacked(open_scene.own / "a.tar", open_scene.place))
    assert {owner for _, owner, *_ in snapshot(open_scene.place).values()} == {USER}


@pytest.mark.parametrize("user", [0, OTHER])
def test_an_archive_of_somebody_else_is_refused(open_scene: Scene, user: int) -> None:
    archived(open_scene)
    (open_scene.own / "a.tar").chmod(0o644)
    os.chown(open_scene.own / "a.tar", user, user)
    refused(open_scene, ArchiveError, f"belongs to user id {user}")


@pytest.mark.parametrize("user", [0, OTHER])
def test_nothing_is_unpacked_into_the_folder_of_somebody_else(open_scene: Scene, user: int) -> None:
    archived(open_scene)
    other = open_scene.top / "other"
    other.mkdir(mode=0o755)
    os.chown(other, user, user)
    refused(open_scene._replace(place=other / "new"), ConfigError, f"other belongs to user id {user}")


@pytest.mark.parametrize("what", ["link", "dangling link", "folder", "link to an empty folder"])
def test_what_another_user_planted_at_the_destination_stays(open_scene: Scene, what: str) -> None:
    """While the folder was open to all; it has been closed since."""
    scene = open_scene
    archived(scene)
    scene.own.chmod(0o1777)
    trap = scene.top / "trap"
    trap.mkdir()
    os.chown(trap, OTHER, OTHER)
    targets = {"link": scene.outside, "dangling link": scene.outside / "none", "link to an empty folder": trap}
    as_user(OTHER, scene.place.mkdir if what == "folder" else lambda: scene.place.symlink_to(targets[what]))
    refused(scene, ConfigError, "may be changed by others")
    scene.own.chmod(0o700)
    refused(scene, ConfigError, "new is there")


def test_a_link_that_another_user_planted_for_the_archive_or_its_folder_is_not_followed(open_scene: Scene) -> None:
    scene = open_scene
    archived(scene)
    public = scene.top / "public"
    public.mkdir()
    public.chmod(0o1777)
    as_user(OTHER, lambda: (public / "own").symlink_to(scene.own))
    as_user(OTHER, lambda: (public / "a.tar").symlink_to(scene.own / "a.tar"))
    refused(scene._replace(place=public / "own" / "new"), ConfigError, "own cannot be opened")
    before = snapshot(scene.top)
    with pytest.raises(ArchiveError, match="cannot be opened"):
        unpacked(public / "a.tar", scene.place)
    assert snapshot(scene.top) == before


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """Of 3 MiB and 40 files."""
    if os.geteuid() != 0 or not shutil.which("mount"):
        missing("root, to mount a small disk")
    place = tmp_path / "disk"
    place.mkdir()
    words = ["mount", "-t", "tmpfs", "-o", "size=3m,nr_inodes=40,mode=700", "none", place]
    subprocess.run(words, check=True)
    yield place
    subprocess.run(["umount", "--lazy", place], check=True)


def test_a_disk_with_too_little_room_is_named_before_anything_is_written(scene: Scene, small_disk: Path) -> None:
    archive = written(scene.own / "a.tar", [member("big", content=bytes(4 << 20))])
    with pytest.raises(ConfigError, match=f"^3 MiB free in {small_disk}; expected 5 MiB or more -> "):
        unpacked(archive, small_disk / "new", size=4 << 20)
    assert os.listdir(small_disk) == []


def test_a_disk_with_room_for_too_few_files_is_named(scene: Scene, small_disk: Path) -> None:
    archive = written(scene.own / "a.tar", [folder(str(number)) for number in range(50)])
    with pytest.raises(ConfigError, match=f"^room for 39 more files in {small_disk}; expected 50"):
        unpacked(archive, small_disk / "new")
    assert os.listdir(small_disk) == []


def test_a_disk_that_fills_up_meanwhile_is_named_and_left_empty(
    scene: Scene, small_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    archive = written(scene.own / "a.tar", [member(str(number), content=bytes(1 << 20)) for number in range(4)])
    monkeypatch.setattr("srunddp.stage.unpack._require_room", lambda *_: None)
    with pytest.raises(ConfigError, match=f"^3 MiB free in {small_disk}; expected 5 MiB or more -> "):
        unpacked(archive, small_disk / "new", size=4 << 20)
    assert os.listdir(small_disk) == []


def test_a_disk_without_room_for_the_archive_is_named(scene: Scene, small_disk: Path) -> None:
    (scene.outside / "big").write_bytes(bytes(4 << 20))
    with pytest.raises(ConfigError, match=r"a\.tar cannot be written: No space left on device, 3 MiB free"):
        pack(scene.outside, small_disk / "a.tar")
    assert os.listdir(small_disk) == []
