"""From the lines of logs to what speaks of an end: signs, exceptions, launchers' reports, srunddp's own diagnosis."""

import itertools
import re
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from srunddp.triage.event import Event, of_exception
from srunddp.triage.logs import Log, time_of
from srunddp.triage.rank_labels import ObservedRanks, RankLabels, node_of_name, ranks_of_names, stated_rank
from srunddp.triage.reports import Reports, of_json, ours
from srunddp.triage.signatures import says, table
from srunddp.triage.tracebacks import Tracebacks

_SNIFFED = 400
_KEPT = 40  # of one sign of one rank in one file
_LAST = 3
GOES_ON = 3  # steps after something: it did not end the run
_NEAR = 3  # lines after an error that may be of its message, or in which whoever caught it says so
_STEP = re.compile(
    r"\b(?:step|iter(?:ation)?|epoch|batch|it)s?\b\W{0,4}(\d+)|\b(\d+)/\d+ \[|Epoch \[?(\d+)", re.IGNORECASE
)
_RECENT = 256  # ranks of one log tell of the same step


@dataclass
class Progress:
    """How many steps one stream of lines has told of; ``count`` is of unlike ones."""

    count: int = 0
    _recent: dict[tuple[str, ...], None] = field(default_factory=dict)

    def feed(self, text: str) -> None:
        """Read a line."""
        step = tuple(match[0] for match in _STEP.finditer(text[:400]))
        if step and step not in self._recent:
            self._recent[step] = None
            self.count += 1
            if len(self._recent) > _RECENT:
                del self._recent[next(iter(self._recent))]


@dataclass
class Evidence:
    """All that the logs tell.

    Attributes:
        names: of the logs; notes: what could not be read.
        report: the first end of a rank that a launcher reports.
        last: the last line of each who spoke, the last speaker's last.
        finished: the line, by file, that tells of a good end; well: those that tell it of the run itself.
        steps: how many steps each file tells of.
        met: srunddp's ranks found one another; cut: a log's last line has no end.
    """

    names: list[str]
    observed: ObservedRanks = field(default_factory=ObservedRanks)
    events: list[Event] = field(default_factory=list)
    report: Event | None = None
    last: dict[str, str] = field(default_factory=dict)
    finished: dict[int, int] = field(default_factory=dict)
    well: set[int] = field(default_factory=set)
    steps: dict[int, int] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    met: bool = False
    cut: bool = False


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
    own = [each for each in evidence.events if each.end and not each.end.is_victim and each.progress < GOES_ON]
    evidence.report = min(own, key=lambda event: not (event.end and event.end.root), default=None)
    return evidence


def _read_json(kind: str, log: Log, index: int, evidence: Evidence) -> None:
    try:
        events, size = of_json(kind, "\n".join(line for _, line in log.lines()), index)
    except (ValueError, TypeError, KeyError):
        evidence.notes.append(f"{log.name} is none of srunddp's")
        return
    evidence.events += events
    evidence.observed.add_world_size(size)


@dataclass
class _Stream:
    """The lines of one rank in one file."""

    tracebacks: Tracebacks = field(default_factory=Tracebacks)
    progress: Progress = field(default_factory=Progress)
    raised: Event | None = None  # the last exception


class _File:
    """One log, as it is read."""

    def __init__(self, index: int, log: Log, evidence: Evidence, rank: int | None) -> None:
        self._index, self._log, self._evidence, self._rank = index, log, evidence, rank
        self._node = node_of_name(log.name)
        self._streams: dict[int | None, _Stream] = {}
        self._places: dict[tuple[object, ...], list[int]] = {}
        self._since: float | None = None
        self._own: list[tuple[Event, Progress, int]] = []
        self._all, self._reports = Progress(), Reports()
        self._restarted = (0, 0)

    def read(self) -> None:
        lines = self._log.lines()
        begin = list(itertools.islice(lines, _SNIFFED))
        labels, tail = RankLabels.sniff([text for _, text in begin]), deque[tuple[int, str]](maxlen=12)
        for number, line in itertools.chain(begin, lines):
            text, rank, node = labels.strip(line)
            self._line(number, text, self._rank if rank is None else rank, node or self._node)
            tail.append((number, text))
        number, steps = self._restarted
        for event, progress, before in self._own:
            followed = self._all.count - steps if number and event.number <= number + _LAST else 0
            event.progress = max(progress.count - before, followed)
            self._evidence.events.append(event)
        self._end(tail)

    def _end(self, tail: Sequence[tuple[int, str]]) -> None:
        evidence = self._evidence
        evidence.steps[self._index] = self._all.count
        if good := [number for number, text in tail if says("finished", text)]:
            evidence.finished[self._index] = good[-1]
            evidence.well |= {self._index} if any(says("succeeded", text) for _, text in tail) else set()
        evidence.cut |= self._log.cut

    def _line(self, number: int, text: str, rank: int | None, node: str | None) -> None:
        whose = rank if rank is not None else stated_rank(text)
        self._observe(number, text, rank, whose, node)
        stream = self._streams.setdefault(rank, _Stream())
        tracebacks = stream.tracebacks
        raised, known = tracebacks.raised, len(tracebacks.done)
        inside = tracebacks.feed(number, text)
        time = time_of(text)
        found: list[Event | None] = []
        if tracebacks.raised > raised:
            found = [self._raised(stream, len(tracebacks.done) == known)]
        elif not inside:
            stream.progress.feed(text)
            self._all.feed(text)
            found = [self._reports.feed(self._index, number, text), self._plain(number, text, stream)]
        for event in filter(None, found):
            event.node, event.time, event.since = event.node or node, time, self._since
            event.rank = whose if event.rank is None and not event.end else event.rank
            self._add(event, self._all if event.ours else Progress() if event.end else stream.progress)
        self._since = time if time is not None else self._since
        if not inside:
            self._excuse(number, text, whose)

    def _observe(self, number: int, text: str, rank: int | None, whose: int | None, node: str | None) -> None:
        evidence = self._evidence
        evidence.observed.add_rank(whose, node)
        evidence.observed.add_line(text, self._index if self._rank is None else "ranks", rank, self._all.count)
        evidence.met |= text.startswith("srunddp: ") and ", launcher " in text
        if says("restarted", text):
            self._restarted = (number, self._all.count)
        speaker = f"rank {rank}" if rank is not None else self._log.name
        evidence.last.pop(speaker, None)
        evidence.last[speaker] = text

    def _raised(self, stream: _Stream, again: bool) -> Event:
        """The exception that was just told of; ``again``: the last one handed it on, or was the reason for it."""
        if stream.raised and again:
            stream.raised.kind = "noise"
        stream.raised = of_exception(stream.tracebacks.done[-1], self._index)
        return stream.raised

    def _plain(self, number: int, text: str, stream: _Stream) -> Event | None:
        if text.startswith(("srunddp: ", "FAIL  ")) and (event := ours(self._index, number, text)):
            return event
        sign = table().read(text)
        if sign and sign.kind != "noise" and not self._is_message(sign.id, sign.kind, number, text, stream.raised):
            return Event(sign.id, sign.kind, sign.sure, self._index, number, text)
        if not sign and says("failing", text) and not says("launcher", text) and not says("below-error", text):
            return Event("unknown", "word", False, self._index, number, text)
        return None

    def _is_message(self, cause: str, kind: str, number: int, text: str, raised: Event | None) -> bool:
        """Whether the line is of the message of the exception before it, which itself said nothing of its cause."""
        near = raised and number <= raised.number + _NEAR and kind in ("primary", "secondary")
        if not raised or not near or raised.cause != "script-error" or raised.sure or says("launcher", text):
            return False
        raised.cause, raised.kind = cause, kind
        return True

    def _excuse(self, number: int, text: str, rank: int | None) -> None:
        """Whoever caught the error in this line, or just before, says so."""
        last = self._own[-1][0] if self._own else None
        if not last or number > last.number + _NEAR or (None not in (rank, last.rank) and rank != last.rank):
            return
        if last.kind != "ending" and says("handled", text) and not says("launcher", text):
            last.handled = True

    def _add(self, event: Event, progress: Progress) -> None:
        places = self._places.setdefault((event.cause, event.kind, event.rank), [])
        if len(places) < _KEPT:
            places.append(len(self._own))
        # Of too many the last is replaced: it may be the one that mattered.
        self._own[places[-1] : places[-1] + 1] = [(event, progress, progress.count)]
