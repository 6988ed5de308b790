"""What this machine, where a script is written, says of it: files that are there or not, the active environment."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from srunddp.errors import ConfigError
from srunddp.sbatch.spec import LaunchSpec
from srunddp.util.atomic_file import replace_file

T = TypeVar("T", bound=LaunchSpec)


def with_defaults(start: T, environ: Mapping[str, str], running: str) -> T:
    """The active virtual environment where none is named, and a command that the nodes find.

    Args:
        running: the path of this srunddp.
    """
    if not _has_environment(start) and (active := environ.get("VIRTUAL_ENV")):
        start = replace(start, venv=active)
    if start.srunddp or _brings_srunddp(start, environ):
        return start
    return replace(start, srunddp=os.path.abspath(running))


def _has_environment(start: LaunchSpec) -> bool:
    return bool(start.venv or start.conda or start.contained)


def _brings_srunddp(start: LaunchSpec, environ: Mapping[str, str]) -> bool:
    """Whether plain ``srunddp`` is there on the nodes, as far as can be seen here."""
    folder = start.venv or (start.conda if start.conda and "/" in start.conda else None)
    if start.conda and start.conda == environ.get("CONDA_DEFAULT_ENV"):
        folder = environ.get("CONDA_PREFIX")
    if folder and os.path.isdir(folder):
        return os.access(os.path.join(folder, "bin", "srunddp"), os.X_OK)
    return _has_environment(start)


def check_files(start: LaunchSpec) -> Iterator[str]:
    """Notes on what is not seen here, though the nodes may see it.

    Raises:
        ConfigError: what is here is not what it should be.
    """
    if start.script and "-m" not in start.run_options and not os.path.exists(start.script):
        yield f"{start.script} is not seen here"
    if start.ifaces and not os.path.exists(start.ifaces):
        yield f"--ifaces {start.ifaces} is not seen here"
    elif start.ifaces and not os.access(start.ifaces, os.R_OK):
        raise ConfigError(f"--ifaces {start.ifaces} cannot be read", expected="a file", hint="chmod a+r it")
    if start.venv and not os.path.isdir(start.venv):
        yield f"--venv {start.venv} is not seen here"
    elif start.venv and not os.path.exists(os.path.join(start.venv, "bin", "python")):
        hint = "name the folder that has bin/activate"
        raise ConfigError(f"--venv {start.venv} has no bin/python", expected="a virtual environment", hint=hint)


def overriding_variables(environ: Mapping[str, str]) -> Iterator[str]:
    """Notes on variables that sbatch takes before the script's own lines."""
    for name in sorted(environ):
        if name.startswith("SBATCH_") and environ[name]:
            yield f"{name}={environ[name]} is exported, which wins over the script's own line at sbatch"


def write(text: str, output: str, *, force: bool) -> None:
    """Write the script to a new file that may be run.

    Raises:
        ConfigError: there is one, or it cannot be written.
    """
    path = Path(output)
    if os.path.lexists(path) and not force:
        raise ConfigError(f"{output} is there", expected="a new file", hint="name another, or add --force")
    try:
        replace_file(path, text.encode())
        path.chmod(0o755)
    except OSError as error:
        why = os.strerror(error.errno or 0)
        raise ConfigError(f"{output}: {why}", expected="a file that can be written", hint="name another") from None


def make_log_folder(folder: str) -> None:
    """Make it, with those above it.

    Raises:
        ConfigError: it cannot be made.
    """
    try:
        os.makedirs(folder, exist_ok=True)
    except OSError as error:
        why = os.strerror(error.errno or 0)
        hint = "name another with --log-dir"
        raise ConfigError(f"{folder}: {why}", expected="a folder for the output", hint=hint) from None
