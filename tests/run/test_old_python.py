"""Pythons that were built against an old glibc, as Miniforge's and uv's, have neither memfd_create nor pidfd_open."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from srunddp.util.kernel_file import memory_file
from tests.support.starting import write
from tests.support.worlds import named, run

WITHOUT = "import os\nfor name in ('memfd_create', 'pidfd_open', 'copy_file_range'): vars(os).pop(name, None)\n"


@pytest.fixture
def old(tmp_path: Path) -> dict[str, str]:
    return {"PYTHONPATH": str(write(tmp_path / "old" / "sitecustomize.py", WITHOUT).parent)}


def test_a_crash_comes_with_its_stack(tmp_path: Path, old: dict[str, str]) -> None:
    crash = "def crash(): os.kill(os.getpid(), signal.SIGSEGV)\nif RANK == 1: crash()\nrest()"
    ended = run(tmp_path, crash, variables=old)
    named(ended, 1, 128 + signal.SIGSEGV, "killed by SIGSEGV")
    assert "in crash\n" in ended.text


def test_a_file_in_memory_has_no_name_and_is_not_inherited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr("os.memfd_create")
    opened = memory_file()
    assert (Path(f"/proc/self/fd/{opened}").readlink().name.endswith("(deleted)"), os.get_inheritable(opened)) == (
        True,
        False,
    )
    os.close(opened)
