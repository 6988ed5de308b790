"""What is staged, by the command line and the job."""

from __future__ import annotations

import os
import tarfile
from pathlib import Path

import pytest

from srunddp.errors import ConfigError
from srunddp.stage.archive import pack
from srunddp.stage.push import absolute, collect, require_whole
from srunddp.stage.slurm import Job


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A project with two environments in it, ``venv`` and ``old``."""
    folder = tmp_path / "project"
    own = ("pkg/data", "data", ".git", "pkg/__pycache__", "logs", "pkg/logs")
    for name in (*own, "venv/bin", "slurm-17.out", "old/bin"):
        (folder / name).mkdir(parents=True)
        (folder / name / "file").write_text(name)
    for env in ("venv", "old"):
        for name in ("pyvenv.cfg", "bin/python", "bin/srunddp"):
            (folder / env / name).write_text("")
    monkeypatch.chdir(folder)
    monkeypatch.setenv("PWD", str(folder))
    return folder


def test_project_comes_without_what_is_not_its_own(project: Path, tmp_path: Path) -> None:
    """Its data comes with it; environments, history, Slurm's logs and what is excluded do not."""
    items = collect("venv", ".", ["data", str(tmp_path)], ["/logs"])
    wanted = [("env", f"{project}/venv"), ("project", str(project)), ("data", str(tmp_path))]
    assert [(item.role, item.path) for item in items] == wanted
    pack(items[1].path, str(tmp_path / "a.tar"), leave_out=items[1].leave_out)
    with tarfile.open(tmp_path / "a.tar") as archive:
        packed = {os.path.dirname(name) for name in archive.getnames() if name.endswith("/file")}
    assert packed == {"pkg/data", "data", "pkg/logs"}


@pytest.mark.parametrize(
    ("arguments", "found"),
    [
        (("none", None, []), "none: no folder"),
        ((None, "/", []), "/: no folder"),
        ((None, ".", ["/etc/hostname"]), "/etc/hostname: no folder"),
        ((None, None, ["data", "./data"]), "data is named twice"),
        (("data", None, []), "has no bin/python"),
    ],
)
def test_what_cannot_be_staged_is_refused(
    project: Path, arguments: tuple[str | None, str | None, list[str]], found: str
) -> None:
    with pytest.raises(ConfigError, match=found):
        collect(*arguments, [])


def test_environment_without_srunddp_in_it_is_refused(project: Path) -> None:
    (item,) = collect("venv", None, [], [])
    with pytest.raises(ConfigError, match="pip install -e leaves it"):
        require_whole(item)
    place = project / "venv" / "lib" / "python3.11" / "site-packages" / "srunddp"
    place.mkdir(parents=True)
    (place / "__init__.py").write_text("")
    require_whole(item)


def test_path_is_as_users_write_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If it leads there."""
    (tmp_path / "disk" / "home" / "data").mkdir(parents=True)
    (tmp_path / "disk" / "data").mkdir()
    (tmp_path / "home").symlink_to("disk/home")
    monkeypatch.chdir(tmp_path / "home")
    monkeypatch.setenv("PWD", str(tmp_path / "home"))
    assert absolute("data") == f"{tmp_path}/home/data"
    assert absolute("../data") == f"{tmp_path}/disk/data"  # for the kernel, .. is the real folder's
    monkeypatch.setenv("PWD", "/somewhere/else")
    assert absolute("data") == f"{tmp_path}/disk/home/data"


@pytest.mark.parametrize(
    ("environ", "found"),
    [
        ({}, "this is not a Slurm job"),
        ({"SLURM_JOB_ID": "1;x", "SLURM_JOB_NUM_NODES": "2"}, "this is not a Slurm job"),
        (
            {"SLURM_JOB_ID": "17", "SLURM_JOB_NUM_NODES": "2", "SLURM_HET_SIZE": "2"},
            "a heterogeneous job",
        ),
    ],
)
def test_other_than_a_job_of_one_kind_is_refused(environ: dict[str, str], found: str) -> None:
    with pytest.raises(ConfigError, match=found):
        Job.of(environ, "/tmp")
