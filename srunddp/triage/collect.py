"""From the lines of logs to what speaks of an end: signs, exceptions, launchers' reports, srunddp's
own diagnosis.
"""

import itertools
import re
from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

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
from srunddp.triage.signatures import Kind, Signature, says, table
from srunddp.triage.tracebacks import Tracebacks

_SNIFFED = 400  # lines of a file by which its labels are told
_KEPT = 40  # events of one sign of one rank in one file
_TAIL = 12  # last lines in which a word of a good end counts
GOES_ON = 3  # steps after something: it did not end the run
_NEAR = 3  # lines after an error that may be of its message, or in which whoever caught it says so
# "step 3", "Epoch [2", "iter: 10" or tqdm's "8/50 [00:01<00:05".
_STEP = re.compile(
    r"\b(?:steps?|iter(?:ation)?s?|epochs?|batch|its?)\b\W{0,4}[0-9]+(?:\.[0-9]+)?"
    r"|\b[0-9]+/[0-9]+ \["
)
_RECENT = 32  # steps: ranks of one log tell of the same
_MOST_FORMS = 50_000  # a log of lines that all differ must not fill the memory
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


class GoodEnd(NamedTuple):
    """The line by which a log tells of a good end, and how much its word counts.

    Attributes:
        number: of the line.
        weight: 0 for a job script's word, 1 for the run's own, 2 for an exit code, 3 for srunddp's
            own, which counts for all ranks.
    """

    number: int
    weight: int


@dataclass
class Evidence:
    """All that the logs tell.

    Attributes:
        names: of the logs.
        observed: the ranks that spoke, and how many there should be.
        events: what was said of an end, log by log.
        report: the first end of a rank that a launcher reports.
        last: the last line of each who spoke, the last speaker's last.
        finished: the word of a good end of each file that has one.
        steps: how many each file tells of.
        notes: what could not be read.
        met: srunddp's ranks found one another.
        cut: a log's last line has no end.
        runs: Slurm says that the job has not ended.
    """

    names: list[str]
    observed: ObservedRanks = field(default_factory=ObservedRanks)
    events: list[Event] = field(default_factory=list)
    report: Event | None = None
    last: dict[str, str] = field(default_factory=dict)
    finished: dict[int, GoodEnd] = field(default_factory=dict)
    steps: dict[int, int] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    met: bool = False
    cut: bool = False
    runs: bool = False

    def is_stopped_after(self, event: Event) -> bool:
        """Tell whether the run was ended from outside after an event.

        False where a launcher told of a rank's own end.
        """
        if self.report:
            return False
        return any(
            each.file != event.file or each.number > event.number
            for each in self.events
            if each.kind is Kind.ENDING and each.sure
        )

    def is_outlived(self, event: Event) -> bool:
        """Tell whether srunddp ended with 0 in spite of an event.

        That is so where spare nodes took the place of a lost one.
        """
        good_end = self.finished.get(event.file)
        if not good_end or good_end.weight < 3:
            return False
        if event.ours:
            return event.number < good_end.number
        # srun tells of the loss when the whole step ends, after srunddp has said that all is well.
        # 69 is the exit code of a rank whose node was lost, 137 and -9 are those of SIGKILL.
        if event.end:
            is_loss = event.end.code in (69, 137, -9)
        else:
            is_loss = event.cause == "node-failure"
        return is_loss and bool(says("launcher", event.text))


def collect(logs: Sequence[Log]) -> Evidence:
    """Read all logs, each once.

    Args:
        logs: of one start of one job. Their notes are added to those of the evidence.
    """
    evidence = Evidence([log.name for log in logs])
    ranks = ranks_of_names(evidence.names)
    dull = set[str]()
    for index, log in enumerate(logs):
        if match := re.fullmatch(r"(failure|preflight)(?:\.\w+)?\.json", log.path.name):
            _read_json(match[1], log, index, evidence)
            continue
        _LogReader(index, log, evidence, ranks.get(log.name), dull).read()
        evidence.notes += log.notes
    evidence.report = _first_report(evidence)
    return evidence


def _first_report(evidence: Evidence) -> Event | None:
    """The launcher's report of the first rank that ended by itself: what it calls the root cause,
    else the first one.
    """
    own = [
        each
        for each in evidence.events
        if each.end
        and not each.end.is_victim
        and each.progress < GOES_ON
        and not evidence.is_outlived(each)
    ]
    roots = [each for each in own if each.end and each.end.root]
    return next(iter(roots or own), None)


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


class _Sighting:
    """An event, and how far its rank and its file had come then.

    Args:
        event: what was seen; it gets its figures by :meth:`settle`.
        progress: of whoever is to show that the event did not end the run.
        overall: of all ranks of the file.
    """

    def __init__(self, event: Event, progress: Progress, overall: Progress) -> None:
        self.event = event
        self._progress = progress
        self._overall = overall
        self._steps_before = progress.count
        self._lines_before = progress.lines
        self._overall_before = overall.count

    def settle(self) -> Event:
        """Tell the event what followed it, once the whole file is read."""
        self.event.progress = self._progress.count - self._steps_before
        self.event.lines = self._progress.lines - self._lines_before
        self.event.overall = self._overall.count - self._overall_before
        return self.event


class _LogReader:
    """Reads one log.

    Args:
        index: its place among the logs.
        log: the log.
        evidence: what is found is added to it.
        rank: whose log it is by its name, if that tells one.
        dull: forms of lines, of any log, that tell of no end whatever their figures. It grows, and
            saves most of the time: nearly all lines of a log have one of a few forms.
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
        self._sightings: list[_Sighting] = []
        # Where each sign of each rank stands in _sightings.
        self._places: dict[tuple[str, Kind, int | None], list[int]] = {}
        self._last_time: float | None = None
        self._overall = Progress()
        self._reports = Reports()

    def read(self) -> None:
        """Read all lines, and add the events to the evidence."""
        lines = self._log.lines()
        # Whether a doubtful label is one shows over many lines only, and has to be known for the
        # first.
        begin = list(itertools.islice(lines, _SNIFFED))
        labels = RankLabels.sniff([text for _, text in begin])
        tail = deque[tuple[int, str, int]](maxlen=_TAIL)
        for number, line in itertools.chain(begin, lines):
            text = self._read_labelled(number, line, labels)
            time = time_of(text)
            if time is not None:
                self._last_time = time
            tail.append((number, text, self._overall.count))
        if labels.local and self._reports.apart:
            self._forget_local_ranks()
        self._evidence.events += [each.settle() for each in self._sightings]
        self._evidence.steps[self._index] = self._overall.count
        self._look_for_a_good_end(tail)
        self._evidence.cut |= self._log.cut

    def _read_labelled(self, number: int, line: str, labels: RankLabels) -> str:
        """Read a line with its label; the line without it."""
        text, rank, node = labels.strip(line)
        if rank is None:
            rank = self._rank
        node = node or self._node
        owner = rank if rank is not None else stated_rank(text)
        observed = self._evidence.observed
        # Files that differ by the rank in their names are of one job.
        job = self._index if self._rank is None else "ranks"
        observed.add_line(text, job, rank, self._overall.count)
        observed.add_rank(owner, node)
        speaker = f"rank {rank}" if rank is not None else self._log.name
        # Taken out and put in again, it is the last of the dictionary.
        self._evidence.last.pop(speaker, None)
        self._evidence.last[speaker] = text
        self._read(number, text, self._streams[rank], owner, node)
        return text

    def _forget_local_ranks(self) -> None:
        """Labels with local ranks, of several nodes, tell no rank of the world."""
        self._evidence.observed.seen -= {rank for rank in self._streams if rank is not None}
        for sighting in self._sightings:
            if not sighting.event.end:
                sighting.event.rank = None

    def _look_for_a_good_end(self, tail: Sequence[tuple[int, str, int]]) -> None:
        """Whether the log tells of a good end, after its last step."""
        finished = self._evidence.finished
        for place, (number, text, steps) in enumerate(tail, 1):
            if steps != self._overall.count:
                continue
            if not says("finished", text) or says("unfinished", text):
                continue
            if says("exit-zero", text):
                weight = 2
            elif says("succeeded", text):
                weight = 1
            else:
                weight = 0
            later = list(tail)[place:]
            if weight == 0 and not all(says("at-exit", each) for _, each, _ in later):
                continue  # a part of the run is done
            known = finished.get(self._index)
            finished[self._index] = GoodEnd(number, max(weight, known.weight if known else 0))

    def _read(
        self, number: int, text: str, stream: _Stream, owner: int | None, node: str | None
    ) -> None:
        form = _DIGITS.sub("0", text)
        # Below a traceback the same words may be the exception's message.
        if form in self._dull and not stream.tracebacks.open:
            stream.tracebacks.previous = text
            self._count_steps(stream, text)
            stream.progress.lines += 1
            return
        is_dull = self._read_closely(number, text, stream, owner, node)
        if is_dull and len(self._dull) < _MOST_FORMS:
            self._dull.add(form)

    def _read_closely(
        self, number: int, text: str, stream: _Stream, owner: int | None, node: str | None
    ) -> bool:
        """Read a line for what it tells of an end; whether that is nothing."""
        if text.startswith("srunddp: ") and ", launcher " in text:
            self._evidence.met = True
        if text.startswith("srunddp: ended with 0"):
            self._evidence.finished[self._index] = GoodEnd(number, 3)
        tracebacks = stream.tracebacks
        exceptions = tracebacks.raised
        chains = len(tracebacks.done)
        is_inside = tracebacks.feed(number, text)
        found: list[Event] = []
        if tracebacks.raised > exceptions:
            # An exception that came of the last one, or that a loader's worker handed on, adds no
            # entry.
            is_handed_on = len(tracebacks.done) == chains
            found = [self._exception(stream, is_handed_on)]
        elif not is_inside:
            self._count_steps(stream, text)
            candidates = (
                self._reports.feed(self._index, number, text),
                self._plain(number, text, stream),
            )
            found = [event for event in candidates if event]
        for event in found:
            event.node = event.node or node
            event.time = time_of(text)
            event.since = self._last_time
            if event.rank is None and not event.end:
                event.rank = owner
            self._add(event, stream)
        # The form of a line in a traceback is not called dull: outside of one the same words may
        # count.
        if is_inside:
            return False
        self._note_handling(number, text, owner)
        is_work = not found and not says("launcher", text) and not says("at-exit", text)
        if not is_work:
            return False
        stream.progress.lines += 1
        is_near = stream.raised is not None and number <= stream.raised.number + _NEAR
        is_heard = any(says(name, text) for name in ("heard", "handled", "ending", "ended-more"))
        return not (is_near or tracebacks.open or is_heard)

    def _count_steps(self, stream: _Stream, text: str) -> None:
        step = tuple(_STEP.findall(text[:400].lower()))
        stream.progress.add(step)
        self._overall.add(step)

    def _exception(self, stream: _Stream, is_handed_on: bool) -> Event:
        """The exception that was just told of; ``is_handed_on``: it is the last one again, or came
        of it.
        """
        # The new event has the whole chain in it; the one from before would count the failure
        # twice.
        if stream.raised and is_handed_on:
            stream.raised.kind = Kind.NOISE
        stream.raised = of_exception(stream.tracebacks.done[-1], self._index)
        return stream.raised

    def _plain(self, number: int, text: str, stream: _Stream) -> Event | None:
        """What a line tells by itself, outside of tracebacks."""
        # Before the signs, which would take a cause that srunddp quotes for a line of the script
        # itself.
        if text.startswith(("srunddp: ", "FAIL  ")):
            event = ours(self._index, number, text)
            if event:
                return event
        sign = table().read(text)
        if not sign:
            is_word = (
                says("failing", text)
                and not says("launcher", text)
                and not says("below-error", text)
            )
            if not is_word:
                return None
            return Event("unknown", Kind.WORD, False, self._index, number, text)
        if sign.kind is Kind.NOISE:
            return None
        if stream.raised and self._is_its_message(stream.raised, sign, number, text):
            stream.raised.cause = sign.id
            stream.raised.kind = sign.kind
            return None
        return Event(sign.id, sign.kind, sign.sure, self._index, number, text)

    def _is_its_message(self, raised: Event, sign: Signature, number: int, text: str) -> bool:
        """Whether the line is of the message of the exception before it, which itself said nothing
        of its cause.
        """
        return (
            number <= raised.number + _NEAR
            and sign.kind in (Kind.PRIMARY, Kind.SECONDARY)
            and raised.cause == "script-error"
            and not raised.sure
            and not says("launcher", text)
        )

    def _note_handling(self, number: int, text: str, rank: int | None) -> None:
        """Mark the last event as handled if this line, just after it, says so: ``will retry``."""
        if not self._sightings:
            return
        last = self._sightings[-1].event
        if number > last.number + _NEAR or last.kind is Kind.ENDING:
            return
        is_of_another = rank is not None and last.rank is not None and rank != last.rank
        if is_of_another:
            return
        if says("handled", text) and not says("launcher", text):
            last.handled = True

    def _add(self, event: Event, stream: _Stream) -> None:
        if event.text.lstrip().startswith("what():") and self._sightings:
            last = self._sightings[-1].event
            if last.text.startswith("terminate called "):
                last.kind = Kind.NOISE  # it only says that the line with the cause follows
        sighting = _Sighting(event, self._progress_after(event, stream), self._overall)
        places = self._places.setdefault((event.cause, event.kind, event.rank), [])
        if len(places) < _KEPT:
            places.append(len(self._sightings))
            self._sightings.append(sighting)
        else:  # the last of too many may be the one that mattered
            self._sightings[places[-1]] = sighting

    def _progress_after(self, event: Event, stream: _Stream) -> Progress:
        """Whose steps afterwards show that the event did not end the run."""
        if event.ours:
            return self._overall  # srunddp speaks for all ranks
        if event.end:
            return Progress()  # a launcher tells of an end when it is over, maybe late
        return stream.progress
