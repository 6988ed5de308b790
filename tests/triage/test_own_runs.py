"""Recorded runs of srunddp itself: ways to end, with and without restarts and files of logs. Triage
names rank, node and cause of each with certainty; see ``tests/triage/record_runs.py``.
"""

from __future__ import annotations

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
