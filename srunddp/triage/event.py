"""One thing that a log says of an end, and which of several came first, by their clocks or their places."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from srunddp.triage.tracebacks import Raised

MARGIN = 5.0  # seconds by which clocks of nodes may differ


@dataclass
class Event:
    """One thing that was said of an end.

    Attributes:
        cause: an id of the table; kind: as there; sure: whether it can only mean that.
        file: its place among the logs; number: of the line; text: without label.
        time: of the line, and since: of the last line before it that told one.
        late: reported at the end, whenever it was; generic: an exception, without a sign of its own.
        weak: only warned of, quoted, handled or survived: it can explain another failure, but is none.
        progress: how many further steps the same stream told of afterwards.
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
    late: bool = False
    generic: bool = False
    raised: Raised | None = None
    ours: bool = False
    weak: bool = False
    progress: int = 0


def earliest(events: Iterable[Event]) -> Event:
    """The first by their times where two have one, else by file and place."""
    chosen, *others = events
    for event in others:
        if before(event, chosen):
            chosen = event
    return chosen


def before(one: Event, other: Event) -> bool:
    """As well as that can be told."""
    if one.file == other.file:
        if one.time is not None and other.time is not None and one.time != other.time:
            return one.time < other.time
        return one.number < other.number
    ours, theirs = (event.time if event.time is not None else event.since for event in (one, other))
    if ours is not None and theirs is not None and ours != theirs:
        return ours < theirs
    unlike = (one.rank is None, one.rank or 0, one.file), (other.rank is None, other.rank or 0, other.file)
    return unlike[0] < unlike[1]


def surely_before(one: Event, other: Event, margin: float = 0.0) -> bool:
    """By more than clocks of nodes differ, or in one file."""
    if one.time is not None and other.time is not None and (one.file != other.file or margin):
        return one.time + max(margin, MARGIN if one.file != other.file else 0.0) < other.time
    return one.file == other.file and one.number < other.number
