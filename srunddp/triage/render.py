"""The diagnosis as people read it, and for machines."""

from collections.abc import Sequence
from typing import Any

from srunddp.errors import one_line
from srunddp.triage.collect import Evidence
from srunddp.triage.diagnose import Diagnosis
from srunddp.triage.event import Event
from srunddp.triage.logs import GAP
from srunddp.triage.signatures import table
from srunddp.util.hostlist import group_by_key, ranges

_LONGEST = 200
_SPEAKERS = 16


def lines(diagnosis: Diagnosis, evidence: Evidence) -> list[str]:
    """For a terminal."""
    if diagnosis.cause is None:
        said = ["nothing failed"]
    else:
        known = table().causes[diagnosis.cause]
        said = [_head(diagnosis, evidence), f"cause: {known.cause}", f"hint: {known.hint}"]
        if diagnosis.certainty == "unknown":
            said += _last_lines(evidence)
        said += _followed(diagnosis)
    return [one_line(line) for line in [*said, *_world(diagnosis), *(f"note: {note}" for note in evidence.notes)]]


def _head(diagnosis: Diagnosis, evidence: Evidence) -> str:
    who = diagnosis.node or ""
    if diagnosis.rank is not None:
        who = f"rank {diagnosis.rank}{f' on {who}' if who else ''}"
    if diagnosis.certainty == "unknown" or diagnosis.cause == "unknown":
        end = f" The first end: {who}." if diagnosis.rank is not None else ""
        return f"cause unknown: {diagnosis.why or 'nothing here tells'}.{end}"
    how = "first failure" if diagnosis.certainty == "certain" else "first failure, likely"
    first = diagnosis.first
    if not first:
        return f"{how}: {diagnosis.why} ({diagnosis.cause})"
    frame = f", in {first.raised.frame}" if first.raised and first.raised.frame else ""
    why = f"; {diagnosis.why}" if diagnosis.why else ""
    line = f" (line {first.number - GAP + 1} of its end)" if first.number >= GAP else f":{first.number}"
    where = f"{f'{who}, ' if who else ''}{evidence.names[first.file]}{line}"
    return f"{how}: {where}: {_short(first.text)}{frame}{why} ({diagnosis.cause})"


def _short(text: str) -> str:
    text = text.strip()
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}…"


def _followed(diagnosis: Diagnosis) -> list[str]:
    """One line for each kind of what followed, with its ranks."""
    groups = group_by_key(
        ("echoes of it" if event.kind == "secondary" else event.cause, event)
        for event in diagnosis.followed
        if not (diagnosis.first and event.rank == diagnosis.first.rank and event.cause == diagnosis.cause)
    )
    said = []
    for what, events in list(groups.items())[:6]:
        ranks = sorted({event.rank for event in events if event.rank is not None})
        who = f"rank{'s' if len(ranks) > 1 else ''} {_ranges(ranks)}: " if ranks else ""
        said.append(f"then what followed: {who}{_short(events[0].text)} ({what})")
    return said


def _ranges(ranks: Sequence[int]) -> str:
    """``0-1, 3``; of many the first."""
    shown = ranges(ranks).split(",")
    return f"{', '.join(shown[:20])}{', …' if len(shown) > 20 else ''}"


def _last_lines(evidence: Evidence) -> list[str]:
    shown = list(evidence.last.items())[:_SPEAKERS]
    said = [f"last line of {who}: {_short(texts[-1])}" for who, texts in shown]
    left = len(evidence.last) - len(shown)
    return [*said, *([f"and of {left} others"] if left else [])]


def _world(diagnosis: Diagnosis) -> list[str]:
    if diagnosis.world_size is None and not diagnosis.seen:
        return []
    expected = f"{diagnosis.world_size} ranks expected" if diagnosis.world_size is not None else "world size not told"
    silent = f"; without output: {_ranges(diagnosis.silent)}" if diagnosis.silent else ""
    spoke = f", {len(diagnosis.seen)} with output{silent}" if diagnosis.seen else "; no line tells whose it is"
    return [f"world: {expected}{spoke}"]


def _origin(event: Event, evidence: Evidence) -> dict[str, Any]:
    return {"file": evidence.names[event.file], "line": event.number, "text": event.text}


def record(diagnosis: Diagnosis, evidence: Evidence) -> dict[str, Any]:
    """For ``--json``."""
    first = diagnosis.first
    known = table().causes.get(diagnosis.cause or "")
    return {
        "cause": diagnosis.cause,
        "certainty": diagnosis.certainty,
        "rank": diagnosis.rank,
        "node": diagnosis.node,
        **(_origin(first, evidence) if first else dict.fromkeys(("file", "line", "text"))),
        "frame": first.raised.frame if first and first.raised else None,
        "explanation": known.cause if known else None,
        "hint": known.hint if known else None,
        "world_size": diagnosis.world_size,
        "ranks_seen": diagnosis.seen,
        "silent": diagnosis.silent,
        "followed": [
            {"rank": each.rank, "cause": each.cause, **_origin(each, evidence)} for each in diagnosis.followed[:100]
        ],
        "notes": evidence.notes,
    }
