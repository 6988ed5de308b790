"""A run that crashed, or was killed while it wrote, has its report: whatever is missing, and
wherever a file is cut.
"""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from srunddp.report import csv_files, text
from srunddp.report.advice import notes
from srunddp.report.cli import record
from srunddp.report.html import page
from srunddp.report.panels import sections
from srunddp.report.run import read
from srunddp.report.summarize import summary_of
from srunddp.util import sample_files
from tests.support.made_up_run import MadeUp
from tests.support.starting import srunddp, write

RUN = MadeUp(nodes=2, ranks_per_node=1, gpus_per_node=1, seconds=40, epoch_s=20, evaluation_s=2)
KINDS = ("node", "tasks", "links", "gpus", "gpu_faults")
FILES = sorted(
    ["run.json"]
    + [f"node0{node}.{kind}.csv" for node in (1, 2) for kind in KINDS]
    + [f"node0{rank + 1}.rank{rank}.{kind}.csv" for rank in (0, 1) for kind in ("steps", "marks")]
)


def reported(folder: Path) -> str:
    """The text, after the page and the JSON were made too: none of them has a number that is
    none.
    """
    run = read(folder)
    summary = summary_of(run)
    said = "\n".join(text.lines(summary, notes(summary)))
    html = page(summary, notes(summary), sections(run, summary))
    assert not re.search(r"\b(nan|inf|None)\b", said + html)
    assert json.dumps(record(summary), allow_nan=False)
    return said


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = RUN.write(tmp_path_factory.mktemp("whole"))
    assert sorted(path.name for path in folder.iterdir()) == FILES
    return folder


def test_files_of_an_earlier_larger_start_are_ignored(whole: Path, tmp_path: Path) -> None:
    alone = MadeUp(nodes=1, ranks_per_node=1, seconds=40)
    again = tmp_path / "again"
    folder = alone.write(again)
    said = reported(folder)
    for name in FILES:
        if name.startswith("node02."):
            shutil.copy(whole / name, folder)
    assert len(list(folder.iterdir())) > 6
    assert reported(folder) == said


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_files_cut_or_with_junk_still_give_a_report(
    whole: Path, tmp_path: Path, data: st.DataObject
) -> None:
    shutil.copytree(whole, tmp_path / "damaged", dirs_exist_ok=True)
    for name in data.draw(st.sets(st.sampled_from(FILES), min_size=1)):
        content = (whole / name).read_bytes()
        at = data.draw(st.integers(0, len(content)))
        junk = data.draw(st.none() | st.binary(max_size=60))
        if junk is None:
            rest = b""
        else:
            rest = junk + content[at + len(junk) :]
        (tmp_path / "damaged" / name).write_bytes(content[:at] + rest)
    reported(tmp_path / "damaged")


@pytest.mark.parametrize(
    "missing", ["*", "*.csv", "run.json", "node02.*", "*.steps.csv", "*.marks.csv", "*.node.csv"]
)
def test_missing_files_still_give_a_report(missing: str, whole: Path, tmp_path: Path) -> None:
    shutil.copytree(whole, tmp_path / "some")
    for path in (tmp_path / "some").glob(missing):
        path.unlink()
    said = reported(tmp_path / "some")
    assert said.startswith("run ")
    assert ("no readings of node02" in said) == (missing == "node02.*")


def test_a_line_without_its_end_is_not_counted(tmp_path: Path) -> None:
    """Its last number would be another one."""
    path = RUN.write(tmp_path) / "node01.tasks.csv"
    content = path.read_text()
    assert re.search(r"\.\d{4}\n$", content)
    path.write_text(content[:-3])
    assert csv_files.samples(path, sample_files.TASKS)["0"].count == content.count("\n") - 2
    # Nor are those of a clock that was set back.
    path = path.with_name("node01.node.csv")
    head, *lines = path.read_text().splitlines()
    back = [
        f"{float(line.split(',')[0]) - 1000:.3f},{line.partition(',')[2]}" for line in lines[3:5]
    ]
    path.write_text("".join(f"{line}\n" for line in [head, *lines[:3], *back, *lines[5:]]))
    found = csv_files.samples(path, sample_files.NODE)[""]
    assert found.count == len(lines) - 2
    assert list(found.time) == sorted(found.time)


def test_every_value_missing_still_gives_a_report(tmp_path: Path) -> None:
    folder = RUN.write(tmp_path)
    for path in folder.glob("*.csv"):
        keep = {"time", "rank", "link", "kind", "chosen", "uuid", "index", "name", "mark"}
        head, *rows = [line.split(",") for line in path.read_text().splitlines()]
        bare = [
            [cell if name in keep else "" for name, cell in zip(head, row, strict=True)]
            for row in rows
        ]
        path.write_text("".join(f"{','.join(row)}\n" for row in [head, *bare]))
    reported(folder)
    run = read(folder)
    found = sections(run, summary_of(run))
    assert [each.title for each in found if each.figures] == ["Time line", "Launch"]
    assert all(each.missing for each in found if not each.figures)


def test_columns_are_read_by_name_in_any_order(tmp_path: Path) -> None:
    folder = RUN.write(tmp_path / "one")
    other = RUN.write(tmp_path / "other")
    for path in other.glob("*.csv"):
        if ".marks." not in path.name:
            rows = [line.split(",") for line in path.read_text().splitlines()]
            path.write_text("".join(f"{','.join([*row[::-1], 'new'])}\n" for row in rows))
    assert reported(folder) == reported(other)


@pytest.mark.slow
def test_a_long_run_is_thinned_and_its_peaks_stay(tmp_path: Path) -> None:
    made_up = replace(RUN, seconds=20000, interval=1.0, epoch_s=0)
    path = made_up.write(tmp_path) / "node01.node.csv"
    lines = path.read_text().splitlines()
    high = lines[9999].split(",")
    high[3] = str(77 * 2**30)
    lines[9999] = ",".join(high)
    path.write_text("".join(f"{line}\n" for line in lines))
    found = csv_files.samples(path, sample_files.NODE)[""]
    assert found.count == len(lines) - 1
    assert len(found.time) <= 1500
    assert found.most("memory_bytes") == 77 * 2**30
    assert found.total("cpu_s") == pytest.approx(float(lines[-1].split(",")[1]))


LOGS = """
from pathlib import Path
from srunddp.train.metrics.logger import MetricsLogger
MetricsLogger(Path("out"), False, print).add("step", 1, loss=0.5)
"""


def metrics(
    folder: Path, *lines: tuple[float, dict[str, object]]
) -> dict[str, list[tuple[float, float]]]:
    """What is read of figures that the training logged so many seconds after the run's start."""
    written = []
    for at, figures in lines:
        time = datetime.fromtimestamp(RUN.start + at, UTC).isoformat(timespec="milliseconds")
        written.append(json.dumps({"kind": "step", "step": 1, "time": time, **figures}))
    (folder / "metrics.jsonl").write_text(
        "\n".join([*written, '{"kind": "step", "time": "2027-01-', "7", "[]", ""])
    )
    return read(folder).metrics


def test_metrics_are_those_of_this_start_by_name(tmp_path: Path) -> None:
    folder = RUN.write(tmp_path)
    found = metrics(
        folder,
        (-1000.0, {"loss": 9.0}),
        (10.0, {"loss": 2.0, "lr": 0.1}),
        (20.0, {"loss": "NaN", "lr": 0.1}),
        (21.0, {"loss": math.nan}),
        (22.0, {"loss": 1e300}),
        (25.0, {"kind": "evaluation", "epoch": 1, "accuracy": 0.5, "note": "text", "flag": True}),
        (
            26.0,
            {
                "kind": "epoch",
                "epoch": 1,
                "seconds": 9.5,
                "loss": 1.5,
                "top5": 0.7,
                "val/accuracy": 0.5,
            },
        ),
        (30.0, {"loss": 1.0, "lr": 0.1}),
        (31.0, {"kind": "other", "loss": 7.0}),
        (32.0, {"kind": ["step"], "loss": 7.0}),
        (1000.0, {"loss": 0.1}),
    )
    about: Callable[[float], Any] = pytest.approx
    assert found == {
        "loss": [(about(10.0), 2.0), (about(30.0), 1.0)],
        "val/accuracy": [(about(25.0), 0.5)],
        "top5": [(about(26.0), 0.7)],
    }
    first = read(folder).not_finite
    assert first is not None
    assert (first.name, first.value, first.step, first.at_s) == ("loss", "nan", 1, about(20.0))
    assert metrics(folder, (10.0, {"lr": 0.1})) == {"lr": [(about(10.0), 0.1)]}
    assert metrics(folder) == {}
    (folder / "metrics.jsonl").unlink()
    (folder / "metrics.jsonl").symlink_to(tmp_path / "gone")
    assert read(folder).metrics == {}


def test_metrics_of_a_huge_file_leave_steps_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("srunddp.report.run._MANY", 1000)
    steps: list[tuple[float, dict[str, object]]] = [
        (float(at % 40), {"loss": 1.0}) for at in range(100)
    ]
    found = metrics(
        RUN.write(tmp_path), *steps, *[(30.0, {"kind": "evaluation", "accuracy": 0.5})] * 3
    )
    assert 5 < len(found["loss"]) < 50
    assert len(found["val/accuracy"]) == 3


@pytest.mark.slow
def test_metrics_of_a_monitored_run_are_in_its_report(tmp_path: Path) -> None:
    """Wherever the training writes them; a fork or a program of its own makes no difference."""
    path = write(tmp_path / "train.py", LOGS)
    for worker in ("fork", "exec"):
        done = srunddp(
            "--monitor=1", f"--monitor-dir={worker}", path, folder=tmp_path, SRUNDDP_WORKER=worker
        )
        assert done.returncode == 0, done.stderr
        assert [
            value for _, value in read(tmp_path / worker / "run" / "monitor.0").metrics["loss"]
        ] == [0.5], worker


ODD_FILES = {
    "a pipe": os.mkfifo,
    "a device": lambda path: path.symlink_to("/dev/zero"),
    "a folder": Path.mkdir,
    "a line without end": lambda path: path.write_bytes(b"1," * (8 << 20)),
}


@pytest.mark.slow
@pytest.mark.parametrize("odd", ODD_FILES)
def test_what_is_no_file_of_a_run_is_left_out(whole: Path, tmp_path: Path, odd: str) -> None:
    """A run's folder may be somebody else's; a report waits for nothing and fills no memory."""
    for number, name in enumerate([*FILES, "metrics.jsonl"]):
        folder = tmp_path / str(number)
        shutil.copytree(whole, folder)
        (folder / name).unlink(missing_ok=True)
        ODD_FILES[odd](folder / name)
        (folder.parent / "failure.json").unlink(missing_ok=True)
        ODD_FILES[odd](folder.parent / "failure.json")
        tracemalloc.start()
        try:
            if name == "run.json":
                read(folder)
            else:
                assert "2 nodes" in reported(folder)
            _, most = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
            path = folder.parent / "failure.json"
            path.rmdir() if path.is_dir() and not path.is_symlink() else path.unlink()
        assert most < 100 << 20
