"""What srunddp said of a failure, on standard error and in failure.json."""

from __future__ import annotations

import re
from dataclasses import dataclass

_END = r"(?P<cause>.*) \(exit code (?P<code>\d+)\)$"
_FAILED = re.compile(r"^srunddp: rank (?P<ranks>\d+) on (?P<node>\S+) failed: " + _END)
_LOST = re.compile(
    r"^srunddp: rank(?:s|\(s\))? (?P<ranks>[\d,\- ]+) on (?P<node>\S+) lost: " + _END
)
_VICTIMS = re.compile(r"^srunddp: ended with it: (.*)$", re.MULTILINE)
# Loosely, so that one that is out of form counts too.
_ANY = re.compile(r"^srunddp: rank.* on .* (?:failed|lost): ")


@dataclass(frozen=True)
class Verdict:
    """One verdict line: the culprits, their node, why, and the exit code of all; its text where it
    is out of form.
    """

    ranks: tuple[int, ...]
    node: str
    cause: str
    code: int
    lost: bool = False


def verdicts(errors: str) -> list[Verdict]:
    """All of a run's; a good run has none, and one that failed has exactly one."""
    return [_parse(line) for line in errors.splitlines() if _ANY.match(line)]


def _parse(line: str) -> Verdict:
    for pattern, lost in ((_FAILED, False), (_LOST, True)):
        if found := pattern.match(line):
            return Verdict(
                ranks(found["ranks"]), found["node"], found["cause"], int(found["code"]), lost
            )
    return Verdict((), "", f"out of form: {line}", -1)


def victims(errors: str) -> str:
    """What follows `ended with it:`; empty where that line is missing."""
    found = _VICTIMS.search(errors)
    if found:
        return found[1]
    return ""


def ranks(text: str) -> tuple[int, ...]:
    """The ranks of `2-3,5`."""
    ends = [part.strip().partition("-") for part in text.split(",")]
    return tuple(
        rank for first, _, last in ends for rank in range(int(first), int(last or first) + 1)
    )
