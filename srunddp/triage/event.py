"""One thing that a log says of an end, and which of several came first, by their clocks or their
places.
"""

import functools
from collections.abc import Iterable
from dataclasses import dataclass, field

from srunddp.triage.signatures import Kind, Signature, says, table, weight
from srunddp.triage.tracebacks import PythonException

MARGIN = 5.0  # seconds by which clocks of nodes may differ
_ENDED_BY = (1, 2, 9, 15)  # signals by which launchers and people end a rank
# Signals that a shell's exit code 128 + N is taken for; other codes above 128 are the script's own.
_SHELL_SIGNALS = (4, 6, 7, 9, 11, 15)


@dataclass
class End:
    """How ranks ended, as their launcher says.

    Attributes:
        code: the exit code; minus the signal's number where a signal ended them.
        ranks: whose, as far as it is told.
        local: the local rank.
        root: the launcher says itself that this was the first.
        late: it had begun to end ranks before.
    """

    code: int
    ranks: list[int] = field(default_factory=list)
    local: str | None = None
    root: bool = False
    late: bool = False

    @property
    def signal(self) -> int:
        """The number of the signal that ended it, or 0. A shell makes signal 9 exit code 137."""
        if self.code < 0:
            return -self.code
        if self.code - 128 in _SHELL_SIGNALS:
            return self.code - 128
        return 0

    @property
    def is_victim(self) -> bool:
        """Whether the launcher itself ended it, or it ended well."""
        if self.code == 0:
            return True
        return self.late and not self.root and self.signal in _ENDED_BY


@dataclass
class Event:
    """One thing that was said of an end.

    Attributes:
        cause: an id of the table.
        kind: what it can be in the run's end.
        sure: whether it can only mean that.
        file: its place among the logs.
        number: of the line.
        text: of the line, without its label.
        rank: whose line it is, as far as that is known.
        node: where that rank ran, as far as that is known.
        time: of the line, see :func:`srunddp.triage.logs.time_of`.
        since: of the last line before it that told a time.
        raised: the exception that it is.
        end: what a launcher says of a rank's end.
        ours: it is srunddp's own word.
        handled: a line near it says that somebody handled it.
        progress: how many further steps the same rank told of afterwards.
        overall: how many further steps all ranks of the file told of.
        lines: how many lines without a sign of an end the same rank wrote afterwards.
        rule: the name of the rule that set it aside; empty where none did.
    """

    cause: str
    kind: Kind
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
    """Find the first of several events, by times where two have one, else by file and place."""

    # No sort by a key: some events have a time and others only a place, so that there is no one
    # order.
    def earlier(chosen: Event, event: Event) -> Event:
        return event if before(event, chosen) else chosen

    return functools.reduce(earlier, events)


def before(one: Event, other: Event) -> bool:
    """Tell whether one event came before the other, as well as that can be told."""
    if one.file == other.file:
        return _begin(one) < _begin(other)
    time = _last_known_time(one)
    other_time = _last_known_time(other)
    if time is not None and other_time is not None and time != other_time:
        return time < other_time
    return one.file < other.file


def surely_before(one: Event, other: Event) -> bool:
    """Tell whether one event came before the other in one file, or by more than clocks differ."""
    if one.file == other.file:
        return one.number < other.number
    return one.time is not None and other.time is not None and one.time + MARGIN < other.time


def _begin(event: Event) -> int:
    # Two tracebacks of two ranks may be mixed: the one that begins first is the first.
    return event.raised.began if event.raised else event.number


def _last_known_time(event: Event) -> float | None:
    return event.time if event.time is not None else event.since


def of_exception(raised: PythonException, file: int) -> Event:
    """Make the event of a traceback.

    Args:
        raised: the exception, with those that came of it.
        file: the place of its log among the logs.

    Returns:
        An event that is told by the exception of the chain that says most of the cause.
    """
    number, text, sign = _most_telling(raised)
    event = Event("script-error", Kind.PRIMARY, False, file, number, text, raised=raised)
    if says("wrapper", raised.chain[0][1]):
        event.cause = "unknown"
        event.kind = Kind.SECONDARY
    elif sign and sign.id != "script-error":
        event.cause = sign.id
        event.kind = sign.kind
        event.sure = sign.sure
    else:
        event.sure = raised.inner and not says("vague", text)
    # Python's own sockets are those of HTTP clients: a server's end, and no rank's.
    is_of_sockets = raised.below.startswith(("socket.py\n", "ssl.py\n"))
    if is_of_sockets and event.cause == "unknown" and event.kind is Kind.SECONDARY:
        event.cause = "network-unreachable"
        event.kind = Kind.PRIMARY
    # Of several exceptions in a row the one that counts may not be the one that is known.
    if len(raised.chain) > 1:
        event.sure = False
    return event


def _most_telling(raised: PythonException) -> tuple[int, str, Signature | None]:
    """Line number, text and sign of the weightiest exception of a chain, else of its first."""
    best: tuple[int, str, Signature | None] = (*raised.chain[0], None)
    for number, text in raised.chain:
        sign = table().read(text)
        if not sign or sign.kind is Kind.NOISE:
            continue
        # Of equals the earlier exception stays, as the later ones came of it.
        if best[2] is None or weight(sign) < weight(best[2]):
            best = (number, text, sign)
    return best
