"""What the figure of a staged environment counts: calls on a folder, by path or by descriptor, and no others."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.benchmarks.staging import calls_below
from tests.conftest import tool

CALLS = {
    "os.stat(folder + '/a')": 1,
    "os.stat(folder)": 1,
    "os.close(os.open(folder + '/a', 0))": 2,
    "os.chdir(folder); os.stat('a')": 2,
    "os.fork() or os.stat(folder + '/a')": 1,
    "os.stat(folder + '2/a')": 0,
    "os.pipe(), os.write(4, folder.encode())": 0,
}


@pytest.mark.parametrize("call", CALLS)
def test_calls_on_a_folder_are_counted_and_no_others(tmp_path: Path, call: str) -> None:
    tool("strace")
    for name in ("folder", "folder2"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "a").touch()
    base = calls_below(str(tmp_path / "folder"), [sys.executable, "-S", "-c", code(tmp_path, "pass")])
    assert base == 0
    counted = calls_below(str(tmp_path / "folder"), [sys.executable, "-S", "-c", code(tmp_path, call)])
    assert counted == CALLS[call]


def code(tmp_path: Path, call: str) -> str:
    return f"import os; folder = {str(tmp_path / 'folder')!r}; {call}"
