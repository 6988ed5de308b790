"""One thing that a log says of an end, and which of several came first, by their clocks or their
places.
"""

import functools
from collections.abc import Iterable
from dataclasses import dataclass, field

from srunddp.triage.signatures import says, table, weight
from srunddp.triage.tracebacks import PythonException

MARGIN = 5.0  # seconds by which clocks of nodes may differ
_ASKED = (1, 2, 9, 15)  # signals by which launchers and people end a rank
_CRASHED = (4, 6, 7, 9, 11, 15)


@dataclass
class End:
    """How ranks ended, as their launcher says.

    Attributes:
        code: the exit code; minus the signal's number where a signal ended them.
        ranks: whose, as far as it is told; local: the local rank.
        root: the launcher says itself that this was the first; late: it had begun to end ranks
            before.
    """

    code: int
    ranks: list[int] = field(default_factory=list)
    local: str | None = None
    root: bool = False
    late: bool = False

    @property
    def signal(self) -> int:
        """That ended it, or 0; a shell turns signal 9 into the exit code 137."""
        if self.code < 0:
            return -self.code
        return self.code - 128 if self.code - 128 in _CRASHED else 0

    @property
    def is_victim(self) -> bool:
        """Ended by the launcher itself, or not at all."""
        return self.code == 0 or (self.late and not self.root and self.signal in _ASKED)


@dataclass
class Event:
    """One thing that was said of an end.

    Attributes:
        cause: an id of the table; kind: as there, or ``word``, a line of a failure that no sign
            knows, or ``report``, a launcher's line of how a rank ended; sure: whether it can only
            mean that.
        file: its place among the logs; number: of the line; text: without label.
        time: of the line, and since: of the last line before it that told one.
        raised: the exception that it is; end: what the launcher says; ours: srunddp's own word.
        handled: a line near it says so; progress: how many further steps the same rank told of
            afterwards.
        overall: how many all ranks of the file did; lines: how many without a sign of an end the
            same rank wrote.
        rule: that set it aside.
    """

    cause: str
    kind: str
    sure: bool
    file: int
    number: int
    text: str
    rank: int | None = None
    node: str | None = None
    time: float | None = None
    since: float | None = None
    raised: PythonException | None = None
    end: End | None = None
    ours: bool = False
    handled: bool = False
    progress: int = 0
    overall: int = 0
    lines: int = 0
    rule: str = ""


def earliest(events: Iterable[Event]) -> Event:
    """The first by their times where two have one, else by file and place."""
    return functools.reduce(
        lambda chosen, event: event if before(event, chosen) else chosen, events
    )


def before(one: Event, other: Event) -> bool:
    """As well as that can be told."""
    if one.file == other.file:  # a traceback by its first line
        first, second = (
            event.raised.began if event.raised else event.number for event in (one, other)
        )
        return first < second
    ours, theirs = (event.time if event.time is not None else event.since for event in (one, other))
    if ours is not None and theirs is not None and ours != theirs:
        return ours < theirs
    return one.file < other.file


def surely_before(one: Event, other: Event) -> bool:
    """By more than clocks of nodes differ, or in one file."""
    if one.file == other.file:
        return one.number < other.number
    return one.time is not None and other.time is not None and one.time + MARGIN < other.time


def of_exception(raised: PythonException, file: int) -> Event:
    """The event of a traceback, told by that exception of its chain that says most of the cause."""
    signs = [table().read(text) for _, text in raised.chain]
    known = [
        (weight(sign), place) for place, sign in enumerate(signs) if sign and sign.kind != "noise"
    ]
    at = min(known)[1] if known else 0
    (number, text) = raised.chain[at]
    sign = signs[at] if known else None
    sure = raised.inner and not says("vague", text)
    event = Event("script-error", "primary", sure, file, number, text, raised=raised)
    if says("wrapper", raised.chain[0][1]):
        event.kind = "secondary"
        event.sure = False
        event.cause = "unknown"
    elif sign and sign.id != "script-error":
        event.cause = sign.id
        event.kind = sign.kind
        event.sure = sign.sure
    # Python's own sockets are those of HTTP clients: a server's end, and no rank's.
    if (event.cause, event.kind) == ("unknown", "secondary") and raised.below.startswith(
        ("socket.py\n", "ssl.py\n")
    ):
        event.cause = "network-unreachable"
        event.kind = "primary"
    event.sure &= len(raised.chain) == 1
    return event
