"""A folder goes through an archive as it is; what cannot is named, and a change is seen."""

from __future__ import annotations

import contextlib
import os
import socket
import stat
import subprocess
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest

from srunddp.errors import ConfigError
from srunddp.stage.pack import ArchiveInfo, fingerprint, pack
from srunddp.stage.unpack import unpack
from tests.stage.conftest import Scene
from tests.support.archives import sha256_of


@pytest.fixture
def project(scene: Scene) -> Path:
    """A folder with all that one may find."""
    top = scene.top / "proj"
    deep = top / "a" / ("b" * 120) / ("c" * 120) / ("d" * 120)
    deep.mkdir(parents=True)
    (deep / "train ü\n.py").write_text("print()\n")
    Path(os.fsdecode(os.fsencode(top) + b"/\xff\xfe")).write_bytes(b"\0" * 1000)
    (top / "run.sh").write_text("#!/bin/sh\n")
    (top / "run.sh").chmod(0o755)
    (top / "closed").mkdir(mode=0o500)
    (top / "empty").touch()
    os.link(top / "run.sh", top / "again.sh")
    (top / "__pycache__").mkdir()
    (top / "__pycache__" / "x.pyc").write_bytes(b"x" * 512)
    os.mkfifo(top / "fifo")
    with socket.socket(socket.AF_UNIX) as line, contextlib.chdir(top):  # its path may have 107 letters
        line.bind("socket")
    for name, target in (("near", "run.sh"), ("dot", "./run.sh"), ("a/up", "../run.sh"), ("gone", "nowhere")):
        (top / name).symlink_to(target)
    (top / "whole").symlink_to(top / "a")
    (top / "round").symlink_to("a/../run.sh")
    os.utime(top / "run.sh", (1_500_000_000, 1_500_000_000))
    return top


def there_and_back(scene: Scene, folder: Path, *leave_out: str) -> ArchiveInfo:
    archive = scene.own / "a.tar"
    packed = pack(folder, archive, leave_out=leave_out)
    assert (packed.sha256, packed.archive_size) == (sha256_of(archive), archive.stat().st_size)
    facts = {"sha256": packed.sha256, "size": packed.size, "files": packed.files, "links": packed.links}
    unpack(str(archive), str(scene.place), **facts)
    return packed


def contents(top: Path) -> dict[str, object]:
    found: dict[str, object] = {}
    for here, folders, files in os.walk(top):
        for name in (*folders, *files):
            path = Path(here, name)
            status = path.lstat()
            if stat.S_ISREG(status.st_mode):
                executable = bool(status.st_mode & 0o100)
                found[str(path.relative_to(top))] = (path.read_bytes(), int(status.st_mtime), executable)
            elif stat.S_ISLNK(status.st_mode):
                found[str(path.relative_to(top))] = os.path.relpath(os.path.realpath(path), os.path.realpath(top))
            elif stat.S_ISDIR(status.st_mode):
                found[str(path.relative_to(top))] = "folder"
    return found


def test_a_folder_comes_out_as_it_went_in(scene: Scene, project: Path) -> None:
    packed = there_and_back(scene, project)
    assert contents(scene.place) == contents(project)
    assert {"again.sh", "run.sh", "whole", "round", "gone"} <= contents(scene.place).keys()
    assert len(contents(project)) == packed.files
    assert not {"fifo", "socket"} & {*os.listdir(scene.place)}
    assert (scene.place / "again.sh").stat().st_nlink == 1
    assert not os.path.isabs(os.readlink(scene.place / "whole"))


def test_gnu_tar_reads_what_is_packed(scene: Scene, project: Path) -> None:
    pack(project, scene.own / "a.tar")
    listed = subprocess.run(["tar", "-tf", scene.own / "a.tar"], capture_output=True, check=True)
    assert listed.stdout.count(b"\n") == len(contents(project))


def test_the_same_folder_gives_the_same_archive(scene: Scene, project: Path) -> None:
    first, second = (pack(project, scene.own / name) for name in ("a.tar", "b.tar"))
    assert first == second


def test_an_archive_is_the_users_alone_and_new(scene: Scene, project: Path) -> None:
    old = os.umask(0)
    try:
        pack(project, scene.own / "a.tar")
    finally:
        os.umask(old)
    assert stat.S_IMODE((scene.own / "a.tar").stat().st_mode) == 0o600
    before = sha256_of(scene.own / "a.tar")
    (scene.own / "link").symlink_to(scene.outside / "new")
    for name in ("a.tar", "link"):
        with pytest.raises(ConfigError, match="is there"):
            pack(project, scene.own / name)
    assert sha256_of(scene.own / "a.tar") == before
    assert os.listdir(scene.outside) == ["victim"]


def test_patterns_leave_out_by_name_and_by_path(scene: Scene, project: Path) -> None:
    (project / ".git").mkdir()
    (project / ".git" / "config").touch()
    (project / "a" / "run.sh").touch()
    (project / "a" / "out").symlink_to(scene.outside)
    there_and_back(scene, project, ".git", "*.pyc", "a/run.sh", "a/b*/", "a/out")
    left = contents(scene.place).keys()
    assert {"run.sh", "a/up", "__pycache__"} <= left
    assert not {".git", ".git/config", "a/run.sh", "__pycache__/x.pyc"} & left
    assert not any(name.startswith("a/b") for name in left)


@pytest.mark.parametrize(
    "target", ["../../outside/victim", "{outside}/victim", "../../outside", "/etc/hostname", "a/../.."]
)
def test_a_link_that_leads_out_is_named(scene: Scene, project: Path, target: str) -> None:
    (project / "a" / "data").symlink_to(target.format(outside=scene.outside))
    with pytest.raises(ConfigError, match=r"a/data is a link to .*out of the folder.*--exclude=a/data"):
        pack(project, scene.own / "a.tar")
    assert os.listdir(scene.own) == []


@pytest.mark.parametrize("name", ["python", "python3.11"])
def test_an_environments_link_to_its_interpreter_is_made_again(scene: Scene, name: str) -> None:
    environment = scene.top / "env"
    (environment / "bin").mkdir(parents=True)
    (environment / "pyvenv.cfg").touch()
    (environment / "bin" / name).symlink_to("/usr/bin/env")
    (environment / "bin" / "python3").symlink_to(name)
    packed = there_and_back(scene, environment)
    assert packed.links == {f"bin/{name}": "/usr/bin/env"}
    assert os.readlink(scene.place / "bin" / name) == "/usr/bin/env"
    assert os.path.realpath(scene.place / "bin" / "python3") == os.path.realpath("/usr/bin/env")


def test_an_interpreter_that_is_reached_over_the_environment_itself_is_named_as_it_is(scene: Scene) -> None:
    environment = scene.top / "env"
    (environment / "bin").mkdir(parents=True)
    (environment / "pyvenv.cfg").touch()
    (environment / "bin" / "python").symlink_to("/usr/bin/env")
    (environment / "bin" / "python3").symlink_to(environment / "bin" / "python")
    assert pack(environment, scene.own / "a.tar").links["bin/python3"] == os.path.realpath("/usr/bin/env")


@pytest.mark.parametrize("name", ["bin/tool", "lib/python", "bin/python"])
def test_no_other_link_out_is_taken_for_an_interpreter(scene: Scene, name: str) -> None:
    environment = scene.top / "env"
    (environment / name).parent.mkdir(parents=True)
    (environment / name).symlink_to("/usr" if name == "bin/python" else "/usr/bin/env")
    (environment / "pyvenv.cfg").touch()
    with pytest.raises(ConfigError, match="out of the folder"):
        pack(environment, scene.own / "a.tar")


def at_reading(monkeypatch: pytest.MonkeyPatch, path: Path, act: Callable[[], object]) -> None:
    """Something happens to a file once its facts are known, before it is opened."""
    real = os.open

    def call(asked: str, *args: object, **kwargs: object) -> int:
        if asked == str(path):
            act()
        return real(asked, *args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(os, "open", call)


@pytest.fixture
def changing(scene: Scene) -> Path:
    """A file in a folder of its own."""
    path = scene.top / "proj" / "a"
    path.parent.mkdir()
    path.write_bytes(b"x" * 10)
    return path


CHANGES: dict[str, Callable[[Path], object]] = {
    "shorter": lambda path: path.write_bytes(b""),
    "touched": lambda path: os.utime(path, (1, 1)),
    "gone": Path.unlink,
    "replaced by a link": lambda path: (path.unlink(), path.symlink_to("/etc/hostname")),
    "replaced by a FIFO": lambda path: (path.unlink(), os.mkfifo(path)),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_file_that_changes_before_it_is_read_is_named(
    scene: Scene, changing: Path, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    at_reading(monkeypatch, changing, lambda: CHANGES[change](changing))
    with pytest.raises(ConfigError, match="proj/a has changed while it was packed"):
        pack(changing.parent, scene.own / "a.tar")
    assert os.listdir(scene.own) == []


@pytest.mark.parametrize("change", ["shorter", "touched"])
def test_a_file_that_changes_while_it_is_read_is_named(
    scene: Scene, changing: Path, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    real = os.readv

    def call(file: int, rooms: list[memoryview]) -> int:
        CHANGES[change](changing)
        return real(file, rooms)

    monkeypatch.setattr(os, "readv", call)
    with pytest.raises(ConfigError, match="proj/a has changed while it was packed"):
        pack(changing.parent, scene.own / "a.tar")
    assert os.listdir(scene.own) == []


def test_a_file_that_grows_while_it_is_packed_is_packed_as_it_was_found(
    scene: Scene, changing: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the log of the job that packs it."""

    def grow() -> None:
        with changing.open("ab") as file:
            file.write(b"y" * 5)

    at_reading(monkeypatch, changing, grow)
    packed = pack(changing.parent, scene.own / "a.tar")
    with tarfile.open(scene.own / "a.tar") as archive:
        file = archive.extractfile("a")
        assert file is not None
        assert file.read() == b"x" * 10
    assert packed.size == 10


def test_a_folder_that_is_not_there_is_named(scene: Scene) -> None:
    for act in (lambda: fingerprint(scene.top / "none"), lambda: pack(scene.top / "none", scene.own / "a.tar")):
        with pytest.raises(ConfigError, match="none cannot be read: No such file"):
            act()
    assert os.listdir(scene.own) == []


def test_a_folder_for_the_archive_that_is_not_there_is_named(scene: Scene, project: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be written: No such file"):
        pack(project, scene.own / "none" / "a.tar")


def test_a_fingerprint_stays_until_something_changes(scene: Scene, project: Path) -> None:
    seen = [fingerprint(project)]
    assert fingerprint(project) == seen[0]
    subprocess.run(["cp", "-a", project, scene.top / "copy"], check=True)
    assert fingerprint(scene.top / "copy") == seen[0]
    changes: list[Callable[[], object]] = [
        lambda: (project / "empty").write_text("x"),
        lambda: os.utime(project / "empty", ns=(1, 1_000_000_001)),
        lambda: os.utime(project / "empty", ns=(1, 1_000_000_002)),
        lambda: (project / "empty").chmod(0o755),
        lambda: (project / "new").mkdir(),
        lambda: (project / "new").rename(project / "newer"),
        lambda: ((project / "near").unlink(), (project / "near").symlink_to("empty")),
        lambda: (project / "fifo").unlink() or (project / "fifo").touch(),
    ]
    for change in changes:
        change()
        assert fingerprint(project) not in seen
        seen.append(fingerprint(project))


def test_a_fingerprint_leaves_out_what_is_not_packed(project: Path) -> None:
    before = fingerprint(project, leave_out=("*.pyc", ".git"))
    (project / "__pycache__" / "y.pyc").touch()
    (project / ".git").mkdir()
    os.mkfifo(project / "another")
    assert fingerprint(project, leave_out=("*.pyc", ".git")) == before
