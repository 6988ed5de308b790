"""The project's folder, the script, the environment and named paths: there, and the same, on every rank."""

from __future__ import annotations

import os
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NoAnswer
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from srunddp.check.comparison import by_node, finding_about, minority
from srunddp.check.finding import Check, CheckContext, Finding, Observation, Severity
from srunddp.util.filesystem import Place, content, look, why_not_writable
from srunddp.util.timeouts import call_in_daemon_thread

T = TypeVar("T")

NAME = "paths"
_PATIENCE = 5.0  # seconds, for all of them together
PROJECT, SCRIPT, ENVIRONMENT = "proj", "script", "env"
_TITLES = {PROJECT: "the working directory ", SCRIPT: "the script ", ENVIRONMENT: "the environment "}
_SHARE = "put it where all nodes see it, copy it there, or name another"


@dataclass(frozen=True)
class PathFacts:
    """Of one rank: what is at each path, the same ones in the same order on all ranks."""

    places: list[Place]


Ranks = Sequence[Observation[PathFacts]]


def collect(subject: CheckContext) -> PathFacts:
    """This rank's. Contents are read by one rank of each node, and rank 0 alone writes a file."""
    reads, writes = subject.environment.local_rank == 0, subject.environment.rank == 0
    written = call_in_daemon_thread(partial(why_not_writable, ".")) if writes else None
    # A copy of the project is without what was left out, and what was written in the folder since.
    unread = {ENVIRONMENT, PROJECT} if subject.staged else {ENVIRONMENT}
    asked = [_ask(role, path, reads and role not in unread) for role, path in _roles(subject)]
    end = time.monotonic() + _PATIENCE
    places = []
    for silent, looked, held in asked:
        place = _answer(looked, end, silent)
        if held and place["kind"] != "silent":
            place["content"] = _answer(held, end, "")
        if subject.staged:
            place["path"] = subject.staged.shared(place["path"])
        places.append(place)
    if written and places[0]["kind"] == "folder" and not places[0]["error"]:
        why = _answer(written, end, "no answer")
        places[0]["error"] = f"cannot be written to: {why}" if why else ""
    return PathFacts(places)


def _roles(subject: CheckContext) -> list[tuple[str, str]]:
    known = [(PROJECT, "."), *([(SCRIPT, subject.script)] if subject.script else []), (ENVIRONMENT, sys.prefix)]
    names = Counter(os.path.basename(path.rstrip("/")) for path in subject.paths)
    for path in subject.paths:
        name = os.path.basename(path.rstrip("/"))
        known.append((name if names[name] == 1 and name not in (*_TITLES, "") else path, path))
    return known


def _ask(role: str, path: str, reads: bool) -> tuple[Place, Future[Place], Future[str] | None]:
    """What to say where nothing answers, what is there, and what is in it."""
    silent = Place(role=role, path=path, kind="silent", error="", system="", identity="", content="")
    held = call_in_daemon_thread(partial(content, path, whole=role == SCRIPT)) if reads else None
    return silent, call_in_daemon_thread(partial(look, role, path, write=role == PROJECT)), held


def _answer(asked: Future[T], end: float, default: T) -> T:
    try:
        return asked.result(max(0.0, end - time.monotonic()))
    except NoAnswer:
        return default


def judge(seen: Ranks) -> Iterator[Finding]:
    """What is not there or cannot be read stops the job, and so does a script that is another one."""
    main = min(seen, key=lambda one: one.rank).node
    for index in range(min(len(one.facts.places) for one in seen)):
        there = []
        for one in seen:
            level, found, hint = _wrong(one.facts.places[index], one.node == main)
            if found:
                yield finding_about([one], level, NAME, (found, _expected(one.facts.places[index]), hint))
            if _is_there(one.facts.places[index]):
                there.append(one)
        for level, found, expected, hint, who in _others(there, index):
            yield finding_about(who, level, NAME, (found, expected, hint), ranks=False)


def _is_there(place: Place) -> bool:
    return place["kind"] not in ("missing", "silent", "broken")


def _named(place: Place) -> str:
    return f"{_TITLES.get(place['role'], '')}{place['path']}"


def _expected(place: Place) -> str:
    return "a folder that can be written to" if _is_there(place) and place["role"] == PROJECT else "on every rank"


def _wrong(place: Place, main: bool) -> tuple[Severity, str, str]:
    """What is wrong with it, on rank 0's node or another, and the hint; empty where nothing is."""
    match place["kind"]:
        case "missing":
            return Severity.FAIL, f"{_named(place)} is not there", _SHARE
        case "silent":
            hint = "see whether its file server runs (df, dmesg), or leave the node out"
            return Severity.FAIL, f"{_named(place)} does not answer within {_PATIENCE:g} s", hint
        case "broken":
            return Severity.FAIL, f"{_named(place)}: {place['error']}", "have the node's mount looked at"
    if place["error"].startswith("cannot be written"):
        hint = "start in a folder of your own with room in it: logs and checkpoints go there"
        level = Severity.FAIL if main else Severity.WARN
        return level, f"{_named(place)} {place['error']}", hint
    hint = "correct its permissions" if place["error"] else ""
    return Severity.FAIL, f"{_named(place)} {place['error']}" if hint else "", hint


def _others(seen: Ranks, index: int) -> Iterator[tuple[Severity, str, str, str, Ranks]]:
    """Who has something else at a path: level, what was found, what was expected, the hint and the ranks."""
    if not seen:
        return
    role = seen[0].facts.places[index]["role"]

    def place(one: Observation[PathFacts]) -> Place:
        return one.facts.places[index]

    if role == PROJECT:
        usual, others = minority(seen, lambda one: place(one)["path"])
        for path, who in others.items():
            hint = "put the folder where all nodes see it: Slurm starts in /tmp where it is missing"
            yield Severity.WARN, f"the working directory is {path}", f"{usual}, as on most ranks", hint, who
        seen = [one for one in seen if place(one)["path"] == usual]
    usual, others = minority(seen, lambda one: place(one)["kind"])
    for kind, who in others.items():
        yield Severity.FAIL, f"{_named(place(who[0]))} is a {kind}", f"a {usual}, as on most ranks", _SHARE, who
    first = {place(one)["identity"]: place(one)["content"] for one in reversed(seen) if place(one)["content"]}
    read = [one for one in seen if place(one)["content"] and place(one)["kind"] == usual]
    if not read:
        return
    # A log that grows between two ranks' looks is no difference: they are known to see one folder.
    _, others = minority(read, lambda one: first[place(one)["identity"]])
    for who in others.values():
        level = Severity.FAIL if role == SCRIPT else Severity.WARN
        found = f"{_named(place(who[0]))} differs from that of most nodes"
        expected = "the same names and sizes" if usual == "folder" else "the same content"
        yield level, found, expected, _SHARE, who


def node_lines(seen: Ranks) -> list[str]:
    """A line for each node: ``node01 proj=ok script=ok env=ok data=missing``."""
    states: dict[tuple[str, int], str] = {}
    for index in range(min(len(one.facts.places) for one in seen)):
        there = [one for one in seen if _is_there(one.facts.places[index])]
        states |= {(one.node, index): "differs" for *_, who in _others(there, index) for one in who}
        states |= {(one.node, index): word for one in seen if (word := _word(one.facts.places[index]))}
    roles = [place["role"] for place in seen[0].facts.places]
    return [
        " ".join((node, *(f"{role}={states.get((node, index), 'ok')}" for index, role in enumerate(roles))))
        for node in by_node(seen)
    ]


def _word(place: Place) -> str:
    if not _is_there(place):
        return place["kind"]
    return place["error"] and ("unwritable" if place["error"].startswith("cannot be written") else "unreadable")


def summary(seen: Ranks) -> str:
    """The file systems, as rank 0 has them."""
    first = min(seen, key=lambda one: one.rank).facts.places
    return ", ".join(f"{place['role']} on {place['system'] or 'nothing'}" for place in first)


CHECK = Check(NAME, PathFacts, collect, judge, summary, node_lines)
