"""Paths before a job: what is not there, or not the same, is named, and a dead file server holds nobody up."""

from __future__ import annotations

import os
import time
from pathlib import Path
from threading import Event
from typing import Any

import pytest

from srunddp.check.checks import paths
from srunddp.check.checks.paths import CHECK, PathFacts, node_lines
from srunddp.check.finding import Observation, Severity
from srunddp.util.filesystem import Place, look
from tests.support.made_up_site import LOCAL_RANK_1, reported, seen, subject, travelled

FAIL, WARN = Severity.FAIL, Severity.WARN
ROLES = {"proj": "/proj", "script": "/proj/train.py", "env": "/env", "data": "/data"}


def place(role: str, **changes: str) -> Place:
    kind = "file" if role == "script" else "folder"
    known = {"role": role, "path": ROLES[role], "kind": kind, "error": "", "system": "nfs4"}
    return Place(**(known | {"identity": f"nfs4 server:/x {role}", "content": "abc"} | changes))  # type: ignore[typeddict-item]


def ranks(changes: dict[int, dict[str, dict[str, str]]]) -> list[Observation[PathFacts]]:
    """Of six nodes, which see the same but for ``changes``, by rank and role."""
    return seen(
        PathFacts(places=[place(role, **changes.get(rank, {}).get(role, {})) for role in ROLES]) for rank in range(12)
    )


def both(role: str, **changes: str) -> dict[int, dict[str, dict[str, str]]]:
    """Of node03; the first alone has read the content."""
    return {4: {role: changes}, 5: {role: changes | {"content": ""}}}


OWN = {"identity": "ext4 own 1", "content": "def"}
FOUND: dict[str, tuple[dict[int, dict[str, dict[str, str]]], list[tuple[Severity, str, tuple[int, ...]]], str]] = {
    "nothing": ({}, [], ""),
    "a path is missing": (
        {5: {"data": {"kind": "missing"}}},
        [(FAIL, "/data is not there", (5,))],
        "data=missing",
    ),
    "the script is missing": (
        {5: {"script": {"kind": "missing"}}},
        [(FAIL, "the script /proj/train.py is not there", (5,))],
        "script=missing",
    ),
    "dead": (
        {5: {"data": {"kind": "silent"}}},
        [(FAIL, "/data does not answer within 5 s", (5,))],
        "data=silent",
    ),
    "stale": (
        {5: {"data": {"kind": "broken", "error": "Stale file handle"}}},
        [(FAIL, "/data: Stale file handle", (5,))],
        "data=broken",
    ),
    "closed": (
        {5: {"data": {"error": "cannot be read"}}},
        [(FAIL, "/data cannot be read", (5,))],
        "data=unreadable",
    ),
    "elsewhere": (
        both("proj", path="/tmp", **OWN),
        [(WARN, "the working directory is /tmp", ())],
        "proj=differs",
    ),
    "read-only": (
        {5: {"proj": {"error": "cannot be written to"}}},
        [(WARN, "the working directory /proj cannot be written to", (5,))],
        "proj=unwritable",
    ),
    "a file": (both("data", kind="file", **OWN), [(FAIL, "/data is a file", ())], "data=differs"),
    "another script": (
        both("script", **OWN),
        [(FAIL, "the script /proj/train.py differs from that of most nodes", ())],
        "script=differs",
    ),
    "another folder": (both("data", **OWN), [(WARN, "/data differs from that of most nodes", ())], "data=differs"),
    "another project": (
        both("proj", **OWN),
        [(WARN, "the working directory /proj differs from that of most nodes", ())],
        "proj=differs",
    ),
    "a copy": (both("data", identity="ext4 own 1"), [], ""),
    "a log that grows": (both("proj", content="def"), [], ""),
    "too many entries": (both("data", identity="ext4 own 1", content=""), [], ""),
}


@pytest.mark.parametrize("name", FOUND)
def test_what_is_not_the_same_on_a_node_is_found_there(name: str) -> None:
    changes, expected, _ = FOUND[name]
    assert reported(CHECK.evaluate(ranks(changes))) == [
        (level, found, ("node03",), who) for level, found, who in expected
    ]


@pytest.mark.parametrize("name", FOUND)
def test_there_is_a_line_for_each_node(name: str) -> None:
    changes, _, word = FOUND[name]
    well = "proj=ok script=ok env=ok data=ok"
    lines = [f"node{number:02d} {well}" for number in range(1, 7)]
    if word:
        lines[2] = lines[2].replace(f"{word.partition('=')[0]}=ok", word)
    assert node_lines(ranks(changes)) == lines


def test_on_rank_0_s_node_a_folder_for_checkpoints_is_needed() -> None:
    wrong = {"proj": {"error": "cannot be written to: No space left on device"}}
    found = reported(CHECK.evaluate(ranks({0: wrong, 1: wrong, 2: wrong})))
    assert [level for level, *_ in found] == [FAIL, FAIL, WARN]


def test_what_is_missing_everywhere_is_found_on_all_nodes() -> None:
    nowhere = {rank: {"data": {"kind": "missing"}} for rank in range(12)}
    assert len(reported(CHECK.evaluate(ranks(nowhere)))) == 12
    assert all(line.endswith("data=missing") for line in node_lines(ranks(nowhere)))


def test_this_rank_s_paths_are_collected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("print()\n")
    (tmp_path / "data").mkdir()
    facts = travelled(
        CHECK, subject(script=Path("train.py"), paths=["data", "data/", "/no/such", "train.py/x", "/dev/null"])
    )
    assert [(one["role"], one["path"], one["kind"]) for one in facts.places[:2]] == [
        ("proj", str(tmp_path), "folder"),
        ("script", str(tmp_path / "train.py"), "file"),
    ]
    assert [(one["role"], one["kind"]) for one in facts.places[2:]] == [
        ("env", "folder"),
        ("data", "folder"),
        ("data/", "folder"),
        ("such", "missing"),
        ("x", "missing"),
        ("null", "other"),
    ]
    assert [bool(one["content"]) for one in facts.places] == [True, True, False, True, True, False, False, False]
    assert not any(one["error"] for one in facts.places)
    assert sorted(os.listdir(tmp_path)) == ["data", "train.py"]
    assert "proj on " in CHECK.summary(seen([facts]))


def test_ranks_other_than_0_leave_writing_and_reading_to_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: Any, **__: Any) -> str:
        raise AssertionError

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(paths, "why_not_writable", never)
    monkeypatch.setattr(paths, "content", never)
    (proj, env) = CHECK.collect(subject(LOCAL_RANK_1)).places
    assert (proj["kind"], proj["content"], proj["error"], env["kind"]) == ("folder", "", "", "folder")


def test_where_rank_0_can_write_nothing_is_found_by_writing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir("/proc/self")
    assert CHECK.collect(subject()).places[0]["error"].startswith("cannot be written to")


def test_a_working_folder_that_was_deleted_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    assert CHECK.collect(subject()).places[0]["kind"] == "missing"
    monkeypatch.chdir(tmp_path)


def test_a_path_that_never_answers_holds_nobody_up(monkeypatch: pytest.MonkeyPatch) -> None:
    over = Event()

    def hang(path: str, **_: Any) -> str:
        if path in ("/dead", "data"):
            over.wait()
        return ""

    monkeypatch.setattr(paths, "_PATIENCE", 0.1)
    monkeypatch.setattr(paths, "look", lambda role, path, write: hang(path) or look(role, path, write=write))
    monkeypatch.setattr(paths, "content", hang)
    start = time.monotonic()
    try:
        facts = CHECK.collect(subject(paths=["/dead"]))
    finally:
        over.set()
    assert time.monotonic() - start < 5
    assert [one["kind"] for one in facts.places] == ["folder", "folder", "silent"]
