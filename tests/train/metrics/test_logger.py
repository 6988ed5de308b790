"""The figures of a run."""

from __future__ import annotations

import json
import math
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from srunddp.errors import ConfigError
from srunddp.telemetry import MONITOR_FOLDER
from srunddp.train.metrics.logger import FILE, MetricsLogger
from tests.support.facts import tells
from tests.train.conftest import file_size_limit


def lines(folder: Path) -> list[dict[str, Any]]:
    def no_constant(name: str) -> None:
        raise AssertionError(f"{name} is not JSON")

    content = (folder / FILE).read_text()
    assert content == "" or content.endswith("\n")
    return [json.loads(line, parse_constant=no_constant) for line in content.splitlines()]


def steps(folder: Path) -> list[int]:
    return [line["step"] for line in lines(folder)]


def plain(folder: Path) -> MetricsLogger:
    return MetricsLogger(folder, False, pytest.fail)


def scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder / "tensorboard"))
    events.Reload()
    return {
        tag: [(one.step, one.value) for one in events.Scalars(tag)]
        for tag in events.Tags()["scalars"]
    }


def test_each_line_has_kind_step_time_and_the_figures(tmp_path: Path) -> None:
    history = plain(tmp_path / "a" / "b")
    history.add("step", 50, loss=0.5, samples=640)
    history.add("evaluation", 60, **{"val accuracy": 0.9})
    first, second = lines(tmp_path / "a" / "b")  # on disk before close()
    assert datetime.now(UTC) - datetime.fromisoformat(first.pop("time")) < timedelta(minutes=1)
    assert first == {"kind": "step", "step": 50, "loss": 0.5, "samples": 640}
    assert (second["kind"], second["val accuracy"]) == ("evaluation", 0.9)
    history.close()


def test_report_of_a_monitored_run_finds_the_newest_figures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a link, from wherever the training writes to; a file that is none of ours stays."""
    monitor = tmp_path / "monitor.0"
    monitor.mkdir()
    monkeypatch.setenv(MONITOR_FOLDER, str(monitor))
    monkeypatch.chdir(tmp_path)
    for folder in ("first", "second"):
        plain(Path(folder)).add("step", 1, loss=0.5)
        assert (monitor / FILE).readlink() == tmp_path / folder / FILE
    (monitor / FILE).unlink()
    (monitor / FILE).write_text("mine")
    plain(Path("third"))
    assert (monitor / FILE).read_text() == "mine"
    monkeypatch.setenv(MONITOR_FOLDER, str(tmp_path / "gone"))
    plain(Path("fourth"))


def test_every_line_is_strict_json_whatever_the_figure(tmp_path: Path) -> None:
    history = plain(tmp_path)
    history.add("step", 1, a=math.nan, b=math.inf, c=-math.inf, d=1e-300)
    (line,) = lines(tmp_path)
    assert [line[name] for name in "abcd"] == ["NaN", "Infinity", "-Infinity", 1e-300]
    assert float(line["c"]) == -math.inf


def test_a_figure_that_is_called_as_our_own_keys_hides_none(tmp_path: Path) -> None:
    plain(tmp_path).add("step", 1, **{"time": 3.0, "kind": 4.0, "step": 5.0})
    (line,) = lines(tmp_path)
    assert (line["kind"], line["step"]) == ("step", 1)
    assert (line["time_"], line["kind_"], line["step_"]) == (3.0, 4.0, 5.0)


@pytest.mark.parametrize("end", ["", '{"kind": "step", "st', '{"kind": "step", "step": 2}'])
def test_a_second_run_appends_behind_the_last_whole_line(tmp_path: Path, end: str) -> None:
    (tmp_path / FILE).write_text('{"kind": "step", "step": 1}\n' + end)
    plain(tmp_path).add("step", 3)
    assert steps(tmp_path) == [1, 3]


def test_rewinding_drops_later_steps_and_no_others(tmp_path: Path) -> None:
    history = plain(tmp_path)
    for step in range(1, 6):
        history.add("step", step, loss=1.0)
    before = (tmp_path / FILE).read_bytes().splitlines()
    history.rewind(3)
    assert (tmp_path / FILE).read_bytes().splitlines() == before[:3]
    history.add("step", 4, loss=2.0)
    assert steps(tmp_path) == [1, 2, 3, 4]
    assert lines(tmp_path)[-1]["loss"] == 2.0
    assert [path.name for path in tmp_path.iterdir()] == [FILE]
    history.rewind(0)
    assert steps(tmp_path) == []


# A disk that fails.


def test_a_folder_that_cannot_be_written_is_said_before_training(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    found = r"file/run/metrics.jsonl: Not a directory; expected .* -> .*output_dir"
    with pytest.raises(ConfigError, match=found):
        plain(tmp_path / "file" / "run")


def test_a_disk_full_for_a_while_is_reported_and_tears_no_line(tmp_path: Path) -> None:
    said: list[str] = []
    history = MetricsLogger(tmp_path, False, said.append)
    history.add("step", 1, loss=1.0)
    with file_size_limit((tmp_path / FILE).stat().st_size + 10):  # full in the middle of a line
        for step in (2, 3):
            history.add("step", step, loss=1.0)
    history.add("step", 4, loss=1.0)
    history.close()
    (line,) = said
    assert tells(line, tmp_path, "File too large")
    assert steps(tmp_path) == [1, 4]


def test_rewinding_on_a_full_disk_ends_nothing(tmp_path: Path) -> None:
    said: list[str] = []
    history = MetricsLogger(tmp_path, False, said.append)
    for step in (1, 2):
        history.add("step", step)
    with file_size_limit(10):
        history.rewind(1)
    history.add("step", 2)
    (line,) = said
    assert tells(line, tmp_path, "File too large")
    assert steps(tmp_path) == [1, 2, 2]
    assert [path.name for path in tmp_path.iterdir()] == [FILE]


# TensorBoard.


def test_tensorboard_gets_the_same_figures(tmp_path: Path) -> None:
    history = MetricsLogger(tmp_path, True, pytest.fail)
    history.add("step", 10, loss=0.5)
    history.add("step", 20, loss=0.25)
    history.add("evaluation", 20, **{"val loss": math.inf})
    history.close()
    assert scalars(tmp_path) == {
        "step/loss": [(10, 0.5), (20, 0.25)],
        "evaluation/val loss": [(20, math.inf)],
    }
    assert steps(tmp_path) == [10, 20, 20]


def test_rewinding_hides_later_steps_from_tensorboard(tmp_path: Path) -> None:
    first = MetricsLogger(tmp_path, True, pytest.fail)
    for step in (1, 2, 3):
        first.add("step", step, loss=1.0)
    first.close()
    (written,) = (tmp_path / "tensorboard").iterdir()
    # Files are read by their second, then as texts.
    written.rename(written.with_name("events.out.tfevents.0000000001"))
    second = MetricsLogger(tmp_path, True, pytest.fail)
    second.rewind(1)
    second.add("step", 2, loss=2.0)
    second.close()
    assert scalars(tmp_path)["step/loss"] == [(1, 1.0), (2, 2.0)]


def test_without_tensorboard_there_are_lines_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    history = MetricsLogger(tmp_path, True, pytest.fail)
    history.add("step", 1, loss=0.5)
    history.close()
    assert [path.name for path in tmp_path.iterdir()] == [FILE]


def test_a_folder_that_tensorboard_cannot_make_ends_nothing(tmp_path: Path) -> None:
    said: list[str] = []
    (tmp_path / "tensorboard").touch()  # where its folder should be
    history = MetricsLogger(tmp_path, True, said.append)
    for step in (1, 2):
        history.add("step", step, loss=0.5)
    history.close()
    assert len(said) == 1
    assert steps(tmp_path) == [1, 2]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_full_disk_below_tensorboard_ends_nothing(tmp_path: Path) -> None:
    said: list[str] = []
    history = MetricsLogger(tmp_path, True, said.append)
    history.add("step", 1, loss=1.0)
    with file_size_limit(1100):
        for step in range(2, 400):  # far more than TensorBoard's queue holds
            history.add("step", step, loss=1.0)
        history.close()
    (line,) = said
    assert tells(line, tmp_path, "File too large")
