"""The manual pages are those of this code, man shows them without a warning, and a wheel has
them.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from srunddp.bootstrap.network.ifaces_conf import parse
from srunddp.errors import ConfigError
from tests.conftest import ROOT, tool
from tests.support.man_pages import MAN, SOURCE, page_of_file, pages

REFRESH = "python -m tests.support.man_pages makes them anew"
ALL = sorted(MAN.glob("man?/*"))


def shown(page: Path) -> str:
    """What man prints; it warns of nothing."""
    environment = os.environ | {"LC_ALL": "C.UTF-8", "MANROFFSEQ": "", "MANWIDTH": "80"}
    command = [tool("man"), "--warnings", "--local-file", str(page)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=180)
    assert (done.returncode, done.stderr) == (0, ""), page
    return re.sub(".\b", "", done.stdout)


def test_the_pages_of_the_commands_are_up_to_date() -> None:
    there = {str(path.relative_to(MAN)): path.read_text() for path in MAN.glob("man1/*")}
    assert there == pages(), REFRESH


def test_the_page_of_ifaces_conf_is_up_to_date(tmp_path: Path) -> None:
    """Whatever pandoc's version puts into it, it reads the same."""
    tool("pandoc")
    (tmp_path / "ifaces.conf.5").write_text(page_of_file())
    assert shown(MAN / "man5" / "ifaces.conf.5") == shown(tmp_path / "ifaces.conf.5"), REFRESH


def test_the_page_of_ifaces_conf_has_all_keys() -> None:
    with pytest.raises(ConfigError) as error:
        parse(b"- no such: key\n", "ifaces.conf")
    keys = re.findall(r"^\*\*(\w+)\*\*\n: ", SOURCE.read_text(), re.MULTILINE)
    assert error.value.expected == f"one of {', '.join(keys)}"


@pytest.mark.parametrize("page", ALL, ids=lambda page: page.name)
def test_man_shows_a_page(page: Path) -> None:
    text = shown(page)
    assert f"{page.stem.upper()}({page.suffix[1:]})" in text
    assert "SYNOPSIS" in text
    assert "\n\n\n" not in text


def test_options_of_a_page_are_in_groups_and_none_is_hidden() -> None:
    text = shown(MAN / "man1" / "srunddp-sbatch.1")
    assert re.findall(r"^   (\w.*)$", text, re.MULTILINE)[:2] == ["Resources", "Where it runs"]
    assert "-p, --partition NAME" in text
    assert "--spread-job" not in text


@pytest.mark.slow
def test_a_wheel_has_the_pages_and_the_data(tmp_path: Path) -> None:
    """Every file of the package that git has is in it, too."""
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tmp_path)
    for name in ("srunddp", "bin", "etc", "docs/man"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    build = "import sys; from setuptools import build_meta; build_meta.build_wheel(sys.argv[1])"
    done = subprocess.run(
        [sys.executable, "-c", build, "dist"], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    (wheel,) = (tmp_path / "dist").iterdir()
    names = set(zipfile.ZipFile(wheel).namelist())
    package = {
        str(path.relative_to(tmp_path))
        for path in (tmp_path / "srunddp").rglob("*")
        if path.is_file()
    }
    assert package - names == set()
    data = {name.partition(".data/data/")[2] for name in names} - {""}
    assert data == {
        "etc/srunddp/ifaces.conf",
        *(f"share/man/{page.relative_to(MAN)}" for page in ALL),
    }
