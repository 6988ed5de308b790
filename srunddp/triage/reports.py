"""Reads the reports of launchers (srun, torchrun, mpirun, Lightning, DeepSpeed, srunddp) on how
ranks ended.
"""

import re
import signal
from dataclasses import dataclass, field, replace

from srunddp.triage.event import End, Event
from srunddp.triage.rank_labels import spread
from srunddp.triage.signatures import Kind, says, table

# srun names a signal in the words of the C library: "task 3: Segmentation fault (core dumped)".
_SIGNALS = {signal.strsignal(number) or "": number for number in (4, 5, 6, 7, 8, 9, 11, 15)}
# A row "  host      : node01" precedes the row with the rank in torchrun's table.
_HOST = re.compile(r"^\s*host\s+: (\S+)")


@dataclass
class Reports:
    """The launchers' reports in one file."""

    found: list[Event] = field(default_factory=list)
    apart: bool = False  # local ranks differ from the ranks of the world
    _ending: bool = False  # the launcher has begun to end ranks
    _root: bool = False
    _host: str | None = None

    def feed(self, file: int, number: int, text: str) -> Event | None:
        """Read a line.

        Args:
            file: The position of its log in the list of logs.
            number: The number of the line.
            text: The line without its label.

        Returns:
            A new report, which later lines may complete; None if the line starts none.
        """
        if says("ending", text):
            self._ending = True
        if "Root Cause (first observed failure)" in text:
            self._root = True
        if match := _HOST.match(text):
            self._host = match[1]
        if match := says("ended", text):
            self.found.append(self._new(file, number, text, match.groupdict()))
            return self.found[-1]
        if self.found and (match := says("ended-more", text)):
            self._complete(self.found[-1], match.groupdict())
        return None

    def _new(self, file: int, number: int, text: str, fields: dict[str, str | None]) -> Event:
        end = End(
            _code(fields),
            spread(fields.get("ranks") or ""),
            fields.get("local"),
            late=self._ending,
        )
        node = fields.get("node")
        event = Event("unknown", Kind.REPORT, False, file, number, text, node=node, end=end)
        if end.local and end.ranks:
            self._row_of_torchrun(event, end)
        if end.local and not end.ranks:
            end.root = True  # torchrun logs only the first failure before its table
        _settle(event, end)
        return event

    def _row_of_torchrun(self, event: Event, end: End) -> None:
        """Add a row of torchrun's table, which lists the first failure last."""
        event.node = self._host
        end.root = self._root
        # If rank and local rank differ, the rank is not on the first node, so there are several
        # nodes. Then a label that gives only a local rank could mean one rank on each node.
        if [int(end.local or 0)] != end.ranks:
            self.apart = True
        if self._root:
            self._complete_the_logged(end)
        self._root = False

    def _complete_the_logged(self, end: End) -> None:
        """Add the rank to torchrun's earlier log lines of this failure, which give only the local
        rank.

        If several agents logged the same local rank, leave them alone: they may be on different
        nodes.
        """
        alike = [
            each
            for each in self.found
            if each.end and not each.end.ranks and each.end.local == end.local
        ]
        agents = {each.text.rpartition("local_rank")[2] for each in alike}
        if len(agents) != 1:
            return
        for each in alike:
            each.end = replace(each.end or end, ranks=end.ranks)
            each.node = self._host
            _settle(each, each.end)

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


def _code(fields: dict[str, str | None]) -> int:
    """Return the exit code in a report's words; for a signal, minus its number."""
    if by_signal := fields.get("signal"):
        return -int(by_signal)
    how = fields.get("how") or ""
    for words, number in _SIGNALS.items():
        if how.startswith(words):
            return -number
    return int(fields.get("code") or 1)


def _settle(event: Event, end: End) -> None:
    """Set the event's cause and rank from what is known of the end so far."""
    # A process that aborts has said why before, so SIGABRT is no cause.
    if end.signal in (0, signal.SIGABRT):
        event.cause = "unknown"
    else:
        event.cause = "rank-killed"
    event.rank = end.ranks[0] if end.ranks else None


def ours(file: int, number: int, text: str) -> Event | None:
    """Read a line written by srunddp.

    Args:
        file: The position of its log in the list of logs.
        number: The number of the line.
        text: The line without its label.

    Returns:
        None unless the line is about an end or a failed check.
    """
    if match := says("own-check", text):
        first, others, node = match.groups()
        rank = int(first) if first and not others else None
        return failed_check(file, number, text, rank, node, reason=text)
    if match := says("own", text):
        who = match[1] or match[3]
        rank = int(who) if who else None
        node = match[2] or match[4]
        event = Event("unknown", Kind.PRIMARY, False, file, number, text, rank, node)
        return of_cause(match[5], text, event)
    return None


def failed_check(
    file: int, number: int, text: str, rank: int | None, node: str | None, *, reason: str
) -> Event:
    """Return the event of a check that ``srunddp check`` calls failed.

    Args:
        file: The position of its log in the list of logs.
        number: The number of the line.
        text: The line.
        rank: The only rank that it is about; None for several.
        node: The only node that it is about; None for several.
        reason: The finding, without the name of the check if that is known separately.
    """
    return Event(
        "check-failed",
        Kind.PRIMARY,
        True,
        file,
        number,
        text,
        rank,
        node,
        ours=True,
        reason=reason,
    )


def add_note(event: Event, note: str) -> None:
    """Add a note of srunddp's summary to its root cause: a rank that had left may be at fault.

    Args:
        event: The root cause in srunddp's words; it is changed.
        note: The note, without ``srunddp: ``.
    """
    match = says("own-note", note)
    if match and event.rank is None and event.cause == "rank-stalled":
        event.rank = int(match[1])
        event.node = match[2]
        event.cause = "collective-mismatch"
        event.note = note


def of_cause(cause: str, said: str, event: Event) -> Event:
    """Add srunddp's own diagnosis to an event. The rank is certain; the cause is read from the
    words.

    Args:
        cause: The reason in srunddp's words, without rank and exit code.
        said: The line that srunddp prints about it.
        event: The event of a line or of a file; it is changed.
    """
    event.reason = cause
    sign = table().read(cause) or table().read(said)
    event.ours = True
    if sign and sign.kind is Kind.SECONDARY:
        event.kind = Kind.SYMPTOM
    elif sign and sign.id != "script-error":
        event.cause = sign.id
        if sign.kind is Kind.ENDING:
            event.kind = Kind.ENDING
            event.sure = False
        else:
            event.kind = Kind.PRIMARY
            event.sure = sign.sure or "killed by" in cause
    # An exception of the script, such as "ValueError: bad" or "project.errors.BadConfig".
    elif re.match(r"[\w.]+(?:: |$)", cause):
        event.cause = "script-error"
        event.sure = not says("vague", cause)
    elif sign:
        event.cause = sign.id
    return event
