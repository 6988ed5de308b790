"""Turns lines of logs into events: signs of a cause, exceptions, and reports of launchers."""

import functools
import itertools
import re
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from pathlib import Path
from typing import NamedTuple

from srunddp.triage import own_files
from srunddp.triage.event import Event, of_exception
from srunddp.triage.logs import Log, time_of
from srunddp.triage.own_files import OwnFile, OwnWords
from srunddp.triage.rank_labels import (
    ObservedRanks,
    RankLabels,
    node_of_name,
    ranks_of_names,
    stated_rank,
)
from srunddp.triage.reports import Reports, add_note, ours
from srunddp.triage.signatures import Kind, Signature, says, table
from srunddp.triage.stalls import PrintedStack, StackReader
from srunddp.triage.tracebacks import Tracebacks

_KEPT = 40  # events of one file kept for each combination of cause, kind and rank
_MOST_EVENTS = 10_000  # events kept of one file; each further event replaces the newest one
_MOST_STREAMS = 10_000  # ranks of one file that are told apart; all further ranks count as one
_OTHERS = -1
_TAIL = 12  # last lines of a file that are searched for a good end
GOES_ON = 3  # steps after an event that show that it did not end the run
_NEAR = 3  # lines after an error that may continue its message, or may say that it was handled
# Matches "step 3", "Epoch [2", "iter: 10" or tqdm's "8/50 [00:01<00:05".
_STEP = re.compile(
    r"\b(?:steps?|iter(?:ation)?s?|epochs?|batch|its?)\b\W{0,4}[0-9]+(?:\.[0-9]+)?"
    r"|\b[0-9]+/[0-9]+ \["
)
_RECENT = 32  # steps that are remembered, because several ranks of a log report the same steps
_MOST_FORMS = 50_000  # forms of lines that are remembered, to limit memory if all lines differ
_REPORTED = "ended with exit code 0 on all ranks"  # a line that srunddp report prints
_DIGITS = re.compile(r"0x[0-9a-f]+|[0-9]+")


@dataclass
class Progress:
    """How much work one stream of lines shows.

    Attributes:
        count: The number of different steps reported.
        lines: The number of lines without a sign of an end.
    """

    count: int = 0
    lines: int = 0
    _recent: deque[tuple[str, ...]] = field(default_factory=lambda: deque(maxlen=_RECENT))

    def add(self, step: tuple[str, ...]) -> None:
        """Count one more step, unless a recent line has reported the same step.

        Args:
            step: The words by which a line reports steps; empty if it reports none.
        """
        if step and step not in self._recent:
            self._recent.appendleft(step)  # at the left, where ``in`` finds it soonest
            self.count += 1


class Authority(IntEnum):
    """The source of a line which says that the run ended well. If a log has several such lines, the
    source with the greatest value counts.
    """

    JOB_SCRIPT = 0  # the script that starts the run; it may mean only a part of the run
    RUN = 1  # the training itself
    EXIT_CODE = 2  # a line that gives exit code 0, or Slurm's state COMPLETED
    SRUNDDP = 3  # srunddp, whose line is about all ranks


class GoodEnd(NamedTuple):
    """The line by which a log says that the run ended well: its number, and its source."""

    number: int
    by: Authority


@dataclass
class Evidence:
    """Everything that was found in the logs.

    Attributes:
        names: The names of the logs.
        observed: The ranks with output, and how many ranks there should be.
        events: What was written about failures and ends, in the order of the logs.
        report: The launcher's report of the first rank that ended by itself; None if there is none.
        last: The last line of each rank, by a key such as ``rank 3``, or of each log whose lines
            name no rank, by the log's name. The newest line comes last.
        finished: The line by which a log says that the run ended well, by the position of the log
            in ``names``. A log without such a line is missing.
        steps: How many steps a log reports, by the position of the log in ``names``.
        files_of_ranks: The positions in ``names`` of the logs that belong to one rank.
        notes: Sentences for the user on what could not be read.
        met: Whether srunddp's ranks completed their rendezvous.
        cut: Whether the last line of any log has no line end.
        runs: Whether Slurm says that the job has not ended.
        own: The facts in srunddp's own files, by the folder of the run.
        stacks: The stack that each rank printed last on SIGURG, by the rank.
    """

    names: list[str]
    observed: ObservedRanks = field(default_factory=ObservedRanks)
    events: list[Event] = field(default_factory=list)
    report: Event | None = None
    last: dict[str, str] = field(default_factory=dict)
    finished: dict[int, GoodEnd] = field(default_factory=dict)
    steps: dict[int, int] = field(default_factory=dict)
    files_of_ranks: set[int] = field(default_factory=set)
    notes: list[str] = field(default_factory=list)
    met: bool = False
    cut: bool = False
    runs: bool = False
    own: dict[Path, OwnWords] = field(default_factory=dict)
    stacks: dict[int, PrintedStack] = field(default_factory=dict)

    @functools.cached_property
    def _endings(self) -> list[Event]:
        # Cached, because is_stopped_after() needs the list for each of perhaps thousands of events.
        return [each for each in self.events if each.kind is Kind.ENDING and each.sure]

    @property
    def ended_well(self) -> bool:
        """Whether the run ended with exit code 0 according to srunddp's files. False without such
        files, and if any of them reports a failure.
        """
        told = [each for each in self.own.values() if each.ended_well]
        return bool(told) and not any(each.has_failed or each.why for each in self.own.values())

    @property
    def why(self) -> str:
        """How a run ended according to srunddp's files; empty if none reports a bad end."""
        return next((each.why for each in self.own.values() if each.why), "")

    def is_stopped_after(self, event: Event) -> bool:
        """Tell whether a line says that Slurm, a launcher or a person ended the run after an event.

        A line in another log counts as later. If a launcher reported that a rank ended by itself,
        the answer is False.
        """
        if self.report:
            return False
        return any(each.file != event.file or each.number > event.number for each in self._endings)

    def is_outlived(self, event: Event) -> bool:
        """Tell whether srunddp ended with exit code 0 in spite of an event.

        This happens when a spare node has replaced a lost node.
        """
        good_end = self.finished.get(event.file)
        is_told_in_file = good_end is not None and good_end.by is Authority.SRUNDDP
        if event.ours:
            return is_told_in_file and good_end is not None and event.number < good_end.number
        if not is_told_in_file and not self.ended_well:
            return False
        # srun reports a lost node only when the whole job step ends, after srunddp has reported
        # success. 69 is the exit code of a rank whose node was lost; 137 and -9 stand for SIGKILL.
        if event.end:
            is_loss = event.end.code in (69, 137, -9)
        else:
            is_loss = event.cause == "node-failure"
        return is_loss and bool(says("launcher", event.text))


def collect(logs: Sequence[Log]) -> Evidence:
    """Read all logs, each once, and return what they say about failures and ends.

    Args:
        logs: The logs of one start of one job. Their notes become notes of the evidence.
    """
    evidence = Evidence([log.name for log in logs])
    ranks = ranks_of_names(evidence.names)
    dull = set[str]()
    for index, log in enumerate(logs):
        if kind := own_files.kind_of(log):
            _read_own_file(kind, log, index, evidence)
            continue
        rank = ranks.get(log.name)
        if rank is not None:
            evidence.observed.add_file(rank, node_of_name(log.name))
            evidence.files_of_ranks.add(index)
        _LogReader(index, log, evidence, rank, dull).read()
        evidence.notes += log.notes
    for own in reversed(evidence.own.values()):
        _take_over(own, evidence)
    evidence.report = _first_report(evidence)
    return evidence


def _first_report(evidence: Evidence) -> Event | None:
    """Find the launcher's report of the first rank that ended by itself.

    If a launcher calls a rank the root cause, its report counts as the first. Otherwise the first
    report in the order of the logs counts. None if there is no report.
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


def _read_own_file(kind: OwnFile, log: Log, index: int, evidence: Evidence) -> None:
    try:
        run = own_files.run_of(kind, log)
        own_files.read(kind, log, index, evidence.own.setdefault(run, OwnWords()))
    except (ValueError, TypeError, LookupError, OverflowError, RecursionError, AttributeError):
        evidence.notes.append(
            f"{log.name} is cut off, or srunddp has not written it; the diagnosis is made"
            " without it"
        )


def _take_over(own: OwnWords, evidence: Evidence) -> None:
    """Add the facts from srunddp's files about a run to the evidence from lines of logs."""
    evidence.events[:0] = own.events  # in front, because they count more than events of lines
    evidence.observed.add_world_size(own.world_size)
    for rank, node in own.nodes.items():
        if node:
            evidence.observed.nodes[rank] = node


@dataclass
class _Stream:
    """What the lines of one rank in one file have shown so far."""

    tracebacks: Tracebacks = field(default_factory=Tracebacks)
    progress: Progress = field(default_factory=Progress)
    raised: Event | None = None  # the event of the last exception; None before the first


class _Sighting:
    """An event, with the progress of its rank and file when it was found.

    Args:
        event: The event; :meth:`settle` fills in its counts.
        progress: The progress whose later steps would show that the event did not end the run.
        overall: The progress of all ranks in the file.
    """

    def __init__(self, event: Event, progress: Progress, overall: Progress) -> None:
        self.event = event
        self._progress = progress
        self._overall = overall
        self._steps_before = progress.count
        self._lines_before = progress.lines
        self._overall_before = overall.count

    def settle(self) -> Event:
        """Set the event's counts of later steps and lines, once the whole file is read."""
        self.event.progress = self._progress.count - self._steps_before
        self.event.lines = self._progress.lines - self._lines_before
        self.event.overall = self._overall.count - self._overall_before
        return self.event


def _add_look(rank: int, stack: PrintedStack, stacks: dict[int, PrintedStack]) -> None:
    """Add a rank's last stack in one log to the stacks of all logs.

    The job's output and the rank's own log may both have the stack. Then the first one stays, and
    gets the greater counts of later steps and lines.
    """
    known = stacks.setdefault(rank, stack).event
    known.overall = max(known.overall, stack.event.overall)
    known.lines = max(known.lines, stack.event.lines)


def _steps_in(text: str) -> tuple[str, ...]:
    """Return the words by which a line reports steps, such as ``step 3``; none for a line of srun
    or slurmstepd, where "step" means a job step.
    """
    if text.startswith(("srun: ", "slurmstepd")):
        return ()
    return tuple(_STEP.findall(text[:400].lower()))


class _LogReader:
    """Reads one log.

    Args:
        index: The log's position in the list of logs.
        log: The log.
        evidence: Receives what is found.
        rank: The rank in the file's name; None if there is none.
        dull: Forms of lines (with each number replaced by 0) that say nothing about an end. All
            logs share the set, which grows. A line of such a form is not read closely again: this
            saves most of the time, because nearly all lines of a log have one of a few forms.
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
        # The streams by rank; None for lines whose rank is unknown. A rank gets a stream only when
        # one of its lines has to be read closely, because streams take memory and labels may give
        # very many numbers.
        self._streams: dict[int | None, _Stream] = {}
        self._labelled = set[int]()
        self._sightings: list[_Sighting] = []
        # The positions in _sightings of each combination of cause, kind and rank.
        self._places: dict[tuple[str, Kind, int | None], list[int]] = {}
        self._last_time: float | None = None
        self._overall = Progress()  # counts the steps of all ranks
        self._work = Progress()  # counts the lines of all ranks
        self._reports = Reports()
        self._stacks = StackReader()
        self._looks: dict[int, tuple[_Sighting, PrintedStack]] = {}
        self._own: Event | None = None  # the last failure that srunddp has reported

    def read(self) -> None:
        """Read all lines, and add the events to the evidence."""
        lines = self._log.lines()
        labels, begin = RankLabels.of_beginning(lines)
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
        for rank, (sighting, stack) in self._looks.items():
            sighting.settle()
            _add_look(rank, stack, self._evidence.stacks)
        self._evidence.steps[self._index] = self._overall.count
        self._look_for_a_good_end(tail)
        self._evidence.cut |= self._log.cut

    def _read_labelled(self, number: int, line: str, labels: RankLabels) -> str:
        """Read a line, and return it without its label."""
        text, rank, node = labels.strip(line)
        stack = self._stacks.feed(self._index, number, text)
        if stack:
            self._keep(stack)
            return text
        if rank is None:
            rank = self._rank
        node = node or self._node
        owner = rank if rank is not None else stated_rank(text)
        observed = self._evidence.observed
        # Files whose names differ only by the rank belong to one job.
        job = self._index if self._rank is None else "ranks"
        observed.add_line(text, job, rank, self._overall.count)
        # A line that srunddp itself wrote, for example that another start begins, does not show
        # that the rank has written anything.
        if not text.startswith("srunddp: "):
            observed.add_rank(owner, node)
        self._read(number, text, rank, owner, node)
        if rank is not None:
            self._labelled.add(rank)
        speaker = f"rank {rank}" if rank is not None else self._log.name
        # Remove the key first, so that it moves to the end of the dictionary.
        self._evidence.last.pop(speaker, None)
        self._evidence.last[speaker] = text
        return text

    def _keep(self, stack: PrintedStack) -> None:
        """Note a stack as the last one of its rank, and the progress at this line.

        Ignored are further lines of a stack that is noted already, and new ranks above the limit.
        """
        rank = stack.event.rank
        known = self._looks.get(rank) if rank is not None else None
        if rank is None or (known and known[1] is stack):
            return
        if known or len(self._looks) < _MOST_STREAMS:
            sighting = _Sighting(stack.event, self._work, self._overall)
            self._looks[rank] = (sighting, stack)

    def _forget_local_ranks(self) -> None:
        """Forget the ranks that labels gave, because the labels have local ranks, which on several
        nodes are not the ranks of the world.
        """
        self._evidence.observed.seen -= self._labelled
        for sighting in self._sightings:
            if not sighting.event.end:
                sighting.event.rank = None

    def _look_for_a_good_end(self, tail: Sequence[tuple[int, str, int]]) -> None:
        """Note the line by which the log says that the run ended well, unless steps follow it.

        Args:
            tail: The last lines: number, text, and how many steps the log had reported by then.
        """
        finished = self._evidence.finished
        for place, (number, text, steps) in enumerate(tail, 1):
            if steps != self._overall.count:
                continue
            if not says("finished", text) or says("unfinished", text):
                continue
            if says("exit-zero", text):
                by = Authority.EXIT_CODE
            elif says("succeeded", text):
                by = Authority.RUN
            else:
                by = Authority.JOB_SCRIPT
            later = list(tail)[place:]
            if by is Authority.JOB_SCRIPT and not all(
                says("at-exit", each) for _, each, _ in later
            ):
                continue  # only a part of the run has ended
            known = finished.get(self._index)
            if known:
                by = max(by, known.by)
            finished[self._index] = GoodEnd(number, by)

    def _read(
        self, number: int, text: str, rank: int | None, owner: int | None, node: str | None
    ) -> None:
        form = _DIGITS.sub("0", text)
        stream = self._streams.get(rank)
        # Inside a traceback the same words may be the exception's message, so read them closely.
        if form in self._dull and not (stream and stream.tracebacks.open):
            self._count_steps(stream, text)
            if stream:
                stream.tracebacks.previous = text
                stream.progress.lines += 1
            self._work.lines += 1
            return
        stream = stream or self._new_stream(rank)
        is_dull = self._read_closely(number, text, stream, owner, node)
        if is_dull and len(self._dull) < _MOST_FORMS:
            self._dull.add(form)

    def _new_stream(self, rank: int | None) -> _Stream:
        """Make the stream of a rank, beginning with the rank's last line. Earlier lines of the rank
        were not worth reading closely. Ranks above the limit share one stream.
        """
        if len(self._streams) >= _MOST_STREAMS:
            return self._streams.setdefault(_OTHERS, _Stream())
        stream = self._streams[rank] = _Stream()
        speaker = f"rank {rank}" if rank is not None else self._log.name
        stream.tracebacks.previous = self._evidence.last.get(speaker, "")
        stream.progress.add(_steps_in(stream.tracebacks.previous))
        return stream

    def _read_closely(
        self, number: int, text: str, stream: _Stream, owner: int | None, node: str | None
    ) -> bool:
        """Read a line for exceptions, reports and signs.

        Returns:
            Whether lines of the same form say nothing about an end, and so need not be read closely
                again.
        """
        if text.startswith("srunddp: ") and ", launcher " in text:
            self._evidence.met = True
        if text.startswith("srunddp: ended with 0") or text == _REPORTED:
            self._evidence.finished[self._index] = GoodEnd(number, Authority.SRUNDDP)
        tracebacks = stream.tracebacks
        exceptions = tracebacks.raised
        chains = len(tracebacks.done)
        is_inside = tracebacks.feed(number, text)
        found: list[Event] = []
        if tracebacks.raised > exceptions:
            # An exception that was raised while handling another one, or that a data loader's
            # worker passed on, adds no entry to ``done``.
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
        # A line inside a traceback must not make its form dull: outside a traceback the same words
        # may count.
        if is_inside:
            return False
        self._note_handling(number, text, owner)
        is_work = not found and not says("launcher", text) and not says("at-exit", text)
        if not is_work:
            return False
        stream.progress.lines += 1
        self._work.lines += 1
        is_near = stream.raised is not None and number <= stream.raised.number + _NEAR
        is_heard = any(says(name, text) for name in ("heard", "handled", "ending", "ended-more"))
        return not (is_near or tracebacks.open or is_heard)

    def _count_steps(self, stream: _Stream | None, text: str) -> None:
        step = _steps_in(text)
        if stream:
            stream.progress.add(step)
        self._overall.add(step)

    def _exception(self, stream: _Stream, is_handed_on: bool) -> Event:
        """Return the event of the exception that was just read.

        Args:
            stream: The lines of the rank.
            is_handed_on: Whether the exception repeats or follows from the previous exception.
        """
        # The new event contains the whole chain. Make the previous event noise, so that the failure
        # is not counted twice.
        if stream.raised and is_handed_on:
            stream.raised.kind = Kind.NOISE
        stream.raised = of_exception(stream.tracebacks.done[-1], self._index)
        return stream.raised

    def _plain(self, number: int, text: str, stream: _Stream) -> Event | None:
        """Make the event of a line outside of tracebacks.

        Returns:
            None if the line says nothing about an end, or only completes an earlier event: the last
                exception, or the last failure that srunddp has reported.
        """
        # Look for srunddp's lines before the signs: a line in which srunddp quotes the cause would
        # otherwise look like a line of the script.
        if text.startswith(("srunddp: ", "FAIL  ")):
            event = ours(self._index, number, text)
            if event:
                self._own = event
                return event
            if self._own:
                add_note(self._own, text.removeprefix("srunddp: "))
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
        """Tell whether a line continues the message of an exception just before it whose own line
        shows no cause.
        """
        return (
            number <= raised.number + _NEAR
            and sign.kind in (Kind.PRIMARY, Kind.SECONDARY)
            and raised.cause == "script-error"
            and not raised.sure
            and not says("launcher", text)
        )

    def _note_handling(self, number: int, text: str, rank: int | None) -> None:
        """Mark the last event as handled if this line follows soon and says so, as ``will retry``
        does.
        """
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
                last.kind = Kind.NOISE  # "terminate called" only announces the line with the cause
        sighting = _Sighting(event, self._progress_after(event, stream), self._overall)
        key = (event.cause, event.kind, event.rank)
        places = self._places.get(key, [])
        if len(places) < _KEPT and len(self._sightings) < _MOST_EVENTS:
            self._places.setdefault(key, places).append(len(self._sightings))
            self._sightings.append(sighting)
        elif places:  # replace the newest one: the last of many events may be the one that matters
            self._sightings[places[-1]] = sighting
        else:
            self._sightings[-1] = sighting

    def _progress_after(self, event: Event, stream: _Stream) -> Progress:
        """Return the progress whose later steps would show that an event did not end the run."""
        if event.ours:
            return self._overall  # srunddp speaks for all ranks
        if event.end:
            # A launcher may report the end of a rank late, so steps before and after its report
            # prove nothing. Return a progress that never grows.
            return Progress()
        return stream.progress
