"""Runs pip and says in one line what it says in many: wheels are fetched, a set of them is chosen and installed."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from srunddp.errors import ConfigError

_OLDEST = (23, 0)  # the first with a stable --report
_QUIET = ("--disable-pip-version-check", "--no-input", "--no-color")
_MISSING = re.compile(r"No matching distribution found for (.+)")
_FOREIGN = re.compile(r"^ {4}(\S.*?) from (?:file|https?):", re.MULTILINE)
_CONFLICT = re.compile(r"ERROR: (Cannot install .+)")
_ERROR = re.compile(r"^ERROR: (.+)", re.MULTILINE)


@dataclass(frozen=True)
class Wheel:
    """One that was chosen.

    Attributes:
        name: as on the index; version; sha256: in hex.
    """

    name: str
    version: str
    sha256: str

    @property
    def pin(self) -> str:
        """``name==version``."""
        return f"{self.name}=={self.version}"


class Pip:
    """The pip of this Python.

    Args:
        log: a file to which all that it says goes.
        wheels: the folder with the wheels.
    """

    def __init__(self, log: Path, wheels: Path) -> None:
        self._log, self._wheels = log, wheels
        self._require()

    def fetch(self, wanted: Sequence[str]) -> None:
        """Fill the folder with wheels, built where there are none, by the user's own settings for pip.

        Args:
            wanted: requirements, ``-r`` and ``-c`` with files, as for pip.
        """
        self._wheels.mkdir(parents=True, exist_ok=True)
        options = ("--progress-bar", "off", "--find-links", str(self._wheels), "--wheel-dir", str(self._wheels))
        self._run(["wheel", *options, *wanted], _environment())

    def choose(self, wanted: Sequence[str]) -> list[Wheel]:
        """The wheels of the folder that fit together."""
        with tempfile.NamedTemporaryFile(prefix="srunddp-", suffix=".json") as report:
            options = ("--dry-run", "--ignore-installed", "--quiet", "--report", report.name, *self._from_folder())
            self._run(["install", *options, *wanted], _isolated())
            return [_wheel(each) for each in json.load(report)["install"]]

    def install(self, python: Path, lock: Path) -> None:
        """Install what a lock file names, and nothing else, for another interpreter."""
        options = ("--progress-bar", "off", "--require-hashes", "--no-deps", "--no-compile", *self._from_folder())
        self._run(["--python", str(python), "install", *options, "-r", str(lock)], _isolated())

    def _from_folder(self) -> list[str]:
        return ["--no-index", "--find-links", str(self._wheels), "--only-binary", ":all:"]

    def _require(self) -> None:
        done = subprocess.run(
            [sys.executable, "-m", "pip", "--version"], capture_output=True, text=True, env=_isolated(), check=False
        )
        found = re.match(r"pip (\d+)\.(\d+)", done.stdout)
        if not found or (int(found[1]), int(found[2])) < _OLDEST:
            what = f"pip {found[1]}.{found[2]}" if found else "no pip"
            raise ConfigError(
                f"{what} for {sys.executable}",
                expected=f"pip {_OLDEST[0]}.{_OLDEST[1]} or newer where the environment is built",
                hint=f"{sys.executable} -m ensurepip --upgrade, or python -m pip install --upgrade pip",
            )

    def _run(self, arguments: Sequence[str], environment: Mapping[str, str]) -> None:
        command = [sys.executable, "-m", "pip", *_QUIET, *arguments]
        with open(self._log, "ab") as log:
            log.write(os.fsencode(f"$ {shlex.join(command)}\n"))
            log.flush()
            start = log.tell()
            code = subprocess.run(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment, check=False
            ).returncode
        if code:
            raise self._failed(self._log.read_bytes()[start:].decode(errors="replace"), code)

    def _failed(self, said: str, code: int) -> ConfigError:
        if missing := _MISSING.search(said):
            return ConfigError(
                f"no wheel for {missing[1]} in {self._wheels}",
                expected="one that this Python takes",
                hint=f"add --online where there is internet, or put it there (all that pip says: {self._log})",
            )
        if "DO NOT MATCH THE HASHES" in said:
            package = found[1] if (found := _FOREIGN.search(said)) else "a wheel"
            return ConfigError(
                f"{package} in {self._wheels} is not the wheel that was locked",
                expected="the SHA-256 of the lock",
                hint=f"remove it and fetch it again with --online (all that pip says: {self._log})",
            )
        errors = _ERROR.findall(said)
        if conflict := _CONFLICT.search(said):
            hint = f"change the requirements, or put a wheel that fits into {self._wheels}"
            return ConfigError(f"pip: {conflict[1].rstrip(' .')}", hint=f"{hint} (all that pip says: {self._log})")
        line = errors[-1] if errors else f"ended with exit code {code}"
        return ConfigError(f"pip: {line.strip()}", hint=f"see {self._log}")


def _wheel(report: Mapping[str, Any]) -> Wheel:
    facts, origin = report["metadata"], report["download_info"]
    digest = origin.get("archive_info", {}).get("hashes", {}).get("sha256")
    if not digest:
        with open(unquote(urlsplit(origin["url"]).path), "rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
    return Wheel(facts["name"], facts["version"], digest)


def _environment() -> dict[str, str]:
    """Without what would have Python look elsewhere for packages."""
    return {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}


def _isolated() -> dict[str, str]:
    """Without the user's settings for pip either: a folder alone is looked at."""
    kept = {name: value for name, value in _environment().items() if not name.startswith("PIP_")}
    return kept | {"PIP_CONFIG_FILE": os.devnull}


def normal(name: str) -> str:
    """A package's name as all indexes spell it."""
    return re.sub(r"[-_.]+", "-", name).lower()
