"""tests/environment.sh, by which bin/quickstart and bin/test install what is missing."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.support.starting import LONG, write

SCRIPTS = [
    ROOT / ".ci" / "run",
    ROOT / "tests" / "environment.sh",
    *sorted((ROOT / "tests" / "beds").glob("*.sh")),
    *sorted((ROOT / "bin").iterdir()),
]


def install(folder: Path, apt_get: str) -> subprocess.CompletedProcess[str]:
    """Run ``install_system`` as root, as it seems, with this ``apt-get`` and TMPDIR in the
    folder.
    """
    commands = folder / "commands"
    for name, body in {"apt-get": apt_get, "id": "echo 0", "dpkg-query": "exit 1"}.items():
        write(commands / name, f"#!/bin/sh\n{body}\n").chmod(0o755)
    temporary = folder / "temporary"
    temporary.mkdir()
    program = ". tests/environment.sh; install_system no-such-package || echo returned $?"
    environ = {**os.environ, "PATH": f"{commands}:{os.environ['PATH']}", "TMPDIR": str(temporary)}
    command = ["bash", "-euc", program]
    return subprocess.run(
        command, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=LONG
    )


def test_a_package_that_cannot_be_installed_is_named_and_the_log_is_kept(tmp_path: Path) -> None:
    done = install(tmp_path, 'echo "E: no network for $1"; exit 100')
    assert (done.returncode, done.stdout) == (0, "installing no-such-package\nreturned 1\n")
    [log] = (tmp_path / "temporary").iterdir()
    assert "apt-get cannot install no-such-package" in done.stderr
    assert str(log) in done.stderr
    assert "E: no network for update" in done.stderr
    assert log.read_text() == "E: no network for update\n"


def test_after_an_installation_no_log_is_left(tmp_path: Path) -> None:
    done = install(tmp_path, "echo Reading package lists")
    assert (done.returncode, done.stdout, done.stderr) == (0, "installing no-such-package\n", "")
    assert not list((tmp_path / "temporary").iterdir())


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_no_script_writes_to_a_name_in_tmp_that_is_known_before(script: Path) -> None:
    """Anybody may have put a link there, and root writes where it leads."""
    assert not re.search(r"/(var/)?tmp/\w", script.read_text())
