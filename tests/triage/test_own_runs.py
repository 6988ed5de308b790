"""Recorded runs of srunddp itself: ways to end, with and without restarts and files of logs. Triage
names rank, node and cause of each with certainty; see ``tests/triage/record_runs.py``.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from srunddp.triage import jobs
from srunddp.triage.collect import collect
from srunddp.triage.diagnose import diagnose
from srunddp.triage.diagnosis import Certainty, Diagnosis

OWN = Path(__file__).parent / "own"
RUNS = sorted(path.parent.name for path in OWN.glob("*/expected.yaml"))
WITH_FILES = [name for name in RUNS if name.endswith("-logs")]
WORLD = 4


def expected(name: str) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((OWN / name / "expected.yaml").read_text())
    return found


def judged(folder: Path, *words: str) -> Diagnosis:
    job = jobs.find([str(folder)], "")
    evidence = collect(job.logs)
    job.add_to(evidence)
    return diagnose(evidence)


def verdict(found: Diagnosis) -> dict[str, Any]:
    return {"cause": found.cause, "rank": found.rank, "node": found.node}


@pytest.fixture(autouse=True)
def _without_slurm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")  # Slurm may know other jobs of these numbers


def test_there_are_thirty_runs() -> None:
    assert len(RUNS) >= 30
    assert len(WITH_FILES) == len(RUNS) / 2


@pytest.mark.parametrize("name", RUNS)
def test_rank_node_and_cause_are_certain(name: str) -> None:
    found = judged(OWN / name)
    assert (verdict(found), found.certainty) == (expected(name), Certainty.CERTAIN)
    assert found.world_size == WORLD


@pytest.mark.parametrize("name", RUNS)
def test_a_failure_is_not_told_a_second_time(name: str) -> None:
    """It is in failure.json, in the summary and in the rank's own log."""
    found = judged(OWN / name)
    assert [each.text for each in found.followed] == []


@pytest.mark.parametrize("name", WITH_FILES)
def test_what_srunddp_wrote_is_enough(name: str, tmp_path: Path) -> None:
    """Without a line of output, as in a folder whose logs have been deleted."""
    shutil.copytree(OWN / name / "logs", tmp_path / "logs", ignore=shutil.ignore_patterns("*.log"))
    found = judged(tmp_path)
    assert (verdict(found), found.certainty) == (expected(name), Certainty.CERTAIN)


@pytest.mark.parametrize("name", WITH_FILES)
def test_ranks_without_output_are_named(name: str) -> None:
    found = judged(OWN / name)
    logs = [path for path in (OWN / name).rglob("*.log") if not name.startswith("mute")]
    assert all(path.read_text() for path in logs)
    silent = {"mute-exception-logs": [0, 2, 3]}
    assert found.silent == silent.get(name, [])


def well(folder: Path) -> Path:
    """A run that ended well, as it was recorded; returns its output."""
    shutil.copytree(OWN / "well-logs", folder, dirs_exist_ok=True)
    (output,) = folder.glob("slurm-*.out")
    return output


CAUGHT = 'Traceback (most recent call last):\n  File "/project/train.py", line 3, in {}\n'


def test_an_error_that_a_rank_has_survived_is_none(tmp_path: Path) -> None:
    output = well(tmp_path)
    (log,) = tmp_path.rglob("node01.rank0.log")
    for path in (log, output):
        path.write_text(path.read_text() + CAUGHT.format("<module>") + "OSError: gone\n")
    found = judged(tmp_path)
    assert (found.cause, found.certainty) == (None, Certainty.CERTAIN)
    assert {each.rule for each in found.set_aside} == {"shutdown"}


def test_the_error_of_another_command_counts_though_the_run_ended_well(tmp_path: Path) -> None:
    output = well(tmp_path)
    output.write_text(output.read_text() + CAUGHT.format("<module>") + "MemoryError\n")
    assert judged(tmp_path).cause == "host-out-of-memory"


@pytest.mark.parametrize("last", ["end,3", "step,"], ids=["another code", "no end"])
def test_one_rank_that_did_not_end_well_is_told(last: str, tmp_path: Path) -> None:
    well(tmp_path)
    (marks,) = tmp_path.rglob("node02.rank3.marks.csv")
    marks.write_text(marks.read_text().replace("end,0", last))
    found = judged(tmp_path)
    assert (found.cause, found.certainty) == ("unknown", Certainty.UNKNOWN)
    assert "rank 3" in found.why


@pytest.mark.parametrize(
    ("marks", "cause"),
    [
        # A later run in the same folder was killed; the restart is of an earlier one.
        (["process,", "meeting,", "met,"], "unknown"),
        (["process,", "meeting,", "end,3"], "unknown"),
        (["process,", "meeting,", "end,0"], None),
    ],
    ids=["killed", "failed", "well"],
)
def test_a_restart_of_an_earlier_run_is_not_the_end_of_this_one(
    marks: list[str], cause: str | None, tmp_path: Path
) -> None:
    folder = tmp_path / "logs" / "run"
    last = _marks(folder / "monitor.0.1", 100.0, ["process,", "meeting,", "end,0"])
    _marks(folder / "monitor.0", last, marks)
    assert judged(tmp_path).cause == cause


def test_a_restart_begins_with_the_processes_of_the_start_before_it(tmp_path: Path) -> None:
    folder = tmp_path / "logs" / "run"
    _marks(folder / "monitor.0", 100.0, ["process,", "meeting,", "end,3"])
    _marks(folder / "monitor.0.1", 100.0, ["process,"])
    found = judged(tmp_path)
    assert (found.cause, "rank 0" in found.why) == ("unknown", True)
    _marks(folder / "monitor.0.1", 100.0, ["process,", "meeting,", "end,0"])
    assert judged(tmp_path).cause is None


def _marks(folder: Path, begin: float, marks: list[str], rank: int = 0) -> float:
    """Write a rank's marks, one a second; return when the last of them was."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = [f"{begin + second:.3f},{mark}" for second, mark in enumerate(marks)]
    text = "\n".join(["time,mark,value", *rows, ""])
    (folder / f"node01.rank{rank}.marks.csv").write_text(text)
    return begin + len(marks) - 1


@pytest.mark.parametrize("size", [1_800, 1_899, 1_900, 1_901, 2_000, 2_001, 50_000, 50_001])
def test_a_traceback_of_any_length_is_read(size: int, tmp_path: Path) -> None:
    """In the file it is one line; of a log's longer lines the middle is not read.

    A quote is two characters in JSON, so wherever a cut begins, one of both texts is damaged.
    """
    failure = {"rank": 1, "ranks": [1], "node": "node02", "cause": "ValueError: bad batch"}
    quotes = '"' * size
    frame = f'  File "/project/model.py", line 1, in forward\n    call({quotes})\n'
    traceback = f"Traceback (most recent call last):\n{frame}ValueError: bad batch"
    for pad in ("", "x"):
        text = traceback.replace("call(", f"{pad}call(")
        record = {**failure, "exit_code": 1, "traceback": text, "victims": []}
        (tmp_path / "failure.json").write_text(json.dumps(record, indent=2))
        found = judged(tmp_path)
        assert (found.rank, found.node, found.certainty) == (1, "node02", Certainty.CERTAIN)
        assert found.frame == "model.py:1 in forward"


@pytest.mark.parametrize("text", ["", "[]", '{"ranks": 1}', '{"ranks": {}, "world_size": 1e15}'])
def test_a_damaged_file_is_named_and_does_no_harm(text: str, tmp_path: Path) -> None:
    well(tmp_path)
    (run,) = tmp_path.rglob("run.json")
    run.write_text(text)
    job = jobs.find([str(tmp_path)], "")
    evidence = collect(job.logs)
    assert diagnose(evidence).cause is None  # each rank's own mark tells enough
    assert any("run.json" in note for note in evidence.notes)


@pytest.mark.parametrize("said", ["", "Training finished\n", "srunddp: ended with 0\n"])
def test_the_result_counts_for_the_whole_run(said: str, tmp_path: Path) -> None:
    """Whatever the script's log says of its end."""
    for code, cause in ((0, None), (1, "unknown")):
        (tmp_path / "slurm-4711.out").write_text(f"step 1\n{said}")
        (tmp_path / "result.json").write_text(f'{{"exit_code": {code}, "restarts": 0}}\n')
        assert judged(tmp_path).cause == cause


def test_a_rank_without_an_end_outweighs_what_another_says_of_its_own(tmp_path: Path) -> None:
    run = tmp_path / "4711.0"
    for rank, marks in enumerate((["process,", "met,", "end,0"], ["process,", "met,"])):
        _marks(run / "monitor.0", 100.0, marks, rank)
    (run / "node01.rank0.log").write_text("step 1\nTraining finished\n")
    found = judged(tmp_path)
    assert (found.cause, "rank 1" in found.why) == ("unknown", True)


def test_a_result_is_known_by_its_content_whatever_its_name(tmp_path: Path) -> None:
    (tmp_path / "slurm-4711.out").write_text("step 1\nTraining finished\n")
    (tmp_path / "config.json").write_text('{"error": "CUDA out of memory"}\n')
    assert judged(tmp_path).cause is None
    (tmp_path / "end-4711.json").write_text('{"exit_code": 3, "restarts": 0}\n')
    found = judged(tmp_path)
    assert (found.cause, "3" in found.why) == ("unknown", True)


@pytest.mark.parametrize(("code", "cause"), [(0, None), (3, "check-failed")])
def test_a_failed_check_counts_unless_the_run_ended_well(
    code: int, cause: str | None, tmp_path: Path
) -> None:
    finding = {"level": "FAIL", "check": "memlock", "found": "64 KiB", "expected": "unlimited"}
    finding |= {"hint": "ask the site"}
    record = {"version": 1, "findings": [{**finding, "ranks": [0, 1], "nodes": ["node01"]}]}
    (tmp_path / "preflight.4711.json").write_text(json.dumps(record))
    _marks(tmp_path / "4711.0" / "monitor.0", 100.0, ["process,", f"end,{code}"])
    assert judged(tmp_path).cause == cause
