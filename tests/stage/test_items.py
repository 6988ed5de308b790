"""What is staged, by the command line and the job."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from srunddp.errors import ConfigError
from srunddp.stage.items import Item, absolute, collect, require_whole
from srunddp.stage.pack import pack
from srunddp.stage.slurm import Job
from tests.conftest import ROOT


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "project"
    for name in (
        "pkg/data",
        "data",
        ".git",
        "pkg/__pycache__",
        "logs",
        "pkg/logs",
        "venv/bin",
        "venv.wheels",
        "old/bin",
    ):
        (folder / name).mkdir(parents=True)
        (folder / name / "file").write_text(name)
    for env in ("venv", "old"):
        (folder / env / "pyvenv.cfg").write_text("")
        for program in ("python", "srunddp"):
            (folder / env / "bin" / program).write_text("")
    monkeypatch.chdir(folder)
    monkeypatch.setenv("PWD", str(folder))
    return folder


def packed(item: Item, tmp_path: Path) -> set[str]:
    """The folders with a file that come along."""
    pack(item.path, tmp_path / "a.tar", leave_out=item.apart)
    listed = subprocess.run(["tar", "tf", tmp_path / "a.tar"], capture_output=True, text=True, check=True).stdout
    return {name.removesuffix("/file") for name in listed.split() if name.endswith("/file")}


def test_a_project_comes_with_its_data_and_without_environments_history_and_what_is_excluded(
    project: Path, tmp_path: Path
) -> None:
    items = collect("venv", ".", ["data", str(tmp_path)], ["/logs"])
    assert [(item.role, item.path) for item in items] == [
        ("env", f"{project}/venv"),
        ("project", str(project)),
        ("data", str(tmp_path)),
    ]
    assert packed(items[1], tmp_path) == {"pkg/data", "data", "pkg/logs"}


def test_the_log_of_the_job_that_stages_does_not_come_along(project: Path, tmp_path: Path) -> None:
    """As in a batch script, whose output is a file in the project and whose command is substituted."""
    code = "from srunddp.stage.items import collect; print(collect(None, '.', [], [])[0].apart)"
    script = f'said=$({sys.executable} -c "{code}"); echo "$said"'
    with (project / "slurm-17.out").open("w") as log, (project / "slurm-17.err").open("w") as errors:
        env = {**os.environ, "PYTHONPATH": str(ROOT)}
        subprocess.run(["bash", "-c", script], stdout=log, stderr=errors, env=env, check=True)
    assert {"'/slurm-17.out'", "'/slurm-17.err'"} <= set(re.findall(r"'[^']+'", (project / "slurm-17.out").read_text()))


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


def test_an_environment_whose_srunddp_is_somewhere_else_is_not_copied(project: Path) -> None:
    (item,) = collect("venv", None, [], [])
    with pytest.raises(ConfigError, match="pip install -e leaves it"):
        require_whole(item)
    place = project / "venv" / "lib" / "python3.11" / "site-packages" / "srunddp"
    place.mkdir(parents=True)
    (place / "__init__.py").write_text("")
    require_whole(item)


def test_paths_are_as_users_write_them_if_they_lead_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
        ({}, "this is no Slurm job"),
        ({"SLURM_JOB_ID": "1;x", "SLURM_JOB_NUM_NODES": "2"}, "this is no Slurm job"),
        ({"SLURM_JOB_ID": "17", "SLURM_JOB_NUM_NODES": "2", "SLURM_HET_SIZE": "2"}, "a heterogeneous job"),
    ],
)
def test_it_has_to_be_a_job_with_nodes_of_one_kind(environ: dict[str, str], found: str) -> None:
    with pytest.raises(ConfigError, match=found):
        Job.of(environ, "/tmp")


def test_a_job_s_folder_is_named_after_its_user_and_number() -> None:
    job = Job.of({"SLURM_JOB_ID": "17", "SLURM_JOB_NUM_NODES": "2"}, "/scratch")
    assert (job.number, job.nnodes, job.folder) == ("17", 2, f"/scratch/sdd-{os.getuid()}-17")
