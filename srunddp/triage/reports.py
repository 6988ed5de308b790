"""What launchers say of how ranks ended: srun, torchrun and its likes, mpirun, Lightning,
DeepSpeed, and srunddp.
"""

import json
import re
import signal
from dataclasses import dataclass, field, replace
from typing import Any

from srunddp.triage.event import End, Event
from srunddp.triage.rank_labels import spread
from srunddp.triage.signatures import says, table

_SIGNALS = {signal.strsignal(number) or "": number for number in (4, 5, 6, 7, 8, 9, 11, 15)}
_HOST = re.compile(r"^\s*host\s+: (\S+)")


@dataclass
class Reports:
    """The launchers' reports in one file."""

    found: list[Event] = field(default_factory=list)
    apart: bool = False  # local ranks are not those of the world
    _ending: bool = False  # the launcher ends ranks itself
    _root: bool = False
    _host: str | None = None

    def feed(self, file: int, number: int, text: str) -> Event | None:
        """Read a line: a new report, which later lines may complete."""
        self._ending |= bool(says("ending", text))
        self._root |= "Root Cause (first observed failure)" in text
        if match := _HOST.match(text):
            self._host = match[1]
        if match := says("ended", text):
            self.found.append(self._new(file, number, text, match.groupdict()))
            return self.found[-1]
        if self.found and (match := says("ended-more", text)):
            self._complete(self.found[-1], match.groupdict())
        return None

    def _new(self, file: int, number: int, text: str, fields: dict[str, str | None]) -> Event:
        how = fields.get("how") or ""
        by_signal = fields.get("signal")
        by_signal = by_signal or next(
            (str(_SIGNALS[word]) for word in _SIGNALS if how.startswith(word)), None
        )
        code = -int(by_signal) if by_signal else int(fields.get("code") or 1)
        end = End(code, spread(fields.get("ranks") or ""), fields.get("local"), late=self._ending)
        event = Event(
            "unknown", "report", False, file, number, text, node=fields.get("node"), end=end
        )
        if end.local and end.ranks:  # torchrun's table, whose last is the first failure
            event.node = self._host
            end.root = self._root
            self.apart |= [int(end.local)] != end.ranks
            known = (each for each in self.found if self._root and each.end and not each.end.ranks)
            alike = [each for each in known if each.end and each.end.local == end.local]
            if len({each.text.rpartition("local_rank")[2] for each in alike}) == 1:
                for each in alike:
                    # Of one node alone.
                    each.end = replace(each.end or end, ranks=end.ranks)
                    each.node = self._host
                    _settle(each, each.end)
            self._root = False
        end.root |= bool(end.local and not end.ranks)
        _settle(event, end)
        return event

    def _complete(self, event: Event, more: dict[str, str | None]) -> None:
        if event.end:
            by_signal = more["signal"] or more["by"] or more["killed"]
            code = more["code"]
            if by_signal:
                event.end.code = -int(by_signal)
            elif code:
                event.end.code = int(code)
            if more["rank"]:
                event.end.ranks = [int(more["rank"])]
            _settle(event, event.end)


def _settle(event: Event, end: End) -> None:
    """What the report says by itself, as far as it is complete; who aborts has said why."""
    if end.signal in (0, signal.SIGABRT):
        event.cause = "unknown"
    else:
        event.cause = "rank-killed"
    event.rank = end.ranks[0] if end.ranks else None


def ours(file: int, number: int, text: str) -> Event | None:
    """srunddp's own line, where it speaks of an end, or a failure of its check."""
    if match := says("own-check", text):
        if match[1] and not match[2]:
            rank = int(match[1])
        else:
            rank = None
        return Event("check-failed", "primary", True, file, number, text, rank, match[3], ours=True)
    if match := says("own", text):
        who = match[1] or match[3]
        node = match[2] or match[4]
        event = Event(
            "unknown", "primary", False, file, number, text, int(who) if who else None, node
        )
        return _of_cause(match[5], event)
    return None


def _of_cause(cause: str, event: Event) -> Event:
    """srunddp's diagnosis: who it was is certain, and why as far as the words tell."""
    sign = table().read(cause) or table().read(event.text)
    event.ours = True
    if sign and sign.kind == "secondary":
        event.kind = "symptom"
    elif sign and sign.id != "script-error":
        event.cause = sign.id
        event.kind = "ending" if sign.kind == "ending" else "primary"
        event.sure = event.kind == "primary" and (sign.sure or "killed by" in cause)
    elif re.match(r"[\w.]+(?:: |$)", cause):
        event.cause = "script-error"
        event.sure = not says("vague", cause)
    elif sign:
        event.cause = sign.id
    return event


def of_json(kind: str, text: str, file: int) -> tuple[list[Event], int]:
    """The events of ``failure.json`` or of a check's ``preflight.JOB.json``, and how many ranks
    there were at least.

    A ValueError, TypeError or KeyError where it is none of srunddp's.
    """
    record = json.loads(text)
    if kind == "preflight":
        return [
            _of_finding(each, file) for each in record["findings"] if each["level"] == "FAIL"
        ], 0
    cause = str(record["cause"])
    rank = int(record["rank"])
    event = Event("unknown", "primary", False, file, 1, cause, rank, str(record["node"]))
    return [_of_cause(cause, event)], max(
        [rank, *(int(victim["rank"]) for victim in record["victims"])]
    ) + 1


def _of_finding(found: dict[str, Any], file: int) -> Event:
    text = (
        f"FAIL {found['check']}: {found['found']}; expected {found['expected']} -> {found['hint']}"
    )
    rank, node = (each[0] if len(each) == 1 else None for each in (found["ranks"], found["nodes"]))
    return Event("check-failed", "primary", True, file, 1, text, rank, node, ours=True)
