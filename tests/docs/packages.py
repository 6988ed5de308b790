"""Builds sdist and wheel, and installs them."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

from tests.conftest import ROOT

PYTHON = sys.executable


def run(*words: str | Path, folder: Path, **variables: str) -> str:
    """What a command prints that has only PATH, HOME and these variables."""
    environ = {"PATH": os.environ["PATH"], "HOME": str(folder), **variables}
    done = subprocess.run(
        [*map(str, words)], cwd=folder, env=environ, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def sources() -> set[str]:
    """The files that a clone has, and those that are new."""
    listed = run("git", "ls-files", "--cached", "--others", "--exclude-standard", folder=ROOT)
    return {name for name in listed.splitlines() if (ROOT / name).exists()}


def copy_sources(folder: Path) -> None:
    """What a clone has."""
    for name in sources():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes((ROOT / name).read_bytes())


def build(source: Path) -> dict[str, Path]:
    """The sdist, and the wheel that is made of it, by their suffixes."""
    run(PYTHON, "-m", "build", "--no-isolation", "--outdir", source / "dist", folder=source)
    return {file.suffix: file for file in (source / "dist").iterdir()}


def environment(folder: Path, *package: str | Path) -> None:
    """A virtual environment with the package; what that requires comes from this one, as torch is
    large.

    Args:
        folder: Where the environment is made.
        package: What ``pip install`` gets to name the package: a file or, after ``-e``, a checkout.
    """
    venv.create(folder, with_pip=False)
    python = folder / "bin" / "python"
    ours = sysconfig.get_path("purelib")
    packages = run(
        python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", folder=folder
    ).strip()
    (Path(packages) / "others.pth").write_text(f"{ours}\n")
    options = (
        "--no-deps",
        "--no-build-isolation",
        "--disable-pip-version-check",
        "--quiet",
        "--ignore-installed",
    )
    run(PYTHON, "-m", "pip", "--python", python, "install", *options, *package, folder=folder)
