"""From the lines of logs to what speaks of an end: signs, exceptions, launchers' reports, srunddp's own verdict."""

from __future__ import annotations

import itertools
import re
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from srunddp.observe.triage.clock import time_of
from srunddp.observe.triage.event import Event
from srunddp.observe.triage.exceptions import of_exception
from srunddp.observe.triage.ours import of_record, ours
from srunddp.observe.triage.progress import Progress, is_finished, is_on_its_way, tells_part
from srunddp.observe.triage.reading import Log
from srunddp.observe.triage.reports import Reports
from srunddp.observe.triage.signatures import Sign, table
from srunddp.observe.triage.tracebacks import Tracebacks
from srunddp.observe.triage.who import Crowd, Labels, Nccl, first, node_of_name, ranks_of_names, said_rank

_SNIFFED = 400
_KEPT = 40  # of one sign of one rank in one file
_STREAMS = 4096
_LAST = 3
_MESSAGE = 15  # lines that an exception's message may have
_LAUNCHER = re.compile(r"\bsrun: |slurmstepd\S*: |srunddp: |elastic|mpirun|prterun|^=")
_HANDLED = re.compile(
    r"[Rr]etrying|will retry|[Ss]kipp|[Ii]gnor|[Ff]alling back|will be (?:re|ig)|attempt \d+ (?:of|/)|"
    r"^(?:WARNING|WARN|INFO|DEBUG)\b"
)


@dataclass
class Story:
    """All that the logs tell.

    Attributes:
        names: of the logs; notes: what could not be read.
        reports: of launchers, by file; last: the last lines of each who spoke.
        finished: logs, by file, that end with a word of a good end; lines: how many there were.
        stopped: the last line of one that got no further than a part of its way.
    """

    names: list[str]
    crowd: Crowd = field(default_factory=Crowd)
    events: list[Event] = field(default_factory=list)
    reports: dict[int, Reports] = field(default_factory=dict)
    last: dict[str, deque[str]] = field(default_factory=dict)
    finished: set[int] = field(default_factory=set)
    notes: list[str] = field(default_factory=list)
    lines: int = 0
    stopped: str = ""


def gather(logs: Sequence[Log]) -> Story:
    """Read all logs, each once."""
    story = Story([log.name for log in logs])
    ranks, nccl = ranks_of_names(story.names), Nccl()
    for index, log in enumerate(logs):
        if re.fullmatch(r"failure(?:\.\d+)?\.json", log.path.name):
            _read_record(log, index, story)
            continue
        _File(index, log, story, nccl, ranks.get(log.name)).read()
        story.notes += log.notes
    return story


def _read_record(log: Log, index: int, story: Story) -> None:
    try:
        event, size = of_record("\n".join(text for _, text in log.lines()), index)
    except (ValueError, TypeError, KeyError):
        story.notes.append(f"{log.name} is none of srunddp's")
        return
    story.events.append(event)
    story.crowd.tell(9, size)


class _File:
    """One log, as it is read."""

    def __init__(self, index: int, log: Log, story: Story, nccl: Nccl, rank: int | None) -> None:
        self._index, self._log, self._story, self._nccl, self._rank = index, log, story, nccl, rank
        self._node = node_of_name(log.name)
        self._streams: dict[int | None, Tracebacks] = {}
        self._places: dict[tuple[object, ...], list[int]] = {}
        self._since: float | None = None
        self._progress: dict[int | None, Progress] = {}
        self._own: list[Event] = []
        self._counted: list[tuple[Progress, int]] = []
        self._reports = story.reports.setdefault(index, Reports())

    def read(self) -> None:
        lines = self._log.lines()
        begin = list(itertools.islice(lines, _SNIFFED))
        labels, tail = Labels.sniff([text for _, text in begin]), deque[str](maxlen=12)
        for number, line in itertools.chain(begin, lines):
            text, rank, node = labels.strip(line)
            near, host = self._nccl.look(text) if "NCCL" in text else (None, None)
            self._line(number, text, first((rank, self._rank, near)), node or host or self._node)
            tail.append(text)
        if any(map(is_finished, tail)):
            self._story.finished.add(self._index)
        else:
            last = next((text for text in reversed(tail) if tells_part(text)), "")
            self._story.stopped = last if is_on_its_way(last) else self._story.stopped
        for event, (progress, before) in zip(self._own, self._counted, strict=True):
            event.progress = progress.count - before
        self._story.events += self._own

    def _line(self, number: int, text: str, rank: int | None, node: str | None) -> None:
        story = self._story
        story.lines += 1
        whose = rank if rank is not None else said_rank(text)
        story.crowd.hear(text, whose, node)
        speaker = f"rank {rank}" if rank is not None else self._log.name
        if len(story.last) < _STREAMS or speaker in story.last:
            story.last.setdefault(speaker, deque(maxlen=_LAST)).append(text)
        time = time_of(text)
        self._since = time if time is not None else self._since
        stream = self._streams.setdefault(rank if len(self._streams) < _STREAMS else None, Tracebacks())
        known = len(stream.done)
        inside = stream.feed(number, text)
        self._reports.feed(number, text)
        progress = self._progress.setdefault(rank if len(self._progress) < _STREAMS else None, Progress())
        if not inside:
            progress.feed(text)
        if len(stream.done) > known:
            event: Event | None = of_exception(stream.done[-1], self._index)
        else:
            event = None if inside else self._plain(number, text)
            if event and self._adopted(event, stream):
                return
        if event:
            event.node = event.node or node
            self._add(event, whose if event.rank is None else event.rank, time, progress)

    def _adopted(self, event: Event, stream: Tracebacks) -> bool:
        """Whether the line is of the message of the exception before it, which itself said nothing of its cause."""
        last = next((each for each in reversed(self._own) if each.raised), None)
        if not last or not last.raised or last.raised not in stream.done[-1:] or not last.generic:
            return False
        if event.number - last.number > _MESSAGE or _LAUNCHER.search(event.text) or event.cause == "script-error":
            return False
        if event.kind != "primary" and not (event.kind == "symptom" and last.raised.kind.endswith("ImportError")):
            return False
        last.cause, last.generic, last.sure = event.cause, False, False
        return True

    def _plain(self, number: int, text: str) -> Event | None:
        if text.startswith("srunddp: ") and (event := ours(number, text, self._index)):
            return event
        sign = table().read(text)
        return _of_sign(sign, self._index, number, text) if sign and sign.kind != "noise" else None

    def _add(self, event: Event, rank: int | None, time: float | None, progress: Progress) -> None:
        event.rank, event.time, event.since = rank, time, self._since
        places = self._places.setdefault((event.cause, event.kind, rank, event.generic), [])
        if len(places) < _KEPT:
            places.append(len(self._own))
            self._own.append(event)
            self._counted.append((progress, progress.count))
        else:  # the last may be the one that mattered
            self._own[places[-1]], self._counted[places[-1]] = event, (progress, progress.count)


def _of_sign(sign: Sign, file: int, number: int, text: str) -> Event:
    handled = bool(_HANDLED.search(text)) and sign.kind != "ending"
    return Event(sign.id, sign.kind, sign.sure, file, number, text, late=sign.late, handled=handled)
