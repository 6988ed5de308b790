"""Builds an environment that can be moved: from wheels in a folder, with a lock file, srunddp in it, byte-compiled.

It is built beside its place and gets its name once it is whole, so that half an environment is never taken for one.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import shlex
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from srunddp._version import __version__
from srunddp.bootstrap.network import ifaces_conf
from srunddp.errors import ConfigError
from srunddp.stage.pip import Pip, Wheel, normal
from srunddp.stage.relocate import make_relocatable, script

# What setup.py names, except for torch, which is the user's to choose.
OWN = ("click>=8.1", "pyyaml>=6.0", "psutil>=5.9", "nvidia-ml-py>=12.535", "tqdm>=4.66")
MARK, LOCK = "srunddp-environment.json", "srunddp-lock.txt"
_SCRIPT = "import sys\n\nfrom srunddp.cli import main\n\nsys.exit(main())\n"


@dataclass(frozen=True)
class EnvMetadata:
    """What a built environment says of itself; as JSON in its file ``srunddp-environment.json``.

    Attributes:
        srunddp: its version.
        python: such as 3.11.7; platform: such as linux-x86_64; base: the interpreter that it leads to.
    """

    srunddp: str
    python: str
    platform: str
    base: str


@dataclass(frozen=True)
class Built:
    """A new environment.

    Attributes:
        folder: it; wheels: what was installed; mark: what it says of itself; notes: lines to be said.
    """

    folder: Path
    wheels: tuple[Wheel, ...]
    mark: EnvMetadata
    notes: tuple[str, ...]


def read_mark(folder: str | os.PathLike[str]) -> EnvMetadata | None:
    """What an environment says of itself; none where :func:`build` did not make the folder."""
    try:
        found = json.loads(Path(folder, MARK).read_bytes())
        return EnvMetadata(**{name: str(found[name]) for name in EnvMetadata.__dataclass_fields__})
    except (OSError, ValueError, TypeError, KeyError):
        return None


def build(
    requirements: Path, output: Path, wheels: Path, *, online: bool, say: Callable[[str], None], force: bool = False
) -> Built:
    """Build an environment.

    Args:
        requirements: a file as for pip; where it has hashes they are kept to, so a lock file gives the same again.
        output: the environment's folder.
        wheels: the folder with a wheel for each package.
        online: whether the wheels are fetched first, by the user's settings for pip.
        say: called with a line at each step.
        force: replace an environment that was built before.

    Raises:
        ConfigError: something is missing or does not fit; ``output`` is then as it was.
    """
    output = output.absolute()
    _require(requirements, output, force)
    log = output.with_name(output.name + ".log")
    with _beside(output) as place:
        log.write_bytes(b"")
        pip = Pip(log, wheels)
        chosen = _chosen(pip, requirements, place, online, say)
        say(f"installing {len(chosen)} packages")
        _make(place, output, log)
        _write_lock(place / LOCK, chosen)
        pip.install(place / "bin" / "python", place / LOCK)
        _add_srunddp(place)
        make_relocatable(place, output, MARK)
        say("compiling to bytecode")
        _compile(place, output, log)
        mark = _mark()
        (place / MARK).write_text(json.dumps(asdict(mark), indent=2) + "\n")
        _rename(place, output)
    torch = any(wheel.name.lower() == "torch" for wheel in chosen)
    notes = () if torch else (f"torch is not among what {requirements} asks for; expected it for a training",)
    return Built(output, tuple(chosen), mark, notes)


def _require(requirements: Path, output: Path, force: bool) -> None:
    if not requirements.is_file():
        raise ConfigError(f"{requirements} is not there", expected="a file as for pip install -r", hint="write it")
    if not os.path.lexists(output):
        return
    if read_mark(output) is None:
        raise ConfigError(
            f"{output} is there, and was not built by srunddp stage build",
            expected="a new folder",
            hint="name another with -o",
        )
    if not force:
        raise ConfigError(
            f"{output} is there", expected="a new folder", hint="--force to replace it, or name another with -o"
        )


@contextmanager
def _beside(output: Path) -> Iterator[Path]:
    """A new folder beside the output; gone at the end unless it has been renamed."""
    place = output.with_name(f"{output.name}.partial-{secrets.token_hex(4)}")
    try:
        place.mkdir(parents=True)
    except OSError as error:
        raise ConfigError(
            f"{output} cannot be made: {error.strerror}", expected="a folder that you may write", hint="name another"
        ) from None
    try:
        yield place
    except OSError as error:
        raise ConfigError(
            f"{error.filename or output}: {error.strerror or error}", hint="is there room left?"
        ) from None
    finally:
        shutil.rmtree(place, ignore_errors=True)


def _chosen(pip: Pip, requirements: Path, place: Path, online: bool, say: Callable[[str], None]) -> list[Wheel]:
    """All wheels of the environment, in the order of their names."""
    pins, found = place / "pins.txt", dict[str, Wheel]()
    asked = ["-r", str(requirements)]
    # In pip's mode for hashes all have to have one: srunddp's own are chosen then to what the user's have led to.
    locked = re.search(r"--hash[= ]|--require-hashes", requirements.read_text(errors="replace"))
    for wanted in [asked, [*OWN]] if locked else [[*asked, *OWN]]:
        pins.write_text("".join(f"{wheel.pin}\n" for wheel in found.values()))
        words = [*wanted, "-c", str(pins)]
        if online:
            say("fetching wheels")
            pip.fetch(words)
        say("choosing versions")
        found |= {normal(wheel.name): wheel for wheel in pip.choose(words)}
    pins.unlink()
    return [found[name] for name in sorted(found)]


def _write_lock(path: Path, chosen: list[Wheel]) -> None:
    first = f"# srunddp stage build, Python {sysconfig.get_python_version()}, {sysconfig.get_platform()}\n"
    path.write_text(first + "".join(f"{wheel.pin} --hash=sha256:{wheel.sha256}\n" for wheel in chosen))


def _make(place: Path, output: Path, log: Path) -> None:
    """An empty virtual environment; a link to the interpreter, no copy."""
    words = ["-m", "venv", "--without-pip", "--symlinks", "--prompt", output.name, str(place)]
    done = _python(sys.executable, words, log)
    if done:
        raise ConfigError(
            f"{sys.executable} -m venv failed", expected="a Python with venv", hint=f"see {log}, and install it"
        )


def _add_srunddp(place: Path) -> None:
    """This srunddp, its command, and its ifaces.conf if it has one."""
    package = Path(__file__).resolve().parents[1]
    shutil.copytree(package, _packages(place) / "srunddp", ignore=shutil.ignore_patterns("__pycache__"))
    command = place / "bin" / "srunddp"
    command.write_text(script(_SCRIPT))
    command.chmod(0o755)
    own = next((path for path in ifaces_conf.candidates(None, {})[:-1] if path.is_file()), None)
    if own:
        (place / "etc" / "srunddp").mkdir(parents=True, exist_ok=True)
        shutil.copyfile(own, place / "etc" / "srunddp" / "ifaces.conf")


def _packages(place: Path) -> Path:
    return Path(sysconfig.get_path("purelib", "venv", {"base": str(place), "platbase": str(place)}))


def _compile(place: Path, output: Path, log: Path) -> None:
    """For good: such bytecode is neither compared with its source nor written again. Some packages hold no Python 3."""
    words = ["-m", "compileall", "-q", "-j", str(len(os.sched_getaffinity(0)))]
    words += ["--invalidation-mode", "unchecked-hash", "-s", str(place), "-p", str(output), str(_packages(place))]
    _python(str(place / "bin" / "python"), words, log)


def _python(interpreter: str, words: list[str], log: Path) -> int:
    with log.open("ab") as file:
        file.write(os.fsencode(f"$ {shlex.join([interpreter, *words])}\n"))
        file.flush()
        return subprocess.run(
            [interpreter, "-I", *words], stdin=subprocess.DEVNULL, stdout=file, stderr=file, check=False
        ).returncode


def _mark() -> EnvMetadata:
    base = os.path.realpath(getattr(sys, "_base_executable", sys.executable))
    version = ".".join(map(str, sys.version_info[:3]))
    return EnvMetadata(__version__, version, sysconfig.get_platform(), base)


def _rename(place: Path, output: Path) -> None:
    """Take the place of the environment that is there, if there is one."""
    if not os.path.lexists(output):
        place.rename(output)
        return
    old = output.with_name(f"{output.name}.old-{secrets.token_hex(4)}")
    output.rename(old)
    place.rename(output)
    shutil.rmtree(old, ignore_errors=True)
