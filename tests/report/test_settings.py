"""The settings of a Trainer in the report, from a file in which anything may be."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from srunddp.report.run import read
from tests.support.made_up_run import MadeUp
from tests.support.starting import srunddp, write


def of_run(folder: Path, text: str) -> dict[str, object]:
    MadeUp(nodes=1, seconds=60).write(folder)
    write(monitor_of(folder) / "config.yaml", text)
    return dict(read(monitor_of(folder)).settings)


def monitor_of(folder: Path) -> Path:
    (found,) = folder.glob("*/monitor.0")
    return found


def test_json_and_page_have_them(tmp_path: Path) -> None:
    text = "lr: 1.0e-3\ncheckpoint:\n  every_steps: 5\nnames: [a, <b>]\nlimit: .inf\nnone: null\n"
    assert of_run(tmp_path, text) == {
        "lr": 1e-3,
        "checkpoint": {"every_steps": 5},
        "names": ["a", "<b>"],
        "limit": "inf",
        "none": None,
    }
    folder = monitor_of(tmp_path)
    told = srunddp("report", "--json", folder, folder=tmp_path)
    assert json.loads(told.stdout)["settings"]["checkpoint"] == {"every_steps": 5}
    assert srunddp("report", f"--output={tmp_path}", folder, folder=tmp_path).returncode == 0
    page = (tmp_path / "report.html").read_text()
    assert "<td>checkpoint.every_steps</td><td>5</td>" in page
    assert '<b>"' not in page


@pytest.mark.parametrize(
    "text", ["", "- a list\n", "a: [\n", "[" * 9999, "!!python/object:os.system {}\n", "\0", "7"]
)
def test_what_is_no_file_of_settings_is_left_out(tmp_path: Path, text: str) -> None:
    assert of_run(tmp_path, text) == {}


def test_a_pipe_of_that_name_keeps_nobody_waiting(tmp_path: Path) -> None:
    of_run(tmp_path, "")
    folder = monitor_of(tmp_path)
    (folder / "config.yaml").unlink()
    os.mkfifo(folder / "config.yaml")
    assert read(folder).settings == {}
