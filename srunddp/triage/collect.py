"""From the lines of logs to what speaks of an end: signs, exceptions, launchers' reports, srunddp's own diagnosis."""

import itertools
import re
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from srunddp.triage.event import Event, of_exception, of_report
from srunddp.triage.launcher_reports import Reports
from srunddp.triage.logs import Log, time_of
from srunddp.triage.own_reports import of_preflight, of_record, ours
from srunddp.triage.progress import FINISHED, HANDLED, SUCCEEDED, Progress, is_below_error
from srunddp.triage.rank_labels import ObservedRanks, RankLabels, node_of_name, ranks_of_names, stated_rank
from srunddp.triage.signatures import table
from srunddp.triage.tracebacks import PythonException, Tracebacks

_SNIFFED = 400
_KEPT = 40  # of one sign of one rank in one file
_LAST = 3
GOES_ON = 3  # steps after something: it did not end the run
_MESSAGE = 15  # lines that an exception's message may have
_OF_PEERS = ("RuntimeError", "torch.distributed.Dist", "OSError")
LAUNCHER = re.compile(r"\bsrun: |slurmstepd\S*: |srunddp: |elastic|mpirun|prterun|user-direction|^=")
_NEAR = 3  # lines after an error in which whoever caught it says so
_RESTART = re.compile(
    r"[Rr]estarting worker group|will restart worker group|[Rr]equeue(?:d|ing)\b|"
    r"[Rr]esum(?:ed|ing) (?:from|training|at)|[Rr]estart(?:ed|ing)? (?:the )?(?:job|run|training|ranks)"
)
# A script's own word of a failure, which no sign knows.
_FAILING = re.compile(
    r"\b(?:errors?(?![ :=]{0,3}\d)|fatal|fail(?:ed|ure)|abort(?:ed|ing)?|cannot|can't|could not|unable|invalid|"
    r"not finite|non-finite|diverged|exceeded|mismatch|giving up|exiting|stopping|quitting|no more|missing|not found|"
    r"too (?:many|few|large|small)|wrong|illegal|unexpected|unsupported|must|denied|damaged|incomplete)\b",
    re.IGNORECASE,
)


@dataclass
class Evidence:
    """All that the logs tell.

    Attributes:
        names: of the logs; notes: what could not be read.
        report: the first end of a rank that a launcher reports; last: the last line of each who spoke.
        finished: the line, by file, that tells of a good end; well: those that tell it of the run itself.
        restarted: the last line, by file, that tells of a new attempt.
        steps: how many steps each file tells of; lines: how many there were.
        speaker: who spoke last.
        moved: when a step was told of last, where lines tell the time.
        cut: the last line of a log without its end.
    """

    names: list[str]
    observed: ObservedRanks = field(default_factory=ObservedRanks)
    events: list[Event] = field(default_factory=list)
    report: Event | None = None
    last: dict[str, str] = field(default_factory=dict)
    finished: dict[int, int] = field(default_factory=dict)
    well: set[int] = field(default_factory=set)
    steps: dict[int, int] = field(default_factory=dict)
    restarted: dict[int, int] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    lines: int = 0
    speaker: str = ""
    cut: str = ""
    moved: float | None = None


def collect(logs: Sequence[Log]) -> Evidence:
    """Read all logs, each once."""
    evidence = Evidence([log.name for log in logs])
    ranks = ranks_of_names(evidence.names)
    for index, log in enumerate(logs):
        if match := re.fullmatch(r"(failure|preflight)(?:\.\w+)?\.json", log.path.name):
            _read_json(match[1], log, index, evidence)
            continue
        _File(index, log, evidence, ranks.get(log.name)).read()
        evidence.notes += log.notes
    evidence.report = _first_report(evidence.events)
    return evidence


def _first_report(events: Sequence[Event]) -> Event | None:
    """The one that a launcher calls first, or the first of all that it did not end itself."""
    own = [event for event in events if event.report and not event.report.is_victim and event.progress < GOES_ON]
    return min(own, key=lambda event: (not (event.report and event.report.root), event.rank is None), default=None)


def _read_json(kind: str, log: Log, index: int, evidence: Evidence) -> None:
    text = "\n".join(line for _, line in log.lines())
    try:
        if kind == "preflight":
            evidence.events += of_preflight(text, index)
            return
        event, size = of_record(text, index)
    except (ValueError, TypeError, KeyError):
        evidence.notes.append(f"{log.name} is none of srunddp's")
        return
    evidence.events.append(event)
    evidence.observed.add_world_size(size)


class _File:
    """One log, as it is read."""

    def __init__(self, index: int, log: Log, evidence: Evidence, rank: int | None) -> None:
        self._index, self._log, self._evidence, self._rank = index, log, evidence, rank
        self._node = node_of_name(log.name)
        self._streams: dict[int | None, tuple[Tracebacks, Progress]] = {}
        self._places: dict[tuple[object, ...], list[int]] = {}
        self._since: float | None = None
        self._own: list[Event] = []
        self._counted: list[tuple[Progress, int, int]] = []
        self._all, self._restarted = Progress(), 0
        self._reports, self._reported = Reports(), list[int]()

    def read(self) -> None:
        lines = self._log.lines()
        begin = list(itertools.islice(lines, _SNIFFED))
        labels, tail = RankLabels.sniff([text for _, text in begin]), deque[tuple[int, str]](maxlen=12)
        for number, line in itertools.chain(begin, lines):
            text, rank, node = labels.strip(line)
            self._line(number, text, self._rank if rank is None else rank, node or self._node)
            tail.append((number, text))
        self._end(tail)
        for event, (progress, before, all_before) in zip(self._own, self._counted, strict=True):
            event.progress = progress.count - before
            if event.ours or event.number <= self._restarted + _LAST:  # rank 0 may be the only one that tells of steps
                event.progress = max(event.progress, self._all.count - all_before)
        for report, before in zip(self._reports.found, self._reported, strict=True):
            self._own.append(event := of_report(report, self._index))
            event.progress = self._all.count - before if report.number <= self._restarted + _LAST else 0
        self._evidence.events += self._own

    def _end(self, tail: Sequence[tuple[int, str]]) -> None:
        evidence = self._evidence
        evidence.steps[self._index], evidence.restarted[self._index] = self._all.count, self._restarted
        if good := [number for number, text in tail if FINISHED.search(text)]:
            evidence.finished[self._index] = good[-1]
            evidence.well |= {self._index} if any(SUCCEEDED.search(text) for _, text in tail) else set()
        if self._log.cut and tail:
            evidence.cut = tail[-1][1]

    def _line(self, number: int, text: str, rank: int | None, node: str | None) -> None:
        evidence = self._evidence
        whose = rank if rank is not None else stated_rank(text)
        self._observe(number, text, rank, whose, node)
        time = time_of(text)
        self._since = time if time is not None else self._since
        stream, progress = self._streams.setdefault(rank, (Tracebacks(), Progress()))
        known, outer, raised = len(stream.done), stream.done[-1:], stream.raised
        inside = stream.feed(number, text)
        self._reports.feed(number, text)
        self._reported += [self._all.count] * (len(self._reports.found) - len(self._reported))
        if not inside:
            progress.feed(text)
            before = self._all.count
            self._all.feed(text)
            if self._all.count > before and self._since is not None:
                evidence.moved = max(self._since, evidence.moved or 0.0)
        event: Event | None = None
        if stream.raised > raised:
            event = of_exception(stream.done[-1], self._index)
            self._drop(outer if len(stream.done) == known else [])
        elif not inside:
            event = self._plain(number, text)
            self._excuse(number, text, rank)
            event = None if event and self._adopted(event, rank) else event
        if event:
            event.node = event.node or node
            self._add(event, whose if event.rank is None else event.rank, time, progress)

    def _observe(self, number: int, text: str, rank: int | None, whose: int | None, node: str | None) -> None:
        evidence = self._evidence
        evidence.lines += 1
        evidence.observed.add_rank(whose, node)
        evidence.observed.add_line(text, self._index if self._rank is None else "ranks", rank, self._all.count)
        if _RESTART.search(text):
            self._restarted = number
        evidence.speaker = f"rank {rank}" if rank is not None else self._log.name
        evidence.last[evidence.speaker] = text

    def _drop(self, raised: list[PythonException]) -> None:
        """An exception was handed on from another process, or has another one above it."""
        for each in self._own:
            if raised and each.raised is raised[0]:
                each.kind = "noise"

    def _adopted(self, event: Event, rank: int | None) -> bool:
        """Whether the line is of the message of the exception before it, which itself said nothing of its cause."""
        last = next((each for each in reversed(self._own) if each.raised), None)
        if not last or not last.generic or last.rank != rank or LAUNCHER.search(event.text):
            return False
        if event.kind == "secondary" and event.number <= last.number + _NEAR and last.text.startswith(_OF_PEERS):
            last.cause, last.kind = "unknown", "secondary"
        elif event.kind == "primary" and event.number <= last.number + _MESSAGE:
            last.cause = event.cause
        else:
            return False
        last.generic = last.sure = False
        return True

    def _excuse(self, number: int, text: str, rank: int | None) -> None:
        """Whoever caught the error just before says so."""
        last = self._own[-1] if self._own else None
        if last and last.kind != "ending" and last.rank == rank and number <= last.number + _NEAR:
            last.handled |= bool(HANDLED.search(text)) and not LAUNCHER.search(text)

    def _plain(self, number: int, text: str) -> Event | None:
        if text.startswith(("srunddp: ", "FAIL  ")) and (event := ours(number, text, self._index)):
            return event
        sign = table().read(text)
        if sign and sign.kind != "noise":
            return Event(sign.id, sign.kind, sign.sure, self._index, number, text, late=sign.late)
        if not sign and not LAUNCHER.search(text) and _FAILING.search(text) and not is_below_error(text):
            return Event("unknown", "word", False, self._index, number, text)
        return None

    def _add(self, event: Event, rank: int | None, time: float | None, progress: Progress) -> None:
        event.rank, event.time, event.since = rank, time, self._since
        places = self._places.setdefault((event.cause, event.kind, rank, event.generic), [])
        if len(places) < _KEPT:
            places.append(len(self._own))
        # Of too many the last is replaced: it may be the one that mattered.
        at = slice(places[-1], places[-1] + 1)
        self._own[at], self._counted[at] = [event], [(progress, progress.count, self._all.count)]
