"""An environment is built from wheels alone, by a lock; it runs wherever it is moved to, and is there whole or not."""

from __future__ import annotations

import ast
import json
import os
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from srunddp._version import __version__
from srunddp.errors import ConfigError
from srunddp.stage import build as building
from srunddp.stage.build import LOCK, MARK, OWN, Built, build, read_mark
from tests.conftest import ROOT
from tests.support.starting import SRUNDDP
from tests.support.wheels import own_wheels, source, wheel

Build = Callable[..., Built]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What ``srunddp stage build`` makes of wheels: ``env``; moved to ``moved env``, and nothing is left behind."""
    top = tmp_path_factory.mktemp("whole")
    own_wheels(top / "env.wheels")
    wheel(top / "env.wheels", "tool", requires=("dep>=1",))
    wheel(top / "env.wheels", "dep")
    wheel(top / "env.wheels", "dep", "2.0")
    wheel(top / "env.wheels", "torch", "0.1")
    (top / "requirements.txt").write_text("tool\ntorch  # a comment\n")
    words = [*SRUNDDP, "stage", "build", "-r", "requirements.txt", "-o", "env"]
    done = subprocess.run(words, cwd=top, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"{top}/env: {len(OWN) + 3} packages, torch 0.1, Python ")
    assert "note" not in done.stderr
    shutil.copy(top / "env" / LOCK, top / "lock.txt")
    (top / "env").rename(top / "moved env")
    return top


def ran(*words: str | Path, **variables: str) -> str:
    environment = {"PATH": "/usr/bin:/bin", "HOME": "/nonexistent"} | variables
    done = subprocess.run(words, env=environment, cwd="/", capture_output=True, text=True, timeout=180)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_moved_environment_runs_its_scripts(whole: Path) -> None:
    moved = whole / "moved env"
    assert ran(moved / "bin" / "tool") == f"tool 1.0 under {moved}\n"
    (whole / "link").symlink_to(moved / "bin" / "dep")
    assert ran(whole / "link") == f"dep 2.0 under {moved}\n"
    script = 'set -eu; . "$0"; echo "$VIRTUAL_ENV"; tool'
    assert ran("bash", "-c", script, moved / "bin" / "activate") == f"{moved}\ntool 1.0 under {moved}\n"


def test_srunddp_runs_in_a_moved_environment_without_what_it_was_built_from(whole: Path) -> None:
    moved = whole / "moved env"
    version = f"srunddp, version {__version__}\n"
    assert ran(moved / "bin" / "srunddp", "--version") == version
    assert ran(moved / "bin" / "python", moved / "bin" / "srunddp", "--version") == version
    where = ran(moved / "bin" / "python", "-c", "import srunddp, click, yaml; print(srunddp.__file__, yaml.__file__)")
    assert where.count(f"{moved}/lib") == 2
    (whole / "train.py").write_text("import os; print('rank', os.environ['RANK'])\n")
    assert ran(moved / "bin" / "srunddp", "--quiet", whole / "train.py") == "rank 0\n"


def test_nothing_in_a_moved_environment_names_the_folder_where_it_was_built(whole: Path) -> None:
    named = {
        str(path.relative_to(whole / "moved env"))
        for path in (whole / "moved env").rglob("*")
        if path.is_file() and not path.is_symlink() and b"env.partial-" in path.read_bytes()
    }
    assert named == set()


def test_bytecode_is_there_for_good(whole: Path) -> None:
    """Its flags say that it is never compared with its source."""
    packages = next((whole / "moved env" / "lib").glob("python*/site-packages"))
    compiled = {path for path in packages.rglob("*.pyc")}
    assert all(path.read_bytes()[4:8] == b"\1\0\0\0" for path in compiled)
    (bare,) = packages.glob("tool.py")
    assert {path.name.partition(".")[0] for path in compiled} >= {"tool", "cli", "core"}
    bare.write_text("raise SystemExit('compiled again')\n")
    assert ran(whole / "moved env" / "bin" / "tool").startswith("tool 1.0")


def test_the_lock_names_each_version_and_hash_and_the_mark_the_python(whole: Path) -> None:
    first, *lines = (whole / "lock.txt").read_text().splitlines()
    assert first.startswith("# srunddp stage build, Python 3.")
    assert all(re.fullmatch(r"[\w.-]+==[\w.+]+ --hash=sha256:[0-9a-f]{64}", line) for line in lines)
    assert [line.partition("==")[0].lower() for line in lines] == sorted(
        line.partition("==")[0].lower() for line in lines
    )
    assert any(line.startswith("dep==2.0 ") for line in lines)
    mark = read_mark(whole / "moved env")
    assert mark is not None
    assert (mark.srunddp, Path(mark.base).is_file()) == (__version__, True)
    assert ran(mark.base, "-c", "import platform; print(platform.python_version())") == f"{mark.python}\n"


def test_srunddps_own_requirements_are_those_of_its_setup() -> None:
    tree = ast.parse((ROOT / "setup.py").read_text())
    (required,) = [
        ast.literal_eval(word.value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        for word in node.keywords
        if word.arg == "install_requires"
    ]
    assert [*OWN] == [each for each in required if not each.startswith("torch")]


@pytest.fixture
def quick(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Build]:
    """Builds ``tmp_path/env`` of what is given, without srunddp's own requirements."""
    monkeypatch.setattr(building, "OWN", ("dep",))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "wheels").mkdir()

    def act(requirements: str, **options: object) -> Built:
        (tmp_path / "requirements.txt").write_text(requirements)
        facts: dict[str, object] = {"online": False, "say": lambda line: None, **options}
        return build(Path("requirements.txt"), Path("env"), Path("wheels"), **facts)  # type: ignore[arg-type]

    yield act
    assert not [name for name in os.listdir(tmp_path) if ".partial" in name or ".old" in name]


def lock_of(folder: Path) -> str:
    return (folder / LOCK).read_text()


def test_a_lock_gives_the_same_again_though_newer_wheels_have_come(quick: Build, tmp_path: Path) -> None:
    wheel(tmp_path / "wheels", "tool", requires=("dep",))
    wheel(tmp_path / "wheels", "dep")
    first = quick("tool")
    assert first.notes == ("torch is not among what requirements.txt asks for; expected it for a training",)
    lock = lock_of(tmp_path / "env")
    wheel(tmp_path / "wheels", "dep", "2.0")
    wheel(tmp_path / "wheels", "tool", "2.0")
    with pytest.raises(ConfigError, match="env is there; expected a new folder -> --force"):
        quick(lock)
    assert quick(lock, force=True).wheels == first.wheels
    assert lock_of(tmp_path / "env") == lock


def test_srunddps_own_requirements_need_no_hash_in_the_users_file(quick: Build, tmp_path: Path) -> None:
    wheel(tmp_path / "wheels", "tool")
    wheel(tmp_path / "wheels", "dep")
    (sha,) = [each.sha256 for each in quick("tool").wheels if each.name == "tool"]
    built = quick(f"tool==1.0 --hash=sha256:{sha}\n", force=True)
    assert [each.pin for each in built.wheels] == ["dep==1.0", "tool==1.0"]


def test_a_wheel_that_was_tampered_with_is_refused(quick: Build, tmp_path: Path) -> None:
    wheel(tmp_path / "wheels", "dep")
    lock = quick("dep") and lock_of(tmp_path / "env")
    wheel(tmp_path / "wheels", "dep", text="import os\n")
    (tmp_path / "env").rename(tmp_path / "first")
    with pytest.raises(ConfigError, match=r"dep==1.0 in wheels is not the wheel that was locked; .*--online.*env\.log"):
        quick(lock)
    assert not (tmp_path / "env").exists()


@pytest.mark.parametrize(("wanted", "named"), [("nosuch", "nosuch"), ("many>=3", "many>=3"), ("needy", "absent>=2")])
def test_a_wheel_that_is_missing_is_named(quick: Build, tmp_path: Path, wanted: str, named: str) -> None:
    wheel(tmp_path / "wheels", "dep")
    wheel(tmp_path / "wheels", "many")
    wheel(tmp_path / "wheels", "needy", requires=("absent>=2",))
    with pytest.raises(ConfigError, match=re.escape(f"no wheel for {named}") + r".* in wheels; .*--online"):
        quick(wanted)
    assert not (tmp_path / "env").exists()
    assert "No matching distribution" in (tmp_path / "env.log").read_text()


def test_what_does_not_fit_together_is_said_in_one_line(quick: Build, tmp_path: Path) -> None:
    wheel(tmp_path / "wheels", "dep")
    wheel(tmp_path / "wheels", "dep", "2.0")
    wheel(tmp_path / "wheels", "tool", requires=("dep<2",))
    with pytest.raises(ConfigError, match=r"pip: Cannot install .*dep==2.0.* conflicting dependencies") as refused:
        quick("tool\ndep==2.0")
    assert "\n" not in str(refused.value)


def test_wheels_are_fetched_and_built_by_the_users_settings_online_alone(
    quick: Build, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wheel(tmp_path / "index", "dep")
    wheel(tmp_path / "wheels", "dep")
    wheel(tmp_path / "index", "extra")
    source(tmp_path / "index")
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "index"))
    with pytest.raises(ConfigError, match="no wheel for extra"):
        quick("extra")
    built = quick("source\nextra", online=True)
    assert [each.pin for each in built.wheels] == ["dep==1.0", "extra==1.0", "source==2.0"]
    fetched = {f"{name}-py3-none-any.whl" for name in ("dep-1.0", "extra-1.0", "source-2.0")}
    assert {*os.listdir(tmp_path / "wheels")} == fetched
    shutil.rmtree(tmp_path / "index")
    lock = lock_of(tmp_path / "env")
    quick("source\nextra", force=True)
    assert lock_of(tmp_path / "env") == lock


@pytest.mark.parametrize("step", ["_compile", "make_relocatable", "_add_srunddp", "_write_lock"])
@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()], ids=["full", "break"])
def test_a_build_that_fails_leaves_the_old_environment_or_none(
    quick: Build, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str, error: BaseException
) -> None:
    wheel(tmp_path / "wheels", "dep")
    monkeypatch.setattr(building.Pip, "install", lambda *_: None)
    monkeypatch.setattr(building.Pip, "__init__", lambda *_: None)
    monkeypatch.setattr(building.Pip, "choose", lambda *_: [])
    for old in (False, True):
        if old:
            (tmp_path / "env").mkdir()
            (tmp_path / "env" / MARK).write_text(
                json.dumps(dict.fromkeys(building.EnvMetadata.__dataclass_fields__, "x"))
            )
        with monkeypatch.context() as patch:
            patch.setattr(building, step, lambda *_: (_ for _ in ()).throw(error))
            with pytest.raises((ConfigError, KeyboardInterrupt)):
                quick("dep", force=True)
        assert (read_mark(tmp_path / "env") is not None) == old
        assert os.path.exists(tmp_path / "env") == old


def test_a_folder_that_was_not_built_here_is_never_replaced(quick: Build, tmp_path: Path) -> None:
    (tmp_path / "env").mkdir()
    (tmp_path / "env" / "mine").touch()
    for text in (None, "", "[]", '{"srunddp": 1}'):
        if text is not None:
            (tmp_path / "env" / MARK).write_text(text)
        with pytest.raises(ConfigError, match="env is there, and was not built by srunddp stage build"):
            quick("dep", force=True)
    assert (tmp_path / "env" / "mine").exists()


def test_requirements_that_are_not_there_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.txt is not there"):
        build(tmp_path / "none.txt", tmp_path / "env", tmp_path, online=False, say=print)


def test_a_python_without_pip_is_named(quick: Build, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    bare = tmp_path / "python"
    bare.write_text("#!/bin/sh\necho 'No module named pip' >&2\nexit 1\n")
    bare.chmod(0o755)
    monkeypatch.setattr("sys.executable", str(bare))
    with pytest.raises(ConfigError, match=r"no pip for .*python; expected pip 23\.0 or newer .*ensurepip"):
        quick("dep")
    bare.write_text("#!/bin/sh\necho 'pip 20.3.4 from /usr'\n")
    with pytest.raises(ConfigError, match=r"pip 20\.3 for "):
        quick("dep")
