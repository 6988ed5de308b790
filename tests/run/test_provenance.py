"""By what a run was made, as its report tells: options, commit, versions."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from srunddp._version import __version__
from srunddp.run.provenance import git_commit, versions
from tests.conftest import ROOT, tool
from tests.support.starting import srunddp, write


def git(folder: Path, *words: str) -> str:
    """Run git there, without settings of the user's."""
    environ = {
        "PATH": os.environ["PATH"],
        "GIT_CONFIG_GLOBAL": "/dev/null",
        "GIT_CONFIG_SYSTEM": "/dev/null",
        **{f"GIT_{who}_{what}": "a@b" for who in ("AUTHOR", "COMMITTER") for what in ("NAME",)},
        **{f"GIT_{who}_EMAIL": "a@b" for who in ("AUTHOR", "COMMITTER")},
    }
    return subprocess.run(
        [tool("git"), *words], cwd=folder, env=environ, check=True, capture_output=True, text=True
    ).stdout.strip()


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    folder = tmp_path / "repository"
    write(folder / "src" / "train.py", "print('over')\n")
    git(folder, "init", "--quiet")
    git(folder, "add", ".")
    git(folder, "commit", "--quiet", "--message=one")
    return folder


def test_the_commit_is_the_one_that_git_names(repository: Path) -> None:
    def is_right(folder: Path) -> bool:
        return git_commit(folder) == git(folder, "rev-parse", "HEAD")

    assert is_right(repository / "src")
    git(repository, "pack-refs", "--all")
    assert is_right(repository)
    git(repository, "checkout", "--quiet", "-b", "feature/of-it")
    git(repository, "commit", "--quiet", "--allow-empty", "--message=two")
    assert is_right(repository)
    git(repository, "worktree", "add", "--quiet", "-b", "other", "../worktree", "HEAD~1")
    assert is_right(repository.parent / "worktree" / "src")
    git(repository, "pack-refs", "--all")
    assert is_right(repository.parent / "worktree")
    git(repository, "checkout", "--quiet", "--detach", "HEAD~1")
    assert is_right(repository)
    link = repository.parent / "link"
    link.symlink_to(repository / "src")
    assert is_right(link)


def test_no_commit_is_named_where_there_is_none(tmp_path: Path) -> None:
    assert git_commit(tmp_path / "missing") == ""
    folder = tmp_path / "new"
    folder.mkdir()
    git(folder, "init", "--quiet")
    assert git_commit(folder) == ""
    write(folder / ".git" / "HEAD", "ref: ../../secret\n")
    write(tmp_path / "secret", "password\n")
    assert git_commit(folder) == ""
    (folder / ".git" / "HEAD").unlink()
    assert git_commit(folder) == ""


@pytest.mark.parametrize("content", [b"\0" * 40, b"gitdir: \xff", b"gitdir: /dev/null\0"])
def test_a_damaged_file_of_git_names_no_commit(tmp_path: Path, content: bytes) -> None:
    (tmp_path / ".git").write_bytes(content)
    assert git_commit(tmp_path) == ""


def test_versions_are_those_of_the_installed_packages() -> None:
    found = versions()
    assert found["python"] == ".".join(map(str, sys.version_info[:3]))
    assert found["srunddp"] == __version__
    for name in ("torch", "numpy"):
        assert found[name] == metadata.version(name)


def test_the_report_tells_by_what_a_run_was_made(repository: Path, tmp_path: Path) -> None:
    done = srunddp(
        *("--monitor=60", "--monitor-dir=readings", "--grace=7", repository / "src" / "train.py"),
        folder=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    found = report(tmp_path)
    commit = git(repository, "rev-parse", "HEAD")
    assert found["git_commit"] == commit
    assert found["versions"] == versions()
    assert (found["options"]["grace"], found["options"]["monitor"]) == (7.0, 60.0)
    assert found["settings"] == {}
    shown = srunddp("report", "readings/run", folder=tmp_path)
    assert f"commit {commit}" in " ".join(shown.stdout.split())
    page = (tmp_path / "readings" / "run" / "report.html").read_text()
    assert commit in page
    assert f"torch {metadata.version('torch')}" in page
    assert "<td>--signal-grace</td><td>300.0</td>" in page


def test_the_report_has_the_settings_of_a_trainer(tmp_path: Path) -> None:
    """Those of its last start there: an earlier run's file is gone with it."""
    script = ROOT / "docs" / "examples" / "simple.py"
    monitor = ("--monitor=60", "--monitor-dir=readings")
    words = ("--epochs=1", "--batch_size=100", f"--output_dir={tmp_path / 'out'}")
    assert srunddp(*monitor, script, *words, folder=tmp_path).returncode == 0
    found = report(tmp_path)
    assert (found["settings"]["epochs"], found["settings"]["batch_size"]) == (1, 100)
    assert found["settings"]["lr"] == 0.01
    write(tmp_path / "train.py", "print('no Trainer')\n")
    assert srunddp(*monitor, "train.py", folder=tmp_path).returncode == 0
    assert report(tmp_path)["settings"] == {}


def report(folder: Path) -> dict[str, Any]:
    told = srunddp("report", "--json", "readings/run", folder=folder)
    assert told.returncode == 0, told.stderr
    return dict(json.loads(told.stdout))
