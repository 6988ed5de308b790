"""One thing that a log says of an end, and which of several came first, by their clocks or their places."""

import functools
import re
from collections.abc import Iterable
from dataclasses import dataclass

from srunddp.triage.launcher_reports import Report
from srunddp.triage.progress import is_quoted
from srunddp.triage.signatures import table, weight
from srunddp.triage.tracebacks import PythonException

MARGIN = 5.0  # seconds by which clocks of nodes may differ
# Exceptions of launchers: what they are about is told elsewhere.
_WRAPPERS = ("ChildFailedError", "CalledProcessError", "ProcessRaisedException", "ProcessExitedException", "SystemExit")
_VAGUE = re.compile(
    r"(?:RuntimeError|Exception|OSError|ImportError|SystemError|ConnectionError|TimeoutError|CompilerFailed)\b|"
    r"rank|world|SLURM|MASTER|NCCL|gloo|CUDA|GPU|device|\bport\b|socket|host|address|checkpoint|numpy|version|memory|"
    r"timed? ?out|connect|librar|driver|file|path|director|environ|node",
    re.IGNORECASE,
)


@dataclass
class Event:
    """One thing that was said of an end.

    Attributes:
        cause: an id of the table; kind: as there, or ``word``, a line of a failure that no sign knows, or ``report``, a
            launcher's line of how a rank ended; sure: whether it can only mean that.
        file: its place among the logs; number: of the line; text: without label.
        time: of the line, and since: of the last line before it that told one.
        late: reported at the end, whenever it was; generic: an exception, without a sign of its own.
        handled: a line near it says so; progress: how many further steps the same stream told of afterwards.
        hint: its own, where it has one; rule: that set it aside.
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
    raised: PythonException | None = None
    report: Report | None = None
    ours: bool = False
    handled: bool = False
    progress: int = 0
    hint: str = ""
    rule: str = ""

    @property
    def ranks(self) -> set[int | None]:
        """All whose end a launcher's line tells, or the one."""
        return set(self.report.ranks) if self.report else {self.rank}

    @property
    def is_ignored(self) -> bool:
        """Of a thread, or ignored, or caught by somebody who says that it goes on."""
        return bool(self.raised and self.raised.aside)

    @property
    def is_quoted(self) -> bool:
        """Of a configuration or the like, and no failure of this run."""
        return not self.raised and not self.report and is_quoted(self.text)

    @property
    def began(self) -> int:
        """The line where it begins: a traceback's first."""
        return self.raised.began if self.raised else self.number


def earliest(events: Iterable[Event]) -> Event:
    """The first by their times where two have one, else by file and place."""
    return functools.reduce(lambda chosen, event: event if before(event, chosen) else chosen, events)


def before(one: Event, other: Event) -> bool:
    """As well as that can be told."""
    if one.file == other.file:
        if one.time is not None and other.time is not None and one.time != other.time:
            return one.time < other.time
        return one.began < other.began
    ours, theirs = (event.time if event.time is not None else event.since for event in (one, other))
    if ours is not None and theirs is not None and ours != theirs:
        return ours < theirs
    return (one.rank is None, one.rank or 0, one.file) < (other.rank is None, other.rank or 0, other.file)


def surely_before(one: Event, other: Event) -> bool:
    """By more than clocks of nodes differ, or in one file."""
    if one.file == other.file:
        return one.number < other.number
    return one.time is not None and other.time is not None and one.time + MARGIN < other.time


def is_vague(text: str) -> bool:
    """Whether an exception's line may be about something that is not the script's own."""
    return bool(_VAGUE.search(text))


def of_exception(raised: PythonException, file: int) -> Event:
    """The event of a traceback, told by that exception of its chain that says most of the cause."""
    signs = [table().read(text) for _, text in raised.chain]
    known = [(weight(sign), place) for place, sign in enumerate(signs) if sign and sign.kind != "noise"]
    at = min(known)[1] if known else len(raised.chain) - 1 if raised.explained else 0
    number, text = raised.chain[at]
    event = Event("script-error", "primary", True, file, number, text, generic=True, raised=raised)
    wrapper = raised.chain[0][1].partition(":")[0].rpartition(".")[2] in _WRAPPERS
    sign = signs[at] if known else None
    if wrapper and not (sign and sign.id == "rank-killed"):
        event.kind, event.sure, event.cause = "secondary", False, "unknown"
    elif sign and sign.id != "script-error":
        event.cause, event.kind, event.sure, event.late = sign.id, sign.kind, sign.sure, sign.late
        event.generic = False
    else:
        event.sure = raised.inner and not is_vague(text)
    event.sure &= len(raised.chain) == 1
    return event


def of_report(report: Report, file: int) -> Event:
    """What the end that a launcher reports says by itself."""
    cause = "rank-killed" if report.signal not in (0, 6) else "module-missing" if report.code == 127 else "unknown"
    rank = report.ranks[0] if report.ranks else None
    return Event(cause, "report", False, file, report.number, report.text, rank, report.node, report=report)
