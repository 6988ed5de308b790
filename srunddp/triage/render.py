"""Writes the diagnosis as text for a terminal, and as JSON."""

from collections.abc import Sequence
from typing import Any

from srunddp.errors import one_line
from srunddp.triage.collect import Evidence
from srunddp.triage.diagnosis import Diagnosis
from srunddp.triage.event import Event
from srunddp.triage.logs import GAP
from srunddp.triage.rules import SENTENCES
from srunddp.triage.signatures import table
from srunddp.util.hostlist import group_by_key, ranges

_LONGEST = 200
_SPEAKERS = 16
_HOW = {
    "certain": "first failure",
    "likely": "first failure, likely",
    "unknown": "cause unknown: the first end",
}
_MOST = 100  # events that followed or were set aside, in JSON


def lines(diagnosis: Diagnosis, evidence: Evidence) -> list[str]:
    """Return the diagnosis as lines for a terminal: the first failure with its cause and a hint,
    what followed from it, what was set aside, the ranks without output, and notes.
    """
    said = ["nothing failed"]
    if diagnosis.cause is not None:
        cause = f"cause: {table().causes[diagnosis.cause].cause}"
        said = [_head(diagnosis, evidence), cause, f"hint: {_hint(diagnosis)}"]
        said += [
            *(_last_lines(evidence) if diagnosis.certainty == "unknown" else ()),
            *_followed(diagnosis),
        ]
    said += [
        *_set_aside(diagnosis),
        *_world(diagnosis),
        *(f"note: {note}" for note in evidence.notes),
    ]
    return [one_line(line) for line in said]


def _head(diagnosis: Diagnosis, evidence: Evidence) -> str:
    first = diagnosis.first
    how = _HOW[diagnosis.certainty]
    who = diagnosis.node or ""
    if not first:
        if diagnosis.certainty == "unknown":
            return diagnosis.why
        return f"{how}: {diagnosis.why} ({diagnosis.cause})"
    if diagnosis.rank is not None:
        who = f"rank {diagnosis.rank}{f' on {who}' if who else ''}"
    if diagnosis.frame:
        frame = f", in {diagnosis.frame}"
    else:
        frame = ""
    if diagnosis.why:
        why = f"; {_short(diagnosis.why)}"
    else:
        why = ""
    if first.number >= GAP:
        line = f" (line {first.number - GAP + 1} of its end)"
    else:
        line = f":{first.number}"
    who = who or ("a rank" if diagnosis.victim else "")
    if diagnosis.victim:
        teller = f", told by {f'rank {first.rank}' if first.rank is not None else 'a peer'}"
    else:
        teller = ""
    where = f"{f'{who}{teller}, ' if who else ''}{evidence.names[first.file]}{line}"
    return f"{how}: {where}: {_short(first.text)}{frame}{why} ({diagnosis.cause})"


def _hint(diagnosis: Diagnosis) -> str:
    """Return the hint that the failed check has given, or that signatures.yaml has for the cause;
    with the node's name in place of ``NODE``, if it is known.
    """
    if diagnosis.first and diagnosis.cause == "check-failed":
        return diagnosis.first.text.rpartition(" -> ")[2]
    hint = table().causes[diagnosis.cause or ""].hint
    return hint.replace("NODE", diagnosis.node or "NODE")


def _short(text: str) -> str:
    text = text.strip()
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}…"


def _followed(diagnosis: Diagnosis) -> list[str]:
    """Return one line for each cause that followed from the failure, with its ranks."""
    first = diagnosis.first
    # Leave out events in which the same rank reports the same cause again: they are no consequence.
    # But keep all failed checks, because each is another finding.
    groups = group_by_key(
        (event.cause, event)
        for event in diagnosis.followed
        if event.cause == "check-failed"
        or (event.rank, event.cause) != (first and first.rank, diagnosis.cause)
    )
    return [
        f"then what followed: {_whose(events)} ({what})"
        for what, events in list(groups.items())[:6]
    ]


def _set_aside(diagnosis: Diagnosis) -> list[str]:
    """Return one line for each rule that set events aside."""
    groups = group_by_key((event.rule, event) for event in diagnosis.set_aside)
    return [
        f"set aside: {_whose(events)} ({rule}: {SENTENCES[rule]})"
        for rule, events in groups.items()
    ]


def _whose(events: Sequence[Event]) -> str:
    """Return a text with the ranks of all events, the line of the first event, and how many more
    events there are.
    """
    ranks = sorted({event.rank for event in events if event.rank is not None})
    if ranks:
        who = f"rank{'s' if len(ranks) > 1 else ''} {_ranges(ranks)}: "
    else:
        who = ""
    return (
        f"{who}{_short(events[0].text)}{f' and {len(events) - 1} more' if len(events) > 1 else ''}"
    )


def _ranges(ranks: Sequence[int]) -> str:
    """Return ranks as a text such as ``0-1, 3``, with at most 20 ranges."""
    shown = ranges(ranks).split(",")
    return f"{', '.join(shown[:20])}{', …' if len(shown) > 20 else ''}"


def _last_lines(evidence: Evidence) -> list[str]:
    shown = list(evidence.last.items())[:_SPEAKERS]
    said = [f"last line of {who}: {_short(text)}" for who, text in shown]
    left = len(evidence.last) - len(shown)
    return [*said, *([f"and of {left} others"] if left else [])]


def _world(diagnosis: Diagnosis) -> list[str]:
    if diagnosis.world_size is None and not diagnosis.seen:
        return []
    if diagnosis.world_size is not None:
        expected = f"{diagnosis.world_size} ranks expected"
    else:
        expected = "world size unknown"
    if diagnosis.silent:
        silent = f"; without output: {_ranges(diagnosis.silent)}"
    else:
        silent = ""
    if diagnosis.seen:
        spoke = f", {len(diagnosis.seen)} with output{silent}"
    else:
        spoke = "; no line of output names its rank"
    return [f"world: {expected}{spoke}"]


def record(diagnosis: Diagnosis, evidence: Evidence) -> dict[str, Any]:
    """Return the diagnosis as the object that ``--json`` prints."""

    def origin(event: Event) -> dict[str, Any]:
        return {
            "rank": event.rank,
            "file": evidence.names[event.file],
            "line": event.number,
            "text": event.text,
        }

    first = diagnosis.first
    known = table().causes.get(diagnosis.cause or "")
    return {
        "cause": diagnosis.cause,
        "certainty": diagnosis.certainty,
        **(origin(first) if first else dict.fromkeys(("file", "line", "text"))),
        "rank": diagnosis.rank,
        "node": diagnosis.node,
        "why": diagnosis.why or None,
        "frame": diagnosis.frame or None,
        "explanation": known.cause if known else None,
        "hint": _hint(diagnosis) if known else None,
        "world_size": diagnosis.world_size,
        "ranks_seen": diagnosis.seen,
        "silent": diagnosis.silent,
        "followed": [{"cause": each.cause, **origin(each)} for each in diagnosis.followed[:_MOST]],
        "set_aside": [{"rule": each.rule, **origin(each)} for each in diagnosis.set_aside[:_MOST]],
        "notes": evidence.notes,
    }
