"""The verdict as people read it, and for machines."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from srunddp.errors import one_line
from srunddp.triage.collect import Evidence
from srunddp.triage.diagnose import Diagnosis
from srunddp.triage.event import Event
from srunddp.triage.logs import GAP
from srunddp.triage.signatures import table
from srunddp.util.hostlist import ranges

_LONGEST = 200
_SPEAKERS = 16


def lines(verdict: Diagnosis, story: Evidence) -> list[str]:
    """For a terminal."""
    if verdict.cause is None:
        said = ["nothing failed"]
    else:
        known = table().causes[verdict.cause]
        said = [_head(verdict, story), f"cause: {known.cause}", f"hint: {known.hint}"]
        if verdict.certainty == "unknown":
            said += _last_words(story)
        said += _followed(verdict)
    return [one_line(line) for line in [*said, *_world(verdict), *(f"note: {note}" for note in story.notes)]]


def _head(verdict: Diagnosis, story: Evidence) -> str:
    if verdict.certainty == "unknown" or verdict.cause == "unknown":
        who = f" The first end: {_who(verdict.rank, verdict.node)}." if verdict.rank is not None else ""
        return f"cause unknown: {verdict.why or 'nothing here tells'}.{who}"
    how = "first failure" if verdict.certainty == "certain" else "first failure, likely"
    first = verdict.first
    if not first:
        return f"{how}: {verdict.why} ({verdict.cause})"
    who = _who(verdict.rank, verdict.node)
    frame = f", in {first.raised.frame}" if first.raised and first.raised.frame else ""
    why = f"; {verdict.why}" if verdict.why else ""
    return (
        f"{how}: {f'{who}, ' if who else ''}{place(first, story)}: {_short(first.text)}{frame}{why} ({verdict.cause})"
    )


def _who(rank: int | None, node: str | None) -> str:
    where = f" on {node}" if node else ""
    return f"rank {rank}{where}" if rank is not None else node or ""


def place(event: Event, story: Evidence) -> str:
    """File and line."""
    if event.number >= GAP:
        return f"{story.names[event.file]} (line {event.number - GAP + 1} of its end)"
    return f"{story.names[event.file]}:{event.number}" if event.number else story.names[event.file]


def _short(text: str) -> str:
    text = text.strip()
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}…"


def _followed(verdict: Diagnosis) -> list[str]:
    """One line for each kind of what followed, with its ranks."""
    groups: dict[str, list[Event]] = {}
    for event in verdict.followed:
        if verdict.first and event.rank == verdict.first.rank and event.cause == verdict.cause:
            continue
        groups.setdefault(event.cause if event.kind != "secondary" else "echoes of it", []).append(event)
    said = []
    for what, events in list(groups.items())[:6]:
        ranks = sorted({event.rank for event in events if event.rank is not None})
        who = f"{ranks_named(ranks)}: " if ranks else ""
        said.append(f"then what followed: {who}{_short(events[0].text)} ({what})")
    return said


def ranks_named(ranks: Sequence[int]) -> str:
    """``ranks 0-1, 3``."""
    shown = ranges(ranks).split(",")
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(shown[:20])}{', …' if len(shown) > 20 else ''}"


def _last_words(story: Evidence) -> list[str]:
    shown = list(story.last.items())[:_SPEAKERS]
    said = [f"last line of {who}: {_short(texts[-1])}" for who, texts in shown]
    left = len(story.last) - len(shown)
    return [*said, *([f"and of {left} others"] if left else [])]


def _world(verdict: Diagnosis) -> list[str]:
    if verdict.world_size is None and not verdict.seen:
        return []
    expected = f"{verdict.world_size} ranks expected" if verdict.world_size is not None else "world size not told"
    silent = f"; silent: {ranks_named(verdict.silent).partition(' ')[2]}" if verdict.silent else ""
    spoke = f", {len(verdict.seen)} spoke{silent}" if verdict.seen else "; no line tells whose it is"
    return [f"world: {expected}{spoke}"]


def record(verdict: Diagnosis, story: Evidence) -> dict[str, Any]:
    """For ``--json``."""
    first = verdict.first
    known = table().causes.get(verdict.cause or "")
    return {
        "cause": verdict.cause,
        "certainty": verdict.certainty,
        "rank": verdict.rank,
        "node": verdict.node,
        "file": story.names[first.file] if first else None,
        "line": first.number if first else None,
        "text": first.text if first else None,
        "frame": first.raised.frame if first and first.raised else None,
        "explanation": known.cause if known else None,
        "hint": known.hint if known else None,
        "world_size": verdict.world_size,
        "ranks_seen": verdict.seen,
        "silent": verdict.silent,
        "followed": [
            {
                "rank": each.rank,
                "cause": each.cause,
                "file": story.names[each.file],
                "line": each.number,
                "text": each.text,
            }
            for each in verdict.followed[:100]
        ],
        "notes": story.notes,
    }
