"""From the lines of logs to what speaks of an end: signs, exceptions, launchers' reports, srunddp's
own diagnosis.
"""

import itertools
import re
from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from srunddp.triage.event import Event, of_exception
from srunddp.triage.logs import Log, time_of
from srunddp.triage.rank_labels import (
    ObservedRanks,
    RankLabels,
    node_of_name,
    ranks_of_names,
    stated_rank,
)
from srunddp.triage.reports import Reports, of_json, ours
from srunddp.triage.signatures import says, table
from srunddp.triage.tracebacks import Tracebacks

_SNIFFED = 400
_KEPT = 40  # of one sign of one rank in one file
GOES_ON = 3  # steps after something: it did not end the run
_NEAR = 3  # lines after an error that may be of its message, or in which whoever caught it says so
_STEP = re.compile(
    r"\b(?:steps?|iter(?:ation)?s?|epochs?|batch|its?)\b\W{0,4}[0-9]+(?:\.[0-9]+)?"
    r"|\b[0-9]+/[0-9]+ \["
)
_RECENT = 32  # steps: ranks of one log tell of the same
_MOST_FORMS = 50_000
_DIGITS = re.compile(r"0x[0-9a-f]+|[0-9]+")


@dataclass
class Progress:
    """What one stream of lines tells of work: ``count`` of unlike steps, and ``lines`` without a
    sign of an end.
    """

    count: int = 0
    lines: int = 0
    _recent: deque[tuple[str, ...]] = field(default_factory=lambda: deque(maxlen=_RECENT))

    def add(self, step: tuple[str, ...]) -> None:
        """Count the steps that a line tells of."""
        if step and step not in self._recent:
            self._recent.appendleft(step)  # where it is found soonest
            self.count += 1


@dataclass
class Evidence:
    """All that the logs tell.

    Attributes:
        names: of the logs; notes: what could not be read.
        report: the first end of a rank that a launcher reports.
        last: the last line of each who spoke, the last speaker's last.
        finished: by file the line that tells of a good end, and the weight of its word: 1 of the
            run itself, 2 for an exit code, 3 for srunddp's own, which counts for all ranks.
        steps: how many each file tells of.
        met: srunddp's ranks found one another; cut: a log's last line has no end.
        runs: Slurm says that the job has not ended.
    """

    names: list[str]
    observed: ObservedRanks = field(default_factory=ObservedRanks)
    events: list[Event] = field(default_factory=list)
    report: Event | None = None
    last: dict[str, str] = field(default_factory=dict)
    finished: dict[int, tuple[int, int]] = field(default_factory=dict)
    steps: dict[int, int] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    met: bool = False
    cut: bool = False
    runs: bool = False

    def is_stopped_after(self, event: Event) -> bool:
        """Whether the run was ended from outside later, and no launcher told of a rank's own
        end.
        """
        ends = (each for each in self.events if each.kind == "ending" and each.sure)
        return not self.report and any(
            each.file != event.file or each.number > event.number for each in ends
        )

    def is_outlived(self, event: Event) -> bool:
        """Whether the loss of a node, or what came of it, did not keep srunddp from an end with
        0.
        """
        number, weight = self.finished.get(event.file, (0, 0))
        if event.end:
            is_loss = event.end.code in (69, 137, -9)
        else:
            is_loss = event.cause == "node-failure"
        return weight > 2 and (
            event.number < number if event.ours else is_loss and bool(says("launcher", event.text))
        )


def collect(logs: Sequence[Log]) -> Evidence:
    """Read all logs, each once."""
    evidence = Evidence([log.name for log in logs])
    ranks = ranks_of_names(evidence.names)
    dull = set[str]()
    for index, log in enumerate(logs):
        if match := re.fullmatch(r"(failure|preflight)(?:\.\w+)?\.json", log.path.name):
            _read_json(match[1], log, index, evidence)
            continue
        _File(index, log, evidence, ranks.get(log.name), dull).read()
        evidence.notes += log.notes
    own = [
        each
        for each in evidence.events
        if each.end and not each.end.is_victim and each.progress < GOES_ON
    ]
    own = [*itertools.filterfalse(evidence.is_outlived, own)]
    evidence.report = min(own, key=lambda event: not (event.end and event.end.root), default=None)
    return evidence


def _read_json(kind: str, log: Log, index: int, evidence: Evidence) -> None:
    try:
        events, size = of_json(kind, "\n".join(line for _, line in log.lines()), index)
    except (ValueError, TypeError, LookupError, OverflowError, RecursionError):
        evidence.notes.append(
            f"{log.name} is cut off, or none of srunddp's; the other logs are judged without it"
        )
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
    """One log, as it is read; ``dull`` are forms of lines, of any log, that tell of no end whatever
    their figures.
    """

    def __init__(
        self, index: int, log: Log, evidence: Evidence, rank: int | None, dull: set[str]
    ) -> None:
        self._index = index
        self._log = log
        self._evidence = evidence
        self._rank = rank
        self._dull = dull
        self._node = node_of_name(log.name)
        self._streams = defaultdict[int | None, _Stream](_Stream)
        self._places: dict[tuple[object, ...], list[int]] = {}
        self._since: float | None = None
        self._own: list[tuple[Event, Progress]] = []
        self._all = Progress()
        self._reports = Reports()

    def read(self) -> None:
        lines = self._log.lines()
        job = self._index if self._rank is None else "ranks"
        begin = list(itertools.islice(lines, _SNIFFED))
        labels = RankLabels.sniff([text for _, text in begin])
        tail = deque[tuple[int, str, int]](maxlen=12)
        for number, line in itertools.chain(begin, lines):
            text, rank, node = labels.strip(line)
            rank = self._rank if rank is None else rank
            node = node or self._node
            whose = rank if rank is not None else stated_rank(text)
            self._evidence.observed.add_line(text, job, rank, self._all.count)
            self._evidence.observed.add_rank(whose, node)
            speaker = f"rank {rank}" if rank is not None else self._log.name
            self._evidence.last.pop(speaker, None)
            self._evidence.last[speaker] = text
            self._read(number, text, self._streams[rank], whose, node)
            time = time_of(text)
            self._since = self._since if time is None else time
            tail.append((number, text, self._all.count))
        if labels.local and self._reports.apart:  # labels with ranks of a node, and so of several
            self._evidence.observed.seen -= {rank for rank in self._streams if rank is not None}
            for event, _ in self._own:
                event.rank = event.rank if event.end else None
        for event, progress in self._own:
            event.progress += progress.count
            event.lines += progress.lines
            event.overall += self._all.count
            self._evidence.events.append(event)
        self._end(tail)

    def _end(self, tail: Sequence[tuple[int, str, int]]) -> None:
        """Whether the log tells of a good end, after its last step."""
        evidence = self._evidence
        count = self._all.count
        evidence.steps[self._index] = count
        for place, (number, text, steps) in enumerate(tail, 1):
            if steps == count and says("finished", text) and not says("unfinished", text):
                if says("exit-zero", text):
                    weight = 2
                else:
                    weight = int(bool(says("succeeded", text)))
                if not weight and not all(
                    says("at-exit", later) for _, later, _ in list(tail)[place:]
                ):
                    continue  # a part of the run is done
                evidence.finished[self._index] = (
                    number,
                    max(weight, evidence.finished.get(self._index, (0, 0))[1]),
                )
        evidence.cut |= self._log.cut

    def _read(
        self, number: int, text: str, stream: _Stream, whose: int | None, node: str | None
    ) -> None:
        form = _DIGITS.sub("0", text)
        if form in self._dull and not stream.tracebacks.open:
            stream.tracebacks.previous = text
            self._work(stream, text)
            stream.progress.lines += 1
        elif self._line(number, text, stream, whose, node) and len(self._dull) < _MOST_FORMS:
            self._dull.add(form)

    def _line(
        self, number: int, text: str, stream: _Stream, whose: int | None, node: str | None
    ) -> bool:
        """Read a line for what it tells of an end; whether that is nothing."""
        self._evidence.met |= text.startswith("srunddp: ") and ", launcher " in text
        if text.startswith("srunddp: ended with 0"):
            self._evidence.finished[self._index] = number, 3
        tracebacks = stream.tracebacks
        raised = tracebacks.raised
        known = len(tracebacks.done)
        inside = tracebacks.feed(number, text)
        found: list[Event | None] = []
        if tracebacks.raised > raised:
            found = [self._raised(stream, len(tracebacks.done) == known)]
        elif not inside:
            self._work(stream, text)
            found = [
                self._reports.feed(self._index, number, text),
                self._plain(number, text, stream),
            ]
        for event in filter(None, found):
            event.node = event.node or node
            event.time = time_of(text)
            event.since = self._since
            if event.rank is None and not event.end:
                event.rank = whose
            self._add(
                event, self._all if event.ours else Progress() if event.end else stream.progress
            )
        if inside:
            return False
        self._excuse(number, text, whose)
        near = stream.raised and number <= stream.raised.number + _NEAR
        is_work = not any(found) and not says("launcher", text) and not says("at-exit", text)
        stream.progress.lines += is_work
        is_heard = any(says(name, text) for name in ("heard", "handled", "ending", "ended-more"))
        return is_work and not (near or tracebacks.open or is_heard)

    def _work(self, stream: _Stream, text: str) -> None:
        step = tuple(_STEP.findall(text[:400].lower()))
        stream.progress.add(step)
        self._all.add(step)

    def _raised(self, stream: _Stream, again: bool) -> Event:
        """The exception that was just told of; ``again``: the last one handed it on, or was the
        reason for it.
        """
        if stream.raised and again:
            stream.raised.kind = "noise"
        stream.raised = of_exception(stream.tracebacks.done[-1], self._index)
        return stream.raised

    def _plain(self, number: int, text: str, stream: _Stream) -> Event | None:
        if text.startswith(("srunddp: ", "FAIL  ")) and (event := ours(self._index, number, text)):
            return event
        sign = table().read(text)
        if (
            sign
            and sign.kind != "noise"
            and not self._is_message(sign.id, sign.kind, number, text, stream.raised)
        ):
            return Event(sign.id, sign.kind, sign.sure, self._index, number, text)
        if (
            not sign
            and says("failing", text)
            and not says("launcher", text)
            and not says("below-error", text)
        ):
            return Event("unknown", "word", False, self._index, number, text)
        return None

    def _is_message(
        self, cause: str, kind: str, number: int, text: str, raised: Event | None
    ) -> bool:
        """Whether the line is of the message of the exception before it, which itself said nothing
        of its cause.
        """
        near = raised and number <= raised.number + _NEAR and kind in ("primary", "secondary")
        if (
            not raised
            or not near
            or raised.cause != "script-error"
            or raised.sure
            or says("launcher", text)
        ):
            return False
        raised.cause = cause
        raised.kind = kind
        return True

    def _excuse(self, number: int, text: str, rank: int | None) -> None:
        """Whoever caught the error in this line, or just before, says so."""
        last = self._own[-1][0] if self._own else None
        if (
            not last
            or number > last.number + _NEAR
            or (None not in (rank, last.rank) and rank != last.rank)
        ):
            return
        if last.kind != "ending" and says("handled", text) and not says("launcher", text):
            last.handled = True

    def _add(self, event: Event, progress: Progress) -> None:
        places = self._places.setdefault((event.cause, event.kind, event.rank), [])
        if len(places) < _KEPT:
            places.append(len(self._own))
        # Of too many the last is replaced: it may be the one that mattered.
        if event.text.lstrip().startswith("what():") and self._own:
            last = self._own[-1][0]  # which has said no more than that there is such a line
            if last.text.startswith("terminate called "):
                last.kind = "noise"
        event.progress = -progress.count
        event.lines = -progress.lines
        event.overall = -self._all.count
        self._own[places[-1] : places[-1] + 1] = [(event, progress)]
