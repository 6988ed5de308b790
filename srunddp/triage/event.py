"""Defines an event, which is a statement in a log about a failure or about the end of a rank or of
the run. Compares events to find the first one.
"""

import functools
from collections.abc import Iterable
from dataclasses import dataclass, field

from srunddp.triage.signatures import Kind, Signature, says, table, weight
from srunddp.triage.tracebacks import PythonException

MARGIN = 5.0  # seconds by which the clocks of two nodes may differ
MANY_LINES = 10  # lines after an event that show that it did not end the rank
_ENDED_BY = (1, 2, 9, 15)  # signals by which launchers and people end a rank: HUP, INT, KILL, TERM
# Signals N for which an exit code 128 + N counts as the signal; other codes above 128 are the
# script's own.
_SHELL_SIGNALS = (4, 6, 7, 9, 11, 15)


@dataclass
class End:
    """How ranks ended, according to their launcher.

    Attributes:
        code: The exit code; for a signal, minus its number.
        ranks: The ranks; empty if the launcher names none.
        local: The local rank, in digits; None if the launcher does not give it.
        root: Whether the launcher says that this was the first failure.
        late: Whether the launcher had already begun to end ranks before this report.
    """

    code: int
    ranks: list[int] = field(default_factory=list)
    local: str | None = None
    root: bool = False
    late: bool = False

    @property
    def signal(self) -> int:
        """The number of the signal that ended the ranks; 0 if none did. Exit code 137, by which a
        shell reports signal 9, counts as 9.
        """
        if self.code < 0:
            return -self.code
        if self.code - 128 in _SHELL_SIGNALS:
            return self.code - 128
        return 0

    @property
    def is_victim(self) -> bool:
        """Whether the launcher itself ended the rank, or the rank ended well."""
        if self.code == 0:
            return True
        return self.late and not self.root and self.signal in _ENDED_BY


@dataclass
class Event:
    """A statement in a log about a failure, or about the end of a rank or of the run.

    Attributes:
        cause: An id from signatures.yaml.
        kind: The part that the line can play in the end of the run.
        sure: Whether the line can have no other meaning than ``cause``.
        file: The position of its log in the list of logs.
        number: The number of the line.
        text: The line without its label.
        rank: The rank that the line is about, mostly the rank that wrote it; None if unknown.
        node: The node that the line is about, mostly the node of the rank; None if unknown.
        time: The line's time, see :func:`srunddp.triage.logs.time_of`.
        since: The time of the last earlier line in the log that has a time; None if none has.
        raised: The exception; None if the event is no exception.
        end: What a launcher reports about the end of ranks; None if the event is no such report.
        ours: Whether srunddp itself wrote the line.
        reason: The cause in srunddp's words; empty if the line is not srunddp's.
        note: A line of srunddp's summary that names the rank at fault; empty if there is none.
        handled: Whether one of the next lines says that the error was handled.
        progress: How many more steps the same rank reported afterwards.
        overall: How many more steps all ranks of the log reported afterwards.
        lines: How many lines without a sign of an end the same rank wrote afterwards.
        rule: The name of the rule that set the event aside; empty if none did.
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
    reason: str = ""
    note: str = ""
    handled: bool = False
    progress: int = 0
    overall: int = 0
    lines: int = 0
    rule: str = ""


def is_same(own: Event, other: Event) -> bool:
    """Tell whether two events are one failure, reported both by srunddp and by a log, or by two
    files.

    Args:
        own: An event that srunddp has reported. Without a reason, it is the same as no other event.
        other: Any event.
    """
    if not own.reason:
        return False
    if own.cause == "check-failed":
        return _is_end_of(own.reason, other.reason) or _is_end_of(other.reason, own.reason)
    if other.rank not in (None, own.rank):
        return False
    if own.cause == other.cause and own.cause not in ("unknown", "script-error"):
        return True
    if other.raised:
        texts = [text for _, text in other.raised.chain]
    else:
        texts = [other.reason]
    # Compare only the beginnings: srunddp writes a message of several lines on one line, but the
    # event of a traceback has only the message's first line.
    return any(
        text and (own.reason.startswith(text) or text.startswith(own.reason)) for text in texts
    )


def _is_end_of(text: str, longer: str) -> bool:
    return bool(text) and longer.endswith(text)


def earliest(events: Iterable[Event]) -> Event:
    """Find the first of several events, by their times or else by their files and lines."""

    # Compare pair by pair instead of sorting by a key: some events have a time, others only a
    # position, so there is no total order.
    def earlier(chosen: Event, event: Event) -> Event:
        return event if before(event, chosen) else chosen

    return functools.reduce(earlier, events)


def before(one: Event, other: Event) -> bool:
    """Tell whether one event came before the other, as far as their positions and times show."""
    if one.file == other.file:
        return _begin(one) < _begin(other)
    time = _last_known_time(one)
    other_time = _last_known_time(other)
    if time is not None and other_time is not None and time != other_time:
        return time < other_time
    return one.file < other.file


def surely_before(one: Event, other: Event) -> bool:
    """Tell whether one event surely came first: by its line in the same file, or in different files
    by a time that is more than :data:`MARGIN` earlier.
    """
    if one.file == other.file:
        return one.number < other.number
    return one.time is not None and other.time is not None and one.time + MARGIN < other.time


def _begin(event: Event) -> int:
    # The tracebacks of two ranks may be interleaved: the one that begins first counts as the first.
    return event.raised.began if event.raised else event.number


def _last_known_time(event: Event) -> float | None:
    return event.time if event.time is not None else event.since


def of_exception(raised: PythonException, file: int) -> Event:
    """Make the event of a traceback.

    Args:
        raised: The exception, with the exceptions that followed from it.
        file: The position of its log in the list of logs.

    Returns:
        An event whose line is that of the exception in the chain that says most about the cause.
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
    # Ranks do not talk to each other by Python's own socket modules, but HTTP clients use them: the
    # other side of the connection is a server, not a rank.
    is_of_sockets = raised.below.startswith(("socket.py\n", "ssl.py\n"))
    if is_of_sockets and event.cause == "unknown" and event.kind is Kind.SECONDARY:
        event.cause = "network-unreachable"
        event.kind = Kind.PRIMARY
    # In a chain, it may be an exception other than the recognised one that ended the script.
    if len(raised.chain) > 1:
        event.sure = False
    return event


def _most_telling(raised: PythonException) -> tuple[int, str, Signature | None]:
    """Find the exception in a chain whose sign says most about the cause.

    Returns:
        The number and the text of its line, and its sign. If no exception has a sign: those of the
            first exception, and None.
    """
    best: tuple[int, str, Signature | None] = (*raised.chain[0], None)
    for number, text in raised.chain:
        sign = table().read(text)
        if not sign or sign.kind is Kind.NOISE:
            continue
        # If two signs weigh the same, keep the earlier exception, because the later one followed
        # from it.
        if best[2] is None or weight(sign) < weight(best[2]):
            best = (number, text, sign)
    return best
