"""The diagnosis on logs of known causes: open cases, written along with the table, and frozen ones,
written unseen.

The last frozen set is left as it was at first sight: it says what to expect of logs that nobody has
seen yet.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from srunddp.triage import jobs
from srunddp.triage.collect import collect
from srunddp.triage.diagnose import diagnose
from srunddp.triage.diagnosis import Diagnosis

pytestmark = pytest.mark.slow

CORPUS = Path(__file__).parent / "corpus"
RIGHT = {
    "open": 0.95,
    "launchers": 0.95,
    "frozen": 0.95,
    "frozen2": 0.95,
    "frozen3": 0.85,
    "frozen4": 0.9,
}  # the least share of each set


@dataclass(frozen=True)
class Judged:
    """A case, what it is known to be, and what was said of it."""

    name: str
    expected: dict[str, Any]
    diagnosis: Diagnosis

    @property
    def right(self) -> bool:
        return self.diagnosis.cause in (self.expected["cause"], *(self.expected.get("also") or ()))


@pytest.fixture(scope="module", params=RIGHT)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def judged(name: str) -> list[Judged]:
    cases = sorted(path.parent for path in (CORPUS / name).glob("*/expected.yaml"))
    assert len(cases) >= 20
    expected = [
        yaml.safe_load((folder / "expected.yaml").read_text(encoding="utf-8")) for folder in cases
    ]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", "")  # Slurm knows none of these jobs
        found = [diagnose(collect(jobs.find([str(folder)], str(folder)).logs)) for folder in cases]
    return [
        Judged(folder.name, *each) for folder, *each in zip(cases, expected, found, strict=True)
    ]


def wrong(cases: list[Judged]) -> str:
    rows = [
        (case.name, case.expected["cause"], case.diagnosis.cause, case.diagnosis.certainty)
        for case in cases
    ]
    return "\n".join(
        f"{name:32} expected {cause!s:22} found {found!s:22} {how}"
        for name, cause, found, how in rows
    )


def test_the_root_cause_is_right_as_often_as_promised(name: str, judged: list[Judged]) -> None:
    missed = [case for case in judged if not case.right]
    assert len(judged) - len(missed) >= RIGHT[name] * len(judged), wrong(missed)


def test_no_certainty_is_wrong(judged: list[Judged]) -> None:
    assert (
        wrong([case for case in judged if not case.right and case.diagnosis.certainty == "certain"])
        == ""
    )


def test_world_size_and_silent_ranks_are_never_contradicted(judged: list[Judged]) -> None:
    """Where a case tells them; a diagnosis may know less."""
    names = {"world_size": "world_size", "first_rank": "rank", "ranks_seen": "seen"}
    known = [
        (case, name, getattr(case.diagnosis, names[name])) for case in judged for name in names
    ]
    rows = [
        f"{case.name}: {name} {value}, expected {case.expected[name]}"
        for case, name, value in known
        if case.expected.get(name) is not None and value not in (None, [], case.expected[name])
    ]
    assert len(rows) <= 0.05 * 3 * len(judged), rows


def test_rank_and_first_line_are_those_of_the_first_failure(
    name: str, judged: list[Judged]
) -> None:
    """Where a case tells them, a label before the line aside; a rank of null is any, as all failed
    alike.
    """
    rows = []
    for case in (each for each in judged if each.expected.get("first_line")):
        rank = case.expected["first_rank"]
        lines = case.expected["first_line"]
        first = case.diagnosis.first
        fitting = [
            line
            for line in ([lines] if isinstance(lines, str) else lines)
            if first and first.text.strip() in line
        ]
        if rank not in (None, case.diagnosis.rank) or not fitting:
            rows.append(
                f"{case.name}: rank {case.diagnosis.rank}, {first.text if first else None},"
                f" expected {rank}"
            )
    assert len(rows) <= (1 - RIGHT[name]) * len(judged), "\n".join(rows)
