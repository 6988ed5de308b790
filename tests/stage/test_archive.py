"""A folder goes through an archive as it is; what cannot is named, and a change is seen."""

from __future__ import annotations

import contextlib
import hashlib
import os
import socket
import stat
import subprocess
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest

from srunddp.errors import ConfigError
from srunddp.stage.archive import ArchiveInfo, pack, unpack
from tests.support.small_disk import small_disk


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A folder with all that one may find."""
    top = tmp_path / "proj"
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
    # Its path may have 107 letters.
    with socket.socket(socket.AF_UNIX) as line, contextlib.chdir(top):
        line.bind("socket")
    for name, target in {
        "near": "./run.sh",
        "a/up": "../run.sh",
        "gone": "nowhere",
        "a/top": "..",
    }.items():
        (top / name).symlink_to(target)
    (top / "whole").symlink_to(top / "a")
    (top / "round").symlink_to("a/../run.sh")
    os.utime(top / "run.sh", (1_500_000_000, 1_500_000_000))
    return top


def there_and_back(folder: Path, *leave_out: str) -> tuple[ArchiveInfo, Path]:
    """What was packed, and where it was unpacked."""
    archive = folder.with_name("a.tar")
    place = folder.with_name("new")
    packed = pack(str(folder), str(archive), leave_out=leave_out)
    assert packed.sha256 == sha256_of(archive)
    unpack(str(archive), str(place), sha256=packed.sha256, links=packed.links)
    return packed, place


def sha256_of(archive: Path) -> str:
    return hashlib.sha256(archive.read_bytes()).hexdigest()


def contents(top: Path) -> dict[str, object]:
    """Files with text, time and whether they are programs; links with the place they lead to;
    folders.
    """
    found: dict[str, object] = {}
    for path in top.rglob("*"):
        status = path.lstat()
        if stat.S_ISREG(status.st_mode):
            content: object = (
                path.read_bytes(),
                int(status.st_mtime),
                bool(status.st_mode & 0o100),
            )
        else:
            if path.is_dir():
                content = "folder"
            else:
                content = ""
        if stat.S_ISLNK(status.st_mode):
            content = os.path.relpath(os.path.realpath(path), os.path.realpath(top))
        if not stat.S_ISFIFO(status.st_mode) and not stat.S_ISSOCK(status.st_mode):
            found[str(path.relative_to(top))] = content
    return found


def test_folder_comes_out_as_it_went_in(project: Path) -> None:
    packed, place = there_and_back(project)
    assert contents(place) == contents(project)
    assert {"again.sh", "run.sh", "whole", "round", "gone"} <= contents(place).keys()
    assert len(contents(project)) == packed.files
    assert not {"fifo", "socket"} & {*os.listdir(place)}
    assert not os.path.isabs(os.readlink(place / "whole"))
    modes = {
        stat.S_IMODE(path.lstat().st_mode)
        for path in place.rglob("*")
        if path.is_file() and not path.is_symlink()
    }
    assert modes == {0o600, 0o700}


def test_python_without_filters_unpacks_the_same(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(tarfile, "data_filter", raising=False)  # as before 3.11.4
    monkeypatch.setattr(
        tarfile.TarFile,
        "extraction_filter",
        staticmethod(lambda member, path: member),
        raising=False,
    )
    _, place = there_and_back(project)
    assert contents(place) == contents(project)


def test_pattern_leaves_out_name_or_path(project: Path) -> None:
    (project / ".git").mkdir()
    (project / ".git" / "config").touch()
    (project / "a" / "run.sh").touch()
    (project / "a" / "out").symlink_to("/usr")
    _, place = there_and_back(project, ".git", "*.pyc", "a/run.sh", "a/b*/", "a/out")
    left = contents(place).keys()
    assert {"run.sh", "a/up", "__pycache__"} <= left
    assert not {".git", ".git/config", "a/run.sh", "__pycache__/x.pyc"} & left
    assert not any(name.startswith("a/b") for name in left)


@pytest.mark.parametrize("target", ["../../new/victim", "../..", "/etc/hostname"])
def test_link_that_leads_out_is_named(project: Path, tmp_path: Path, target: str) -> None:
    (project / "a" / "data").symlink_to(target)
    with pytest.raises(ConfigError, match=r"a/data .*out of .*--exclude=a/data"):
        pack(str(project), str(tmp_path / "a.tar"))


def test_link_to_interpreter_is_made_again(tmp_path: Path) -> None:
    environment = tmp_path / "env"
    (environment / "bin").mkdir(parents=True)
    (environment / "pyvenv.cfg").touch()
    (environment / "bin" / "python3.11").symlink_to("/usr/bin/env")
    (environment / "bin" / "python").symlink_to("python3.11")
    (environment / "bin" / "python3").symlink_to(environment / "bin" / "python")
    packed, place = there_and_back(environment)
    real = os.path.realpath("/usr/bin/env")
    assert packed.links == dict.fromkeys(("bin/python", "bin/python3", "bin/python3.11"), real)
    assert os.readlink(place / "bin" / "python3") == real


@pytest.mark.parametrize(
    ("name", "target"), [("bin/tool", "env"), ("lib/python", "env"), ("bin/python", "")]
)
def test_other_link_out_is_no_interpreter(tmp_path: Path, name: str, target: str) -> None:
    path = tmp_path / "env" / name
    path.parent.mkdir(parents=True)
    path.symlink_to(Path("/usr/bin", target))
    (tmp_path / "env" / "pyvenv.cfg").touch()
    with pytest.raises(ConfigError, match="out of the folder"):
        pack(str(tmp_path / "env"), str(tmp_path / "a.tar"))


def replace_by_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


CHANGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "shorter": (lambda path: path.write_bytes(b""), "has changed while it was packed"),
    "touched": (lambda path: os.utime(path, (1, 1)), "has changed while it was packed"),
    "gone": (Path.unlink, "cannot be read: No such file"),
    "pipe": (replace_by_pipe, "has changed while it was packed"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_file_that_changes_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    """It changes after its size is known, and before it is read."""
    act, said = CHANGES[change]
    at_reading(monkeypatch, made(tmp_path), act)
    with pytest.raises(ConfigError, match=f"proj/a {said}"):
        pack(str(tmp_path / "proj"), str(tmp_path / "a.tar"))


def test_file_that_grows_is_packed_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the log of the job that packs it."""
    at_reading(monkeypatch, made(tmp_path), lambda path: path.write_bytes(b"x" * 10 + b"y" * 5))
    packed, place = there_and_back(tmp_path / "proj")
    assert ((place / "a").read_bytes(), packed.size) == (b"x" * 10, 10)


def made(tmp_path: Path) -> Path:
    path = tmp_path / "proj" / "a"
    path.parent.mkdir()
    path.write_bytes(b"x" * 10)
    return path


def at_reading(monkeypatch: pytest.MonkeyPatch, path: Path, act: Callable[[Path], object]) -> None:
    real = os.open

    def call(asked: str, *args: int, **kwargs: int) -> int:
        if asked == str(path):
            act(path)
        return real(asked, *args, **kwargs)

    monkeypatch.setattr(os, "open", call)


def test_folder_that_is_missing_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none .*No such file"):
        pack(str(tmp_path / "none"), str(tmp_path / "a.tar"))


def test_hash_changes_with_what_is_packed(project: Path, tmp_path: Path) -> None:
    """A copy of the folder has the same, whatever is in it that is not packed."""
    subprocess.run(["cp", "-a", project, tmp_path / "copy"], check=True)
    os.mkfifo(tmp_path / "copy" / "another")
    (tmp_path / "copy" / "__pycache__" / "y.pyc").touch()
    (tmp_path / "copy" / "whole").unlink()  # it leads into the first one
    (tmp_path / "copy" / "whole").symlink_to("a")

    def sha256(folder: Path) -> str:
        (tmp_path / "a.tar").unlink(missing_ok=True)
        return pack(str(folder), str(tmp_path / "a.tar"), leave_out=("*.pyc",)).sha256

    seen = [sha256(project)]
    assert sha256(tmp_path / "copy") == seen[0]

    def link_elsewhere() -> None:
        (project / "near").unlink()
        (project / "near").symlink_to("empty")

    changes: list[Callable[[], object]] = [
        lambda: (project / "empty").write_text("x"),
        lambda: os.utime(project / "empty", (1, 1)),
        lambda: (project / "empty").chmod(0o755),
        lambda: (project / "new").mkdir(),
        link_elsewhere,
    ]
    for change in changes:
        change()
        assert sha256(project) not in seen
        seen.append(sha256(project))


def test_other_archive_is_refused_before_writing(project: Path, tmp_path: Path) -> None:
    archive = tmp_path / "a.tar"
    packed = pack(str(project), str(archive))
    data = bytearray(archive.read_bytes())
    for spoiled in (data[:-512], data[:600] + b"X" + data[601:], data + b"x"):
        archive.write_bytes(spoiled)
        with pytest.raises(
            ConfigError, match=r"a\.tar has the SHA-256 .*; expected .* -> stage it again"
        ):
            unpack(str(archive), str(tmp_path / "new"), sha256=packed.sha256, links={})
    assert sorted(os.listdir(tmp_path)) == ["a.tar", "proj"]


@pytest.mark.skipif(
    not hasattr(tarfile, "data_filter"), reason="Python has no filters before 3.11.4"
)
@pytest.mark.parametrize("name", ["{}/victim", "../victim"])
def test_nothing_is_written_outside_the_folder(tmp_path: Path, name: str) -> None:
    """Whoever made the archive, and though its hash is right."""
    with tarfile.open(tmp_path / "a.tar", "w") as tar:
        tar.addfile(tarfile.TarInfo(name.format(tmp_path)))
    with contextlib.suppress(ConfigError):
        unpack(
            str(tmp_path / "a.tar"),
            str(tmp_path / "new"),
            sha256=sha256_of(tmp_path / "a.tar"),
            links={},
        )
    assert {*os.listdir(tmp_path)} <= {"a.tar", "new"}


def test_full_disk_is_named_and_left_empty(tmp_path: Path) -> None:
    (tmp_path / "proj").mkdir()
    for number in range(4):
        (tmp_path / "proj" / str(number)).write_bytes(bytes(1 << 20))
    packed = pack(str(tmp_path / "proj"), str(tmp_path / "a.tar"))
    with small_disk(tmp_path / "disk", "3m") as disk:
        with pytest.raises(ConfigError, match=f"{disk}/new .*No space left"):
            unpack(str(tmp_path / "a.tar"), str(disk / "new"), sha256=packed.sha256, links={})
        assert os.listdir(disk) == []
        with pytest.raises(OSError, match="No space left on device"):
            pack(str(tmp_path / "proj"), str(disk / "a.tar"))


def test_what_is_at_the_destination_stays(project: Path, tmp_path: Path) -> None:
    packed = pack(str(project), str(tmp_path / "a.tar"))
    (tmp_path / "new").mkdir()
    (tmp_path / "new" / "mine").touch()
    with pytest.raises(ConfigError, match=r"new .*not empty"):
        unpack(str(tmp_path / "a.tar"), str(tmp_path / "new"), sha256=packed.sha256, links={})
    assert os.listdir(tmp_path / "new") == ["mine"]
