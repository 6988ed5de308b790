"""What a rank marks is in its files, whatever becomes of the rank, and no file system keeps its supervisor."""

from __future__ import annotations

import csv
import json
import math
import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from srunddp.monitor.recorder import Recorder
from srunddp.telemetry import TelemetryPage


@pytest.fixture
def marks() -> TelemetryPage:
    return TelemetryPage(recording=True)


def recorder(folder: Path, marks: TelemetryPage, seconds: float = 60.0) -> Recorder:
    made = Recorder(folder / "deep" / "monitor.0", "node01.rank3", seconds, marks)
    made.open()
    return made


def rows(folder: Path, kind: str) -> list[dict[str, str]]:
    with (folder / "deep" / "monitor.0" / f"node01.rank3.{kind}.csv").open() as file:
        return list(csv.DictReader(file))


def until(condition: Callable[[], object], limit: float = 10.0) -> None:
    end = time.monotonic() + limit
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_marks_and_the_last_sums_are_there_when_it_ends(tmp_path: Path, marks: TelemetryPage) -> None:
    made = recorder(tmp_path, marks)
    made.start()
    made.mark("meeting")
    marks.event("resumed", 12_345_678)
    marks.write_steps(7, 56, 1.5, 0.25, 0.5, 0.125, 2)
    made.finish(143, 5.0)
    assert [(row["mark"], row["value"]) for row in rows(tmp_path, "marks")] == [
        ("process", ""),
        ("meeting", ""),
        ("resumed", "12345678"),
        ("end", "143"),
    ]
    *_, last = rows(tmp_path, "steps")
    assert list(last.values())[1:] == ["7", "56", "1.500000", "0.250000", "0.500000", "0.125000", "2"]
    assert abs(float(last["time"]) - time.time()) < 60


def test_the_time_of_the_process_is_when_the_kernel_started_it(tmp_path: Path, marks: TelemetryPage) -> None:
    made = recorder(tmp_path, marks)
    child = os.fork()
    if child == 0:
        made.start()
        made.finish(0, 5.0)
        os._exit(0)
    now = time.time()
    os.waitpid(child, 0)
    assert abs(float(rows(tmp_path, "marks")[0]["time"]) - now) < 1


def test_a_row_is_there_each_time_and_complete_before_the_end(tmp_path: Path, marks: TelemetryPage) -> None:
    made = recorder(tmp_path, marks, seconds=0.05)
    made.start()
    until(lambda: len(rows(tmp_path, "steps")) >= 3)
    marks.event("evaluation")
    until(lambda: "evaluation" in [row["mark"] for row in rows(tmp_path, "marks")])
    made.finish(0, 5.0)


def test_of_a_script_with_a_loop_of_its_own_the_steps_are_counted(tmp_path: Path, marks: TelemetryPage) -> None:
    made = recorder(tmp_path, marks)
    for _ in range(4):
        marks.mark()
    made._look()
    marks.rest()  # as before a long evaluation
    made._look()
    made.start()
    made.finish(0, 5.0)
    assert [(row["steps"], row["step_s"]) for row in rows(tmp_path, "steps")][-2:] == [("4", ""), ("4", "")]


def test_the_runs_description_is_whole_or_not_there(tmp_path: Path, marks: TelemetryPage) -> None:
    made = recorder(tmp_path, marks)
    made.start()
    made.describe({"world_size": 2})
    made.finish(0, 5.0)
    assert json.loads((made.folder / "run.json").read_text()) == {"world_size": 2}


def test_an_earlier_runs_rows_in_the_same_folder_are_gone(tmp_path: Path, marks: TelemetryPage) -> None:
    for number in (1, 2):
        made = recorder(tmp_path, marks)
        made.start()
        made.finish(number, 5.0)
    assert [row["value"] for row in rows(tmp_path, "marks")][1:] == ["2"]


def test_a_full_disk_ends_nothing_and_a_hanging_one_holds_nobody_for_long(tmp_path: Path, marks: TelemetryPage) -> None:
    made = recorder(tmp_path, marks)
    made._steps = os.open("/dev/full", os.O_WRONLY)
    pipe = os.pipe()
    os.set_blocking(pipe[1], False)
    while True:
        try:
            os.write(pipe[1], bytes(65536))
        except BlockingIOError:
            break
    os.set_blocking(pipe[1], True)
    made._events = pipe[1]  # a write there waits for ever
    began = time.monotonic()
    made.start()
    for _ in range(100):
        made.mark("meeting")
    made.finish(0, 0.2)
    assert time.monotonic() - began < 10
    os.close(pipe[0])


def test_a_value_that_is_none_is_an_empty_field(tmp_path: Path, marks: TelemetryPage) -> None:
    made = recorder(tmp_path, marks)
    made.start()
    marks.event("evaluation", math.nan)
    made.finish(0, 5.0)
    assert [row["value"] for row in rows(tmp_path, "marks") if row["mark"] == "evaluation"] == [""]
