"""An environment is built by uv, by a lock; it runs wherever it is moved to, and is there whole or
not.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from srunddp import __version__
from srunddp.errors import ConfigError
from srunddp.stage import build as building
from srunddp.stage.build import LOCK, build, own_requirements
from tests.support.facts import tells
from tests.support.starting import SRUNDDP
from tests.support.wheels import own_packages, own_wheels, source, wheel

pytestmark = pytest.mark.slow

Build = Callable[..., dict[str, str]]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which ``srunddp stage build`` made an environment of wheels, which was moved to
    ``moved env``.
    """
    top = tmp_path_factory.mktemp("whole")
    own_wheels(top / "wheels")
    wheel(top / "wheels", "tool", requires=("dep>=1",))
    wheel(top / "wheels", "dep")
    wheel(top / "wheels", "dep", "2.0")
    wheel(top / "wheels", "torch", "0.1")
    (top / "requirements.txt").write_text("tool\ntorch  # a comment\n")
    words = [*SRUNDDP, "stage", "build", "-r", "requirements.txt", "-o", "env", "--wheels=wheels"]
    done = subprocess.run(words, cwd=top, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(
        f"{top}/env: {len(own_packages()) + 3} packages, torch 0.1, Python 3."
    )
    assert "note" not in done.stderr
    (top / "env").rename(top / "moved env")
    return top


def ran(*words: str | Path, **variables: str) -> str:
    environment = {"PATH": "/usr/bin:/bin", "HOME": "/nonexistent"} | variables
    done = subprocess.run(
        words, env=environment, cwd="/", capture_output=True, text=True, timeout=180
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_moved_environment_runs_its_scripts(whole: Path) -> None:
    moved = whole / "moved env"
    assert ran(moved / "bin" / "tool") == f"tool 1.0 under {moved}\n"
    (whole / "link").symlink_to(moved / "bin" / "dep")
    assert ran(whole / "link") == f"dep 2.0 under {moved}\n"
    script = 'set -e; . "$1"; echo "$VIRTUAL_ENV"; tool'
    assert (
        ran("bash", "-c", script, "bash", moved / "bin" / "activate")
        == f"{moved}\ntool 1.0 under {moved}\n"
    )


def test_moved_environment_runs_srunddp(whole: Path) -> None:
    """It is all there: its modules, its requirements, its metadata, and its file of interfaces."""
    moved = whole / "moved env"
    version = f"srunddp, version {__version__}\n"
    assert ran(moved / "bin" / "srunddp", "--version") == version
    assert ran(moved / "bin" / "python", moved / "bin" / "srunddp", "--version") == version
    code = "import srunddp, click, yaml; print(srunddp.__file__, yaml.__file__)"
    assert ran(moved / "bin" / "python", "-c", code).count(f"{moved}/lib") == 2
    code = "from srunddp.stage.build import own_requirements; print(own_requirements())"
    assert ran(moved / "bin" / "python", "-c", code) == f"{own_requirements()}\n"
    assert (moved / "etc" / "srunddp" / "ifaces.conf").is_file()
    (whole / "train.py").write_text("import os; print('rank', os.environ['RANK'])\n")
    assert ran(moved / "bin" / "srunddp", "--quiet", whole / "train.py") == "rank 0\n"


def test_moved_environment_does_not_name_its_old_folder(whole: Path) -> None:
    """But for bytecode, whose paths Python corrects when it reads it."""
    moved = whole / "moved env"
    files = [
        path
        for path in moved.rglob("*")
        if path.is_file() and not path.is_symlink() and path.suffix != ".pyc"
    ]
    assert not [path for path in files if b"env.partial-" in path.read_bytes()]
    code = "import srunddp.errors; print(srunddp.errors.one_line.__code__.co_filename)"
    assert ran(moved / "bin" / "python", "-c", code).startswith(f"{moved}/lib/")


def test_bytecode_is_never_compared_with_its_source(whole: Path) -> None:
    packages = next((whole / "moved env" / "lib").glob("python*/site-packages"))
    compiled = {*packages.rglob("*.pyc")}
    assert all(path.read_bytes()[4:8] == b"\1\0\0\0" for path in compiled)
    assert {path.name.partition(".")[0] for path in compiled} >= {"tool", "cli", "core"}
    (packages / "tool.py").write_text("raise SystemExit('compiled again')\n")
    assert ran(whole / "moved env" / "bin" / "tool").startswith("tool 1.0")


def test_lock_names_each_version_and_hash(whole: Path) -> None:
    lock = (whole / "moved env" / LOCK).read_text()
    pins = re.findall(
        r"^([\w.-]+)==[\w.+]+ \\\n    --hash=sha256:[0-9a-f]{64}$", lock, re.MULTILINE
    )
    assert pins == sorted(pins)
    assert len(pins) * 2 == len(lock.splitlines())
    assert {*pins} == {
        "dep",
        "tool",
        "torch",
        *own_packages(),
    }


@pytest.fixture
def quick(tmp_path: Path, whole: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Build]:
    """Builds ``tmp_path/env`` of what is given, with one package for srunddp's own requirements."""
    monkeypatch.setattr(building, "own_requirements", lambda: ["dep"])
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("UV_CACHE_DIR", str(whole / "cache"))
    (tmp_path / "wheels").mkdir()

    def act(
        requirements: str,
        wheels: Path | None = Path("wheels"),
        *,
        online: bool = False,
        say: Callable[[str], None] = lambda line: None,
    ) -> dict[str, str]:
        (tmp_path / "requirements.txt").write_text(requirements)
        return build(Path("requirements.txt"), Path("env"), wheels, online=online, say=say)

    yield act
    assert not [name for name in os.listdir(tmp_path) if ".partial" in name]


def lock_of(folder: Path) -> str:
    return (folder / LOCK).read_text()


def test_lock_gives_the_same_again(quick: Build, tmp_path: Path) -> None:
    """Though newer wheels have come."""
    wheel(tmp_path / "wheels", "tool", requires=("dep",))
    wheel(tmp_path / "wheels", "dep")
    first = quick("tool")
    lock = lock_of(tmp_path / "env")
    wheel(tmp_path / "wheels", "dep", "2.0")
    wheel(tmp_path / "wheels", "tool", "2.0")
    with pytest.raises(ConfigError, match=r"env .*; expected .* -> "):
        quick(lock)
    shutil.rmtree(tmp_path / "env")
    assert quick(lock) == first == {"dep": "1.0", "tool": "1.0"}
    assert lock_of(tmp_path / "env") == lock
    shutil.rmtree(tmp_path / "env")
    # srunddp's own requirements need no hash of the user.
    assert quick(f"tool=={lock.partition('tool==')[2]}") == {"dep": "2.0", "tool": "1.0"}


def test_changed_wheel_is_refused(quick: Build, tmp_path: Path) -> None:
    wheel(tmp_path / "wheels", "dep")
    quick("dep")
    lock = lock_of(tmp_path / "env")
    wheel(tmp_path / "wheels", "dep", text="import os\n")
    (tmp_path / "env").rename(tmp_path / "first")
    with pytest.raises(ConfigError, match=r"uv: .*hash.* for: dep==1\.0 -> .*--online.*env\.log"):
        quick(lock)
    assert not (tmp_path / "env").exists()


@pytest.mark.parametrize(
    ("wanted", "named"),
    [
        ("nosuch", "nosuch was not found"),
        ("dep>=3", "you require dep>=3"),
        ("needy", "absent was not found"),
    ],
)
def test_missing_wheel_is_named_in_one_line(
    quick: Build, tmp_path: Path, wanted: str, named: str
) -> None:
    wheel(tmp_path / "wheels", "dep")
    wheel(tmp_path / "wheels", "needy", requires=("absent>=2",))
    with pytest.raises(ConfigError, match=rf"uv: [^\n]*{named}[^\n]*--online[^\n]*env\.log\)$"):
        quick(wanted)
    assert "No solution" in (tmp_path / "env.log").read_text()
    assert not (tmp_path / "env").exists()


def test_fetched_packages_are_found_offline(
    quick: Build, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Online the user's settings for uv rule, and what has no wheel is built; later its cache is
    enough.
    """
    index = tmp_path / "index"
    for package in (wheel(tmp_path, "dep"), wheel(tmp_path, "extra"), source(tmp_path)):
        (index / package.name.partition("-")[0]).mkdir(parents=True)
        file = package.rename(index / package.name.partition("-")[0] / package.name)
        (file.parent / "index.html").write_text(f'<a href="{file.as_uri()}">{file.name}</a>')
    monkeypatch.setenv("UV_DEFAULT_INDEX", index.as_uri())
    with pytest.raises(ConfigError, match=r"extra .*not found"):
        quick("extra")
    packages = quick("source\nextra", None, online=True)
    assert packages == {"dep": "1.0", "extra": "1.0", "source": "2.0"}
    lock = lock_of(tmp_path / "env")
    shutil.rmtree(tmp_path / "env")
    quick("source\nextra", None)
    assert lock_of(tmp_path / "env") == lock


@pytest.mark.parametrize(
    "error", [OSError(28, "No space left on device"), KeyboardInterrupt()], ids=["full", "break"]
)
def test_failed_build_leaves_nothing(quick: Build, tmp_path: Path, error: BaseException) -> None:
    """Here the environment is there in part, and its packages are about to be installed."""
    wheel(tmp_path / "wheels", "dep")

    def fail(line: str) -> None:
        if "installing" in line:
            assert [*tmp_path.glob("env.partial-*/bin/python")]
            raise error

    with pytest.raises((ConfigError, KeyboardInterrupt)):
        quick("dep", say=fail)
    assert not (tmp_path / "env").exists()


def test_missing_uv_is_named(tmp_path: Path) -> None:
    """It is the package's, or one in PATH. So are missing requirements."""
    hidden = "import sys; sys.modules['uv'] = None; from srunddp.cli import main; sys.exit(main())"
    words = [sys.executable, "-c", hidden, "stage", "build", "-r", "requirements.txt", "--wheels=."]
    environment = os.environ | {"PATH": str(tmp_path)}

    def said() -> str:
        done = subprocess.run(
            words, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120
        )
        assert done.returncode == 78
        return done.stderr.removeprefix("srunddp: error: ")

    assert said().startswith("requirements.txt is not there; ")
    (tmp_path / "requirements.txt").write_text("")
    text = said()
    assert text.count("\n") == 1
    assert tells(text, "uv is not installed", "; expected ", " -> ", "pip install srunddp[stage]")
    (tmp_path / "uv").symlink_to(shutil.which("false") or "")
    assert said().startswith("uv: ")
