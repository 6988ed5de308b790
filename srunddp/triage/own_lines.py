"""srunddp's own lines, which know who was first: its verdict, its errors, and ``failure.json``."""

from __future__ import annotations

import json
import re

from srunddp.triage.event import DOUBT, VAGUE, Event
from srunddp.triage.signatures import table

_VERDICT = re.compile(
    r"srunddp: ranks? ([\d,-]+) on (\S+?)(?:, rank.*?)? (failed|lost): (.*?)(?: \(exit code (\d+)\))?$"
)
_ERROR = re.compile(r"srunddp: error: (.*)$")
_ENDED = re.compile(r"srunddp: (the launcher ended the run with SIG|stopped after step \d+ by SIG)")
_NOTE = re.compile(r"srunddp: (?:ended with it|note|passed over|refused )")


def ours(number: int, text: str, file: int) -> Event | None:
    """srunddp's own line, where it speaks of an end."""
    if match := _VERDICT.match(text):
        event = _judged(match[4] if match[3] == "failed" else text, file, number)
        event.rank, event.node, event.text = int(re.split(r"[,-]", match[1])[0]), match[2], text
        return event
    if _ENDED.match(text):
        return Event("cancelled", "ending", False, file, number, text, ours=True)
    if match := _ERROR.match(text):
        event = _judged(match[1], file, number)
        event.cause = "unknown" if event.generic else event.cause
        event.text, event.kind = text, "primary"
        event.sure &= event.cause != "unknown"
        if found := re.match(r"rank (\d+) on (\S+)", match[1]):
            event.rank, event.node = int(found[1]), found[2]
        return event
    if _NOTE.match(text):
        return Event("unknown", "noise", False, file, number, text)
    return None


def _judged(cause: str, file: int, number: int) -> Event:
    """The event of a verdict's cause: who it was is certain, and why as far as the words tell."""
    sign = table().read(cause) or table().read(f"srunddp: rank 0 on node failed: {cause}")
    event = Event("script-error", "primary", True, file, number, cause, ours=True, generic=True)
    if sign and sign.kind == "ending":
        event.cause, event.kind, event.sure = sign.id, "ending", False
    elif sign and sign.kind == "secondary":
        event.cause, event.kind, event.sure = "unknown", "symptom", False
    elif sign and sign.id != "script-error":
        event.cause, event.generic = sign.id, False
        event.sure = sign.sure or (sign.id == "rank-killed" and "killed" in cause)
    elif match := re.match(r"([\w.]+)(?:: |$)", cause):
        event.sure = match[1].rpartition(".")[2] not in VAGUE and not DOUBT.search(cause)
    elif not re.match(r"sys\.exit|the process ended", cause):
        event.cause, event.sure, event.generic = "unknown", False, False
    return event


def of_record(text: str, file: int) -> tuple[Event, int]:
    """``failure.json`` of ``--log-dir``: its verdict, and how many ranks there were at least.

    Raises:
        ValueError, TypeError, KeyError: it is none of srunddp's.
    """
    told = json.loads(text)
    cause, rank, node = str(told["cause"]), int(told["rank"]), str(told["node"])
    event = _judged(cause, file, 1)
    event.rank, event.node, event.text = rank, node, cause
    return event, max([rank, *(int(victim["rank"]) for victim in told["victims"])]) + 1
