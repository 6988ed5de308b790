"""Paths before a job: what is not there, or not the same, is named, and a dead file server holds
nobody up.
"""

from __future__ import annotations

import os
from pathlib import Path
from threading import Event
from typing import Any, cast

import pytest

from srunddp.check.checks import paths
from srunddp.check.checks.paths import CHECK, PathFacts
from srunddp.check.finding import Ranks, Severity
from srunddp.util.filesystem import Place, look
from tests.support.made_up_site import LOCAL_RANK_1, reported, seen, subject, travelled
from tests.support.starting import LONG

FAIL = Severity.FAIL
WARN = Severity.WARN
ROLES = {
    "working directory": "/proj",
    "script": "/proj/train.py",
    "environment": "/env",
    "path": "/data",
}


def place(role: str, **changes: str) -> Place:
    kind = "file" if role == "script" else "folder"
    known = {"role": role, "path": ROLES[role], "kind": kind, "error": "", "system": "nfs4"}
    known |= {"identity": f"nfs4 server:/x {role}", "content": "abc"}
    return cast(Place, known | changes)


def ranks(changes: dict[int, dict[str, dict[str, str]]]) -> Ranks[PathFacts]:
    """Of six nodes, which see the same but for ``changes``, by rank and role."""
    return seen(
        PathFacts(places=[place(role, **changes.get(rank, {}).get(role, {})) for role in ROLES])
        for rank in range(12)
    )


def both(role: str, **changes: str) -> dict[int, dict[str, dict[str, str]]]:
    """Of node03; the first alone has read the content."""
    return {4: {role: changes}, 5: {role: changes | {"content": ""}}}


OWN = {"identity": "ext4 own 1", "content": "def"}
FOUND: dict[str, tuple[dict[int, dict[str, dict[str, str]]], Severity, str]] = {
    "a path is missing": ({5: {"path": {"kind": "missing"}}}, FAIL, "/data is not there"),
    "dead": ({5: {"path": {"kind": "silent"}}}, FAIL, "/data does not answer within 5 s"),
    "stale": ({5: {"path": {"kind": "broken", "error": "Stale"}}}, FAIL, "/data: Stale"),
    "closed": ({5: {"path": {"error": "cannot be read"}}}, FAIL, "/data cannot be read"),
    "elsewhere": (
        both("working directory", path="/tmp", **OWN),
        WARN,
        "the working directory is /tmp",
    ),
    "read-only": (
        {5: {"working directory": {"error": "cannot be written to"}}},
        WARN,
        "the working directory /proj cannot be written to",
    ),
    "a file": (both("path", kind="file", **OWN), FAIL, "/data is a file"),
    "another script": (
        both("script", **OWN),
        FAIL,
        "the script /proj/train.py differs from that of",
    ),
    "another folder": (both("path", **OWN), WARN, "/data differs from that of most nodes"),
    "another project": (
        both("working directory", **OWN),
        WARN,
        "the working directory /proj differs from that of",
    ),
}
SAME: dict[str, dict[int, dict[str, dict[str, str]]]] = {
    "nothing": {},
    "a copy": both("path", identity="ext4 own 1"),
    "a log that grows": both("working directory", content="def"),
    "too many entries": both("path", identity="ext4 own 1", content=""),
}


@pytest.mark.parametrize("name", FOUND)
def test_what_is_not_the_same_on_a_node_is_found_there(name: str) -> None:
    changes, expected, words = FOUND[name]
    ((level, found, nodes, who),) = reported(CHECK.evaluate(ranks(changes)))
    assert (level, nodes, who) == (expected, ("node03",), () if 4 in changes else (5,))
    assert found.startswith(words)


@pytest.mark.parametrize("name", SAME)
def test_what_is_the_same_on_all_nodes_is_not_found(name: str) -> None:
    assert reported(CHECK.evaluate(ranks(SAME[name]))) == []


def test_on_rank_0_s_node_a_folder_for_checkpoints_is_needed() -> None:
    wrong = {"working directory": {"error": "cannot be written to: No space left on device"}}
    found = reported(CHECK.evaluate(ranks({0: wrong, 1: wrong, 2: wrong})))
    assert [level for level, *_ in found] == [FAIL, FAIL, WARN]


def test_what_is_missing_everywhere_is_found_on_all_nodes() -> None:
    nowhere = {rank: {"path": {"kind": "missing"}} for rank in range(12)}
    assert len(reported(CHECK.evaluate(ranks(nowhere)))) == 12


def test_this_rank_s_paths_are_collected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("print()\n")
    (tmp_path / "data").mkdir()
    named = ["data", "data/", "/no/such", "train.py/x", "/dev/null"]
    facts = travelled(CHECK, subject(script=Path("train.py"), paths=named))
    assert [(one["role"], one["path"], one["kind"]) for one in facts.places[:2]] == [
        ("working directory", str(tmp_path), "folder"),
        ("script", str(tmp_path / "train.py"), "file"),
    ]
    assert [one["role"] for one in facts.places[2:]] == ["environment", *["path"] * 5]
    assert [one["kind"] for one in facts.places[2:]] == [
        *["folder"] * 3,
        "missing",
        "missing",
        "other",
    ]
    assert [bool(one["content"]) for one in facts.places] == [
        True,
        True,
        False,
        True,
        True,
        False,
        False,
        False,
    ]
    assert not any(one["error"] for one in facts.places)
    assert sorted(os.listdir(tmp_path)) == ["data", "train.py"]
    assert f", {tmp_path}/data: " in CHECK.summary(seen([facts]))


def test_ranks_other_than_0_leave_writing_and_reading_to_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*_: Any, **__: Any) -> str:
        raise AssertionError

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(paths, "why_not_writable", never)
    monkeypatch.setattr(paths, "content", never)
    (proj, env) = CHECK.collect(subject(LOCAL_RANK_1)).places
    assert (proj["kind"], proj["content"], proj["error"], env["kind"]) == (
        "folder",
        "",
        "",
        "folder",
    )


def test_a_working_folder_that_was_deleted_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where rank 0 can write nothing is found by writing."""
    monkeypatch.chdir("/proc/self")
    assert CHECK.collect(subject()).places[0]["error"].startswith("cannot be written to")
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    assert CHECK.collect(subject()).places[0]["kind"] == "missing"
    monkeypatch.chdir(tmp_path)


def test_a_path_that_never_answers_holds_nobody_up(monkeypatch: pytest.MonkeyPatch) -> None:
    over = Event()
    answered: list[str] = []

    def hang(path: str, **_: Any) -> str:
        if path in ("/dead", "data"):
            over.wait(LONG)
            answered.append(path)
        return ""

    monkeypatch.setattr(paths, "_PATIENCE", 0.1)
    monkeypatch.setattr(
        paths, "look", lambda role, path, write: hang(path) or look(role, path, write=write)
    )
    monkeypatch.setattr(paths, "content", hang)
    try:
        facts = CHECK.collect(subject(paths=["/dead"]))
        assert answered == []
    finally:
        over.set()
    assert [one["kind"] for one in facts.places] == ["folder", "folder", "silent"]
