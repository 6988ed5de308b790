"""Builds an environment that can be moved: uv installs srunddp and the packages of a lock file, and
compiles them to bytecode.

The environment is built under a temporary name in the same folder. It gets its name only when it is
complete, so that an incomplete environment is never used.
"""

import os
import re
import secrets
import shlex
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from functools import partial
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path

from srunddp.bootstrap.network import ifaces_conf
from srunddp.errors import ConfigError, file_errors

LOCK = "srunddp-lock.txt"
# Matches lines of uv's lock file such as `numpy==2.4.0 \` and `mine @ file:///home/u/mine`.
_PIN = re.compile(r"^([\w.-]+)(?:==| @ )([^\s;]+)", re.MULTILINE)
# Options of `uv pip install`. All files are copied and compiled, because an environment has to be
# complete before it is packed.
_INSTALL = ("--no-deps", "--no-editable", "--link-mode=copy", "--compile-bytecode")
_WHEEL = "Wheel-Version: 1.0\nGenerator: srunddp\nRoot-Is-Purelib: true\nTag: py3-none-any\n"


def build(
    requirements: Path,
    output: Path,
    wheels: Path | None,
    *,
    online: bool,
    say: Callable[[str], None],
) -> dict[str, str]:
    """Build a relocatable environment.

    Args:
        requirements: A requirements file as for pip. If it has hashes, the packages must match
            them, so a lock file always gives the same environment.
        output: The folder of the environment, which must not exist.
        wheels: A folder with wheels; None for none.
        online: Whether uv asks a package index, by the user's settings. If not, all packages come
            from ``wheels`` or, if that is None, from uv's cache.
        say: Takes lines for the user about the progress.

    Returns:
        The version of each package, or the URL it came from, by the package's name.

    Raises:
        ConfigError: uv, a file or a package is missing, or the required versions contradict each
            other. ``output`` is not created then.
    """
    output = output.absolute()
    if not requirements.is_file():
        raise ConfigError(
            f"{requirements} is not there",
            expected="a file as for pip install -r",
            hint="correct the path",
        )
    if os.path.lexists(output):
        raise ConfigError(
            f"{output} exists", expected="a new folder", hint="remove it, or name another with -o"
        )
    place = output.with_name(f"{output.name}.partial-{secrets.token_hex(4)}")
    try:
        with file_errors(
            f"{output} cannot be made",
            expected="free space, and the permission to write",
            hint="name another with -o",
        ):
            place.mkdir(parents=True)
            packages = _fill(
                place,
                output,
                requirements,
                [f"--find-links={wheels}"] if wheels else [],
                online,
                say,
            )
            place.rename(output)
    finally:
        shutil.rmtree(place, ignore_errors=True)
    return packages


def _fill(
    place: Path,
    output: Path,
    requirements: Path,
    source: list[str],
    online: bool,
    say: Callable[[str], None],
) -> dict[str, str]:
    log = output.with_name(output.name + ".log")
    log.write_bytes(b"")
    uv = partial(
        _run,
        _find_uv(),
        log,
        "" if online else "add --online where there is internet, or --wheels ",
    )
    uv(
        "venv",
        "--relocatable",
        "--no-project",
        f"--prompt={output.name}",
        f"--python={sys.executable}",
        place,
    )
    lock = place / LOCK
    python = f"--python={place / 'bin' / 'python'}"
    if not online:
        # Without an index, packages come from the given wheels, or else from uv's cache.
        source = [*source, "--no-index" if source else "--offline"]
    say("choosing versions")
    options = ("--generate-hashes", "--no-annotate", "--no-header", f"--output-file={lock}")
    uv(
        "pip",
        "compile",
        *source,
        *options,
        python,
        requirements,
        "-",
        # The "-" above makes uv read srunddp's requirements from standard input, and choose
        # versions that fit these too.
        given="\n".join(own_requirements()),
    )
    packages = dict(_PIN.findall(lock.read_text()))
    say(f"installing {len(packages)} packages")
    # uv installs from the lock file, so it has to be told to check the hashes in the user's file.
    locked: tuple[str | Path, ...] = ()
    if "--hash" in requirements.read_text(errors="replace"):
        locked = ("--constraint", requirements)
    uv("pip", "install", *source, *_INSTALL, python, "--requirement", lock, *locked)
    # The environment gets the srunddp that is running now, which no index has. So make a wheel of
    # it and install this wheel.
    own = _own_wheel(place)
    uv(
        "pip",
        "install",
        "--no-index",
        f"--find-links={place}",
        "--no-cache",
        *_INSTALL,
        python,
        "srunddp",
    )
    own.unlink()
    return packages


def own_requirements() -> list[str]:
    """Return srunddp's requirements except for torch, whose version the user chooses."""
    return [
        each for each in _installed().requires or () if not re.search(r"^torch\b|extra ==", each)
    ]


def _installed() -> Distribution:
    try:
        return distribution("srunddp")
    except PackageNotFoundError:
        raise ConfigError(
            "srunddp is not installed here", expected="its metadata", hint="pip install it"
        ) from None


def _run(program: str, log: Path, hint: str, *words: str | Path, given: str = "") -> None:
    """Run one of uv's commands, and append its output to a file.

    Args:
        program: The path of uv.
        log: The file for the command and its output.
        hint: What the user can do if the command fails, with a blank at its end; may be empty.
        words: The arguments of uv.
        given: The standard input.

    Raises:
        ConfigError: The command has failed.
    """
    command = [program, *map(str, words), "--color=never", "--no-progress"]
    # UNCHECKED_HASH: Python never compares the bytecode with the source.
    environment = os.environ | {"PYC_INVALIDATION_MODE": "UNCHECKED_HASH"}
    done = subprocess.run(
        command, input=given, capture_output=True, text=True, env=environment, check=False
    )
    with log.open("a") as file:
        file.write(f"$ {shlex.join(command)}\n{done.stdout}{done.stderr}")
    if done.returncode:
        # uv prints `error: …`, then causes and hints on several lines. Drop uv's hints, because
        # they name options of uv, and the user has called srunddp. The message gets another hint.
        reason = re.sub(
            r".*^error: |^hint:.*|^ *cause:", "", done.stderr, flags=re.MULTILINE | re.DOTALL
        )
        raise ConfigError(
            f"uv: {' '.join(reason.split())}", hint=f"{hint}(uv's whole output: {log})"
        )


def _find_uv() -> str:
    try:
        from uv import find_uv_bin  # installed by the extra srunddp[stage]

        return str(find_uv_bin())
    except (ImportError, FileNotFoundError):
        if found := shutil.which("uv"):
            return found
    raise ConfigError(
        "uv is not installed",
        expected="uv, to build an environment",
        hint="pip install srunddp[stage]",
    )


def _own_wheel(folder: Path) -> Path:
    """Make a wheel of the running srunddp, with its command and, if there is one, its ifaces.conf.

    Returns:
        The path of the wheel in ``folder``.
    """
    found = _installed()
    package = Path(__file__).resolve().parents[1]
    name = f"srunddp-{found.version}"
    archive = folder / f"{name}-py3-none-any.whl"
    texts = {
        "METADATA": found.read_text("METADATA") or found.read_text("PKG-INFO") or "",
        "WHEEL": _WHEEL,
        "entry_points.txt": "[console_scripts]\nsrunddp = srunddp.cli:main\n",
        "RECORD": "",
    }
    # Leave out the last default file, /etc/srunddp/ifaces.conf: each node may have its own.
    own = [path for path in ifaces_conf.default_files()[:-1] if path.is_file()]
    with zipfile.ZipFile(archive, "w") as wheel:
        for path in package.rglob("*"):
            if path.is_file() and "__pycache__" not in path.parts:
                wheel.write(path, path.relative_to(package.parent))
        for file, text in texts.items():
            wheel.writestr(f"{name}.dist-info/{file}", text)
        for path in own[:1]:
            wheel.write(path, f"{name}.data/data/etc/srunddp/ifaces.conf")
    return archive
