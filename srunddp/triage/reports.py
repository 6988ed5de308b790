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
    """The launchers' reports in one file.

    Attributes:
        found: The events of the reports, in the order of the file.
        apart: Whether a report shows that local ranks differ from the ranks of the world.
    """

    found: list[Event] = field(default_factory=list)
    apart: bool = False
    _ending: bool = False  # whether the launcher has begun to end ranks
    _root: bool = False  # whether the next row of torchrun's table is about the first failure
    _host: str | None = None  # the host in the current row of torchrun's table

    def feed(self, file: int, number: int, text: str) -> Event | None:
        """Read a line, which may begin a report or complete the last one.

        Args:
            file: The position of its log in the list of logs.
            number: The number of the line.
            text: The line without its label.

        Returns:
            The event of a report that begins with the line, which later lines may complete; None if
                no report begins.
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
        """Complete the event of a row in torchrun's table, which lists the first failure last."""
        event.node = self._host
        end.root = self._root
        # If the rank differs from the local rank, it is not on the first node, so there are several
        # nodes. Then a label with only a local rank could mean a rank of any node.
        if [int(end.local or 0)] != end.ranks:
            self.apart = True
        if self._root:
            self._complete_the_logged(end)
        self._root = False

    def _complete_the_logged(self, end: End) -> None:
        """Add the rank to the events of torchrun's earlier log lines about the first failure, which
        give only the local rank.

        If several agents logged the same local rank, the events stay as they are: the agents may be
        on different nodes.

        Args:
            end: The end in the row of torchrun's table, which has the rank and the local rank.
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
    """Return the exit code in a report; for a signal, minus its number; 1 if it gives neither.

    Args:
        fields: The named groups of the pattern that has matched the report.
    """
    if by_signal := fields.get("signal"):
        return -int(by_signal)
    how = fields.get("how") or ""
    for words, number in _SIGNALS.items():
        if how.startswith(words):
            return -number
    return int(fields.get("code") or 1)


def _settle(event: Event, end: End) -> None:
    """Set the event's cause and rank from what is known of the end so far."""
    # SIGABRT is no cause: a process that aborts has written the reason before.
    if end.signal in (0, signal.SIGABRT):
        event.cause = "unknown"
    else:
        event.cause = "rank-killed"
    event.rank = end.ranks[0] if end.ranks else None


def ours(file: int, number: int, text: str) -> Event | None:
    """Make the event of a line that srunddp has written.

    Args:
        file: The position of its log in the list of logs.
        number: The number of the line.
        text: The line without its label.

    Returns:
        None unless the line reports the root cause or a failed check.
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
        rank: The only rank that the finding is about; None for several ranks.
        node: The only node that the finding is about; None for several nodes.
        reason: The finding in srunddp's words; it may lack the name of the check.
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
    """Complete srunddp's root cause by a note of its summary. A note counts if the root cause is a
    stall of no certain rank, and the note names a rank that had left before, which is then at
    fault. Other notes are ignored.

    Args:
        event: The event of the root cause; it is changed.
        note: The note, without ``srunddp: ``.
    """
    match = says("own-note", note)
    if match and event.rank is None and event.cause == "rank-stalled":
        event.rank = int(match[1])
        event.node = match[2]
        event.cause = "collective-mismatch"
        event.note = note


def of_cause(cause: str, said: str, event: Event) -> Event:
    """Set the cause, the kind and the certainty of an event by what srunddp says about a failure.

    Args:
        cause: The reason in srunddp's words, without rank and exit code.
        said: The line that srunddp prints about the failure.
        event: The event of a line or of a file, which has the rank; it is changed.

    Returns:
        The event.
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
