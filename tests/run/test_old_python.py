"""Pythons that were built against an old glibc, as Miniforge's and uv's, have neither memfd_create nor pidfd_open."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from srunddp.util.kernel_file import memory_file
from tests.support.launcher import launched
from tests.support.starting import until, write
from tests.support.worlds import is_gone, named, run

WITHOUT = "import os\nfor name in ('memfd_create', 'pidfd_open', 'copy_file_range'): vars(os).pop(name, None)\n"


@pytest.fixture
def old(tmp_path: Path) -> dict[str, str]:
    return {"PYTHONPATH": str(write(tmp_path / "old" / "sitecustomize.py", WITHOUT).parent)}


def test_a_crash_comes_with_its_stack(tmp_path: Path, old: dict[str, str]) -> None:
    crash = "def crash(): os.kill(os.getpid(), signal.SIGSEGV)\nif RANK == 1: crash()\nrest()"
    ended = run(tmp_path, crash, variables=old)
    named(ended, 1, 128 + signal.SIGSEGV, "killed by SIGSEGV")
    assert "in crash\n" in ended.text


def test_the_launcher_s_end_is_seen(tmp_path: Path, old: dict[str, str]) -> None:
    with launched(tmp_path, "say('waits')\nrest()", **old) as launcher:
        until(lambda: all((tmp_path / f"waits.{rank}").exists() for rank in range(3)))
        launcher.process.kill()
        until(lambda: all(map(is_gone, (*launcher.supervisors, *launcher.workers))))
    said = "".join((tmp_path / f"stderr.{rank}").read_text() for rank in range(3))
    assert f"its launcher, process {launcher.process.pid}, has ended" in said


def test_a_file_in_memory_has_no_name_and_is_not_inherited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr("os.memfd_create")
    opened = memory_file()
    assert (Path(f"/proc/self/fd/{opened}").readlink().name.endswith("(deleted)"), os.get_inheritable(opened)) == (
        True,
        False,
    )
    os.close(opened)
