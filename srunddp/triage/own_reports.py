"""What srunddp itself says of an end: its lines, ``failure.json`` of ``--log-dir``, and the failures of a check."""

import json
import re

from srunddp.triage.event import Event, is_vague
from srunddp.triage.signatures import table

_ROOT_CAUSE = re.compile(
    r"srunddp: ranks? ([\d,-]+) on (\S+?)(?:, rank.*?)? (failed|lost): (.*?)(?: \(exit code (\d+)\))?$"
)
_ERROR = re.compile(r"srunddp: error: (?:rank (\d+) on (\S+): )?(.*)$")
_ENDED = re.compile(r"srunddp: (the launcher ended the run with SIG|stopped after step \d+ by SIG)")
_NOTE = re.compile(r"srunddp: (?:ended with it|note|ignored|passed over|refused )")
_FAIL = re.compile(r"FAIL  [\w-]+ +(?:(\S.*?)  +)?\S.*; expected .* -> (.+)$")
_WHERE = re.compile(r"(?:ranks? (\d+)(\S*) on )?([\w.-]+)$")


def ours(number: int, text: str, file: int) -> Event | None:
    """srunddp's own line, where it speaks of an end."""
    if match := _FAIL.match(text):
        where = _WHERE.match(match[1] or "")
        rank = int(where[1]) if where and where[1] and not where[2] else None
        return _of_check(file, number, text, match[2], rank, where[3] if where else None)
    if match := _ROOT_CAUSE.match(text):
        event = _of_cause(match[4] if match[3] == "failed" else text, file, number)
        event.rank, event.node, event.text = int(re.split(r"[,-]", match[1])[0]), match[2], text
        return event
    if _ENDED.match(text):
        return Event("cancelled", "ending", False, file, number, text, ours=True)
    if match := _ERROR.match(text):
        event = _of_cause(text.removeprefix("srunddp: error: "), file, number)
        event.cause = "unknown" if event.generic else event.cause
        event.text, event.kind = text, "primary"
        event.sure &= event.cause != "unknown"
        event.rank, event.node = int(match[1]) if match[1] else None, match[2]
        return event
    return Event("unknown", "noise", False, file, number, text) if _NOTE.match(text) else None


def _of_check(file: int, number: int, text: str, hint: str, rank: int | None, node: str | None) -> Event:
    return Event("check-failed", "primary", True, file, number, text, rank, node, ours=True, hint=hint)


def of_preflight(text: str, file: int) -> list[Event]:
    """``preflight.JOB.json`` of ``srunddp check``: its failures.

    Raises:
        ValueError, TypeError, KeyError: it is none of srunddp's.
    """
    failures = [each for each in json.loads(text)["findings"] if each["level"] == "FAIL"]
    return [
        _of_check(
            file,
            1,
            f"FAIL {each['check']}: {each['found']}; expected {each['expected']} -> {each['hint']}",
            str(each["hint"]),
            each["ranks"][0] if len(each["ranks"]) == 1 else None,
            each["nodes"][0] if len(each["nodes"]) == 1 else None,
        )
        for each in failures
    ]


def _of_cause(cause: str, file: int, number: int) -> Event:
    """The event of a diagnosis's cause: who it was is certain, and why as far as the words tell."""
    sign = table().read(cause) or table().read(f"srunddp: rank 0 on node failed: {cause}")
    event = Event("script-error", "primary", True, file, number, cause, ours=True, generic=True)
    if sign and sign.kind == "ending":
        event.cause, event.kind, event.sure = sign.id, "ending", False
    elif sign and sign.kind == "secondary":
        event.cause, event.kind, event.sure = "unknown", "symptom", False
    elif sign and sign.id != "script-error":
        event.cause, event.generic = sign.id, False
        event.sure = sign.sure or (sign.id == "rank-killed" and "killed" in cause)
    elif re.match(r"[\w.]+(?:: |$)", cause):
        event.sure = not is_vague(cause)
    elif not re.match(r"sys\.exit|the process ended", cause):
        event.cause, event.sure, event.generic = "unknown", False, False
    return event


def of_record(text: str, file: int) -> tuple[Event, int]:
    """``failure.json`` of ``--log-dir``: its diagnosis, and how many ranks there were at least.

    Raises:
        ValueError, TypeError, KeyError: it is none of srunddp's.
    """
    record = json.loads(text)
    cause, rank, node = str(record["cause"]), int(record["rank"]), str(record["node"])
    event = _of_cause(cause, file, 1)
    event.rank, event.node, event.text = rank, node, cause
    return event, max([rank, *(int(victim["rank"]) for victim in record["victims"])]) + 1
