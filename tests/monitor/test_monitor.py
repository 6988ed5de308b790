"""What a rank counts is in its files, whatever becomes of the rank, and no file system holds up its
supervisor.
"""

from __future__ import annotations

import contextlib
import csv
import json
import math
import os
import threading
import time
from pathlib import Path

import pytest

from srunddp.monitor.config import MonitorConfig
from srunddp.monitor.monitor import Monitor
from srunddp.telemetry import MONITOR_FOLDER
from tests.support.small_disk import small_disk
from tests.support.starting import LONG, until

FOLDER = Path("deep", "monitor.0")


def recorder(folder: Path, seconds: float = 60.0) -> Monitor:
    return Monitor(MonitorConfig(folder / FOLDER, "node01", 3, False, seconds, ("train.py",)))


def rows(folder: Path, kind: str) -> list[dict[str, str]]:
    with (folder / FOLDER / f"node01.rank3.{kind}.csv").open() as file:
        return list(csv.DictReader(file))


def test_events_and_the_last_sums_are_there_when_it_ends(tmp_path: Path) -> None:
    made = recorder(tmp_path)
    made.start()
    made.mark("meeting")
    made.page.event("resumed", 12_345_678)
    made.page.event("evaluation", math.nan)
    made.page.start_epoch(2)
    for _ in range(2):
        made.page.add_step(28, 0.75, 0.125, 0.25)
    made.describe({"world_size": 2})
    made.finish(143, 5.0)
    marks = [
        ("process", ""),
        ("meeting", ""),
        ("resumed", "12345678"),
        ("evaluation", ""),
        ("end", "143"),
    ]
    assert [(row["mark"], row["value"]) for row in rows(tmp_path, "marks")] == marks
    *_, last = rows(tmp_path, "steps")
    assert list(last.values())[1:] == [
        "2",
        "56",
        "1.500000",
        "0.250000",
        "0.500000",
        "0.750000",
        "2",
    ]
    assert abs(float(last["time"]) - time.time()) < 60
    described = {"version": 1, "world_size": 2, "script": ["train.py"], "seconds": 60.0}
    assert json.loads((tmp_path / FOLDER / "run.json").read_text()) == described


def test_restarts_of_an_earlier_run_in_the_folder_are_set_aside(tmp_path: Path) -> None:
    """Otherwise report and triage would take them for the last start of this run."""

    def start(name: str, rank: int = 0) -> None:
        Monitor(MonitorConfig(tmp_path / name, "node01", rank, False, 60.0))

    for earlier in range(1, 3):
        start("monitor.0", rank=1)
        for restart in ("monitor.0.1", "monitor.0.2", "monitor.1"):
            start(restart)
            start(restart, rank=1)
        assert {"monitor.0.1", "monitor.0.2"} <= {each.name for each in tmp_path.iterdir()}
        start("monitor.0")
        aside = [f"earlier.{k}.monitor.0.{g}" for k in range(1, earlier + 1) for g in (1, 2)]
        found = sorted(each.name for each in tmp_path.iterdir())
        assert found == sorted(["monitor.0", "monitor.1", *aside])
        assert len(list((tmp_path / aside[0]).iterdir())) == 4


@pytest.mark.parametrize(("rank", "seen"), [(0, True), (1, False), (None, False)])
def test_rank_0_alone_is_told_of_the_folder(
    rank: int | None, seen: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(MONITOR_FOLDER, "/of/a/run/that/started/this/one")
    monkeypatch.chdir(tmp_path)
    config = None if rank is None else MonitorConfig(FOLDER, "node01", rank, False, 60.0)
    Monitor(config).export()
    assert os.environ.get(MONITOR_FOLDER) == (str(tmp_path / FOLDER) if seen else None)


def test_the_process_began_when_the_kernel_started_it(tmp_path: Path) -> None:
    made = recorder(tmp_path)
    child = os.fork()
    if child == 0:
        made.start()
        made.finish(0, 5.0)
        os._exit(0)
    now = time.time()
    os.waitpid(child, 0)
    assert abs(float(rows(tmp_path, "marks")[0]["time"]) - now) < 1


def test_steps_of_a_script_s_own_loop_are_counted(tmp_path: Path) -> None:
    """In a row each time before the end."""
    made = recorder(tmp_path, seconds=0.05)
    for _ in range(4):
        made.page.beat()
    made.start()
    until(lambda: rows(tmp_path, "steps"))
    made.page.pause()  # as before a long evaluation
    made.page.event("evaluation")
    before = len(rows(tmp_path, "steps"))
    until(lambda: len(rows(tmp_path, "steps")) > before + 1)
    assert "evaluation" in [row["mark"] for row in rows(tmp_path, "marks")]
    made.finish(0, 5.0)
    assert {(row["steps"], row["step_s"]) for row in rows(tmp_path, "steps")} == {("4", "")}


def test_rows_of_an_earlier_run_in_the_folder_are_gone(tmp_path: Path) -> None:
    for number in (1, 2):
        made = recorder(tmp_path)
        made.start()
        made.finish(number, 5.0)
    assert [row["value"] for row in rows(tmp_path, "marks")][1:] == ["2"]


def test_a_full_disk_ends_nothing(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", "64k") as disk:
        made = recorder(disk)
        with contextlib.suppress(OSError), (disk / "full").open("wb", buffering=0) as file:
            while True:
                file.write(bytes(4096))
        made.start()
        for _ in range(1000):
            made.mark("meeting")
        made.finish(0, 5.0)
        assert len(rows(disk, "marks")) < 1000


def test_a_file_system_that_hangs_holds_nobody_up(tmp_path: Path) -> None:
    """A full pipe that nobody reads stands for the file."""
    (tmp_path / FOLDER).mkdir(parents=True)
    os.mkfifo(tmp_path / FOLDER / "node01.rank3.marks.csv")
    reader = os.open(tmp_path / FOLDER / "node01.rank3.marks.csv", os.O_RDWR | os.O_NONBLOCK)
    made = recorder(tmp_path)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(reader, bytes(4096))
    began = time.monotonic()
    made.start()
    for _ in range(100):
        made.mark("meeting")
    made.finish(0, 0.2)
    assert time.monotonic() - began < LONG / 3
    os.close(reader)


def test_what_is_found_out_later_is_added_to_the_description(tmp_path: Path) -> None:
    made = recorder(tmp_path)
    made.start()
    made.describe({"world_size": 2}, lambda: {"git_commit": "abc"})
    made.finish(0, 5.0)
    described = json.loads((tmp_path / FOLDER / "run.json").read_text())
    assert (described["world_size"], described["git_commit"]) == (2, "abc")


def test_what_is_never_found_out_keeps_neither_the_readings_nor_the_end(tmp_path: Path) -> None:
    answers = threading.Event()

    def find() -> dict[str, object]:
        answers.wait()
        return {}

    made = recorder(tmp_path)
    made.start()
    began = time.monotonic()
    made.describe({"world_size": 2}, find)
    made.finish(0, 1.0)
    assert time.monotonic() - began < 30
    assert json.loads((tmp_path / FOLDER / "run.json").read_text())["world_size"] == 2
    assert rows(tmp_path, "marks")[-1]["mark"] == "end"
    answers.set()
