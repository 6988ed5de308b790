"""``python -m srunddp`` is the command ``srunddp``."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.support.starting import python, srunddp, write


@pytest.mark.parametrize(
    "arguments",
    ["--version", "--help", "--no-such", "--quiet train.py 7", "--quiet -m train 7", "absent.py"],
)
def test_the_module_does_what_the_command_does(tmp_path: Path, arguments: str) -> None:
    """Also what a script sees: its name, its arguments, and where it finds its neighbours."""
    write(
        tmp_path / "train.py",
        "import __main__, sys; print(sys.argv, sys.path[0], __main__.__file__); sys.exit(3)\n",
    )
    of_module = python("-m", "srunddp", *arguments.split(), folder=tmp_path, PYTHONPATH=str(ROOT))
    of_command = srunddp(*arguments.split(), folder=tmp_path, PYTHONPATH=str(ROOT))
    assert of_module.returncode == of_command.returncode
    assert (of_module.stdout, of_module.stderr) == (of_command.stdout, of_command.stderr)


PYTHON = f"python{sys.version_info[0]}.{sys.version_info[1]}"


@pytest.mark.parametrize("packages", [f"lib/{PYTHON}/site-packages", "."])
def test_a_command_whose_packages_python_does_not_search_names_their_folder(
    packages: str, tmp_path: Path
) -> None:
    """As ``pip install --prefix`` and ``--target`` leave it; a folder beside it is no package."""
    prefix = tmp_path / "prefix"
    command = write(prefix / "bin" / "srunddp", "")
    shutil.copy(ROOT / "bin" / "srunddp", command)
    write(prefix / packages / "srunddp" / "__init__.py", "")
    (tmp_path / "srunddp").mkdir()
    words = [sys.executable, "-S", str(command), "--version"]  # without packages of its own

    def said(path: Path) -> str:
        environ = {"PYTHONPATH": str(path)}
        done = subprocess.run(words, cwd=tmp_path, env=environ, capture_output=True, text=True)
        assert (done.returncode, done.stdout, done.stderr.count("\n")) == (78, "", 1)
        return done.stderr

    folder = (prefix / packages).resolve()
    assert said(tmp_path).endswith(f"-> export PYTHONPATH={folder}\n")
    assert "no click" in said(folder)


def test_a_command_whose_packages_are_for_another_python_names_that(tmp_path: Path) -> None:
    """The packages of the running Python come first, wherever both are."""
    prefix = tmp_path / "prefix"
    command = write(prefix / "bin" / "srunddp", "")
    shutil.copy(ROOT / "bin" / "srunddp", command)
    words = [sys.executable, "-S", str(command), "--version"]

    def said() -> str:
        done = subprocess.run(words, cwd=tmp_path, env={}, capture_output=True, text=True)
        assert (done.returncode, done.stdout, done.stderr.count("\n")) == (78, "", 1)
        return done.stderr

    # In the order of names one of them is before any other Python's, and one behind.
    for other in ("python3.0", "python3.99"):
        write(prefix / "lib" / other / "site-packages" / "srunddp" / "__init__.py", "")
        assert said().endswith(f"start it by python3.0 {command.resolve()}\n")
    folder = prefix / "lib" / PYTHON / "site-packages"
    write(folder / "srunddp" / "__init__.py", "")
    assert said().endswith(f"-> export PYTHONPATH={folder.resolve()}\n")
