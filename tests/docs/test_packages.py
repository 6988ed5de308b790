"""sdist and wheel, as an index would get them, in an environment that has nothing else, and in a
prefix.
"""

from __future__ import annotations

import tarfile
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.docs.packages import PYTHON, copy_sources, environment, run, sources


def test_an_index_would_take_both(built: dict[str, Path]) -> None:
    shown = run(PYTHON, "-m", "twine", "check", "--strict", *built.values(), folder=ROOT)
    assert shown.count("PASSED") == 2


def test_with_an_address_the_links_of_the_readme_lead_there(source: Path) -> None:
    setup = (source / "setup.py").read_text()
    (source / "with_address.py").write_text(
        setup.replace('ADDRESS = ""', 'ADDRESS = "https://git.example/srunddp"')
    )
    text = run(PYTHON, "with_address.py", "--long-description", folder=source)
    assert "](https://git.example/srunddp/blob/main/docs/README.md)" in text
    assert "](https://git.example/srunddp/raw/main/docs/pictures/report.png)" in text
    assert "](docs/" not in text
    assert "](docs/README.md)" in run(PYTHON, "setup.py", "--long-description", folder=source)


def test_the_sdist_has_all_of_the_repository(built: dict[str, Path]) -> None:
    """Tests, too: half of them would not run."""
    with tarfile.open(built[".gz"]) as archive:
        names = {file.name.partition("/")[2] for file in archive if file.isfile()}
    made = {name for name in names if name.startswith("srunddp.egg-info/")}
    assert names - made - {"PKG-INFO", "setup.cfg"} == sources()


def test_the_wheel_needs_no_compiler_and_no_extra_by_itself(built: dict[str, Path]) -> None:
    assert built[".whl"].name.endswith("-py3-none-any.whl")


@pytest.mark.parametrize("kind", [".whl", ".gz"])
def test_both_work_in_an_environment_of_their_own(
    kind: str, built: dict[str, Path], tmp_path: Path
) -> None:
    """What they require comes from this one, as torch is large."""
    environment(tmp_path / "env", built[kind])
    use(tmp_path / "env", tmp_path)


def test_a_script_beside_an_editable_clone_imports_the_package_not_the_folder(
    tmp_path: Path,
) -> None:
    """The clone's folder is called srunddp, as the package in it is."""
    clone = tmp_path / "srunddp"
    copy_sources(clone)
    environment(tmp_path / "env", "-e", clone)
    (tmp_path / "train.py").write_text("import srunddp\nprint(srunddp.init.__module__)\n")
    python = tmp_path / "env" / "bin" / "python"
    assert run(python, "train.py", folder=tmp_path).strip().startswith("srunddp.")
    assert run(python, "-m", "srunddp", "train.py", folder=tmp_path).startswith("srunddp.")


def test_the_wheel_works_in_a_prefix(built: dict[str, Path], tmp_path: Path) -> None:
    prefix = tmp_path / "prefix"
    options = (
        "--no-deps",
        "--disable-pip-version-check",
        "--quiet",
        "--ignore-installed",
        f"--prefix={prefix}",
    )
    run(PYTHON, "-m", "pip", "install", *options, built[".whl"], folder=tmp_path)
    (packages,) = prefix.glob("lib/python3.*/site-packages")
    use(prefix, tmp_path, PYTHONPATH=str(packages))


def use(prefix: Path, folder: Path, **variables: str) -> None:
    """The command, the site's file and the manual pages are there, and a script runs."""
    command = prefix / "bin" / "srunddp"
    (folder / "train.py").write_text(
        "import os, srunddp\nprint(srunddp.__file__, os.environ['WORLD_SIZE'])\n"
    )
    assert (prefix / "etc" / "srunddp" / "ifaces.conf").exists()
    assert (prefix / "share" / "man" / "man1" / "srunddp-check.1").exists()
    assert run(command, "--version", folder=folder, **variables).startswith("srunddp, version ")
    where, size = run(command, "train.py", folder=folder, **variables).split()
    assert where.startswith(f"{prefix}/")
    assert size == "1"
