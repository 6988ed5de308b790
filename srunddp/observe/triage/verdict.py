"""Which of all that was said came first, and what followed from it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from srunddp.observe.triage.event import Event
from srunddp.observe.triage.events import Story
from srunddp.observe.triage.reports import Report

_GOES_ON = 3  # steps after something: it did not end the run
_MARGIN = 5.0  # seconds by which clocks of nodes may differ
_WARNING = re.compile(r"\[W\d*|(?<!NCCL )\bWARN(?:ING)?\b|Warning: ")
_WAITS = re.compile(r"^srunddp: waiting|Waiting in store based barrier")
_OF_PEERS = ("collective-timeout", "network-unreachable", "ranks-missing", "nccl-internal")
_SAY_LITTLE = ("rank-killed", "unknown", "script-error")
_CRASH = (4, 7, 8, 9, 11)


@dataclass
class Verdict:
    """What failed first.

    Attributes:
        cause: an id of the table; None where nothing failed.
        certainty: ``certain``, ``likely`` or ``unknown``.
        first: what it was told by, if anything; rank, node: whose.
        followed: what came of it.
        seen, silent: ranks that spoke, and those that were expected and did not.
    """

    cause: str | None
    certainty: str
    first: Event | None = None
    followed: list[Event] = field(default_factory=list)
    rank: int | None = None
    node: str | None = None
    world_size: int | None = None
    seen: list[int] = field(default_factory=list)
    silent: list[int] = field(default_factory=list)
    why: str = ""


def judge(story: Story) -> Verdict:
    """The verdict upon what the logs tell."""
    verdict = _judge(story)
    crowd = story.crowd
    verdict.world_size, verdict.seen = crowd.world_size, sorted(crowd.seen)
    if verdict.world_size and verdict.seen:
        verdict.silent = [rank for rank in range(verdict.world_size) if rank not in crowd.seen]
    if verdict.first:
        if verdict.rank is None and verdict.first.rank is None and (told := _sole_report(story)):
            verdict.rank, verdict.node = told.ranks[0], told.node
        verdict.rank = verdict.first.rank if verdict.rank is None else verdict.rank
        verdict.node = (
            verdict.first.node or verdict.node or crowd.nodes.get(-1 if verdict.rank is None else verdict.rank)
        )
        verdict.followed = [each for each in story.events if each is not verdict.first and each.kind != "noise"]
    return verdict


def _judge(story: Story) -> Verdict:
    events = [event for event in story.events if event.kind != "noise"]
    report = _first_report(story)
    ours = _own_verdict(events)
    if ours:
        return ours
    standing = [event for event in events if not _passed(event, story, report)]
    if report:
        standing += _of_report(report)
    if not standing and not report:
        return _nothing(story)
    primary, symptoms, endings, echoes = (
        [event for event in standing if event.kind == kind] for kind in ("primary", "symptom", "ending", "secondary")
    )
    endings = [event for event in endings if event.sure or not (report and not report[1].is_victim)]
    if story.crowd.ones > 1 and {event.cause for event in primary} == {"address-in-use"}:
        return Verdict("world-of-one", "likely", primary[0], why="each process took itself for rank 0 of 1")
    if primary:
        return _of_primary(primary, symptoms, endings, echoes)
    if story.crowd.ones > 1 and not symptoms and not endings:
        return _nothing(story)
    if symptoms or endings:
        return _of_lesser(symptoms, endings, bool(report and not report[1].is_victim))
    return _of_echoes(echoes, report, story)


def _own_verdict(events: Sequence[Event]) -> Verdict | None:
    """srunddp's own: it knows who was first."""
    told = [event for event in events if event.ours and event.kind == "primary"]
    named = [event for event in told if event.rank is not None] or told
    if named:
        event = min(named, key=lambda each: (each.cause == "unknown", each.generic))
        if why := _behind(event, events):
            return Verdict(why.cause, "likely", why, rank=event.rank, node=event.node)
        if event.cause != "unknown":
            return Verdict(event.cause, "certain" if event.sure else "likely", event)
    return None


def _behind(event: Event, events: Sequence[Event]) -> Event | None:
    """What tells why a rank was killed, or left with an exit code alone."""
    if event.cause != "rank-killed" and not re.search(r"sys\.exit|the process ended", event.text):
        return None
    told = [each for each in events if each.kind == "primary" and not each.ours and each.progress < _GOES_ON]
    theirs = [each for each in told if each.cause != event.cause and (each.late or each.rank in (event.rank, None))]
    return next(iter(theirs), None)


def _passed(event: Event, story: Story, report: tuple[int, Report] | None) -> bool:
    """Whether the run went on after it, or whoever wrote the line says that it will."""
    if event.kind == "ending" or event.late or event.ours:
        return False
    if event.progress >= _GOES_ON or (_WAITS.search(event.text) and (event.progress or 0 in story.crowd.worlds)):
        return True
    if event.kind == "secondary" and _WARNING.search(event.text, 0, 60) and not event.raised and not report:
        return True
    if event.handled and not _WAITS.search(event.text):
        return not report or event.kind == "secondary"
    # Echoes at the end of a run that went well.
    ended_well = event.file in story.finished or (story.finished and not report)
    if not ended_well or report:
        return False
    return event.progress > 0 if event.raised else event.kind in ("symptom", "secondary")


def _nothing(story: Story) -> Verdict:
    if not story.lines:
        return Verdict("unknown", "unknown", why="the logs are empty")
    if story.crowd.ones > 1:
        return Verdict("world-of-one", "likely", why=f"{story.crowd.ones} processes say that they are alone")
    if story.stopped and not story.finished:
        return Verdict("unknown", "unknown", why=f"the log stops at {story.stopped!r}")
    return Verdict(None, "likely")


def _first_report(story: Story) -> tuple[int, Report] | None:
    told = [(index, first) for index, reports in story.reports.items() if (first := reports.first())]
    return min(told, key=lambda each: not each[1].root, default=None)


def _sole_report(story: Story) -> Report | None:
    """The one rank that did not end well by itself, where launchers report just one."""
    told = [each for reports in story.reports.values() for each in reports.found if each.ranks and not each.is_victim]
    ranks = {rank for each in told for rank in each.ranks}
    return told[0] if len(ranks) == 1 else next((each for each in told if each.root), None)


def _of_report(told: tuple[int, Report]) -> list[Event]:
    """What the first end that a launcher reports says by itself."""
    index, report = told
    cause = "rank-killed" if report.signal in _CRASH else "module-missing" if report.code == 127 else ""
    if not cause:
        return []
    rank = report.ranks[0] if report.ranks else None
    return [Event(cause, "symptom", False, index, report.number, report.text, rank, report.node)]


def _of_primary(
    primary: Sequence[Event], symptoms: Sequence[Event], endings: Sequence[Event], echoes: Sequence[Event]
) -> Verdict:
    first = _first_of(primary)
    for before in (*endings, *symptoms):
        if first.late or before.cause in _SAY_LITTLE or not _surely_before(before, first):
            continue
        if before.kind == "ending":
            return Verdict(before.cause, _certainty(before), before)
        if before.time is not None and first.time is not None:
            return Verdict(before.cause, "likely", before)
    return Verdict(first.cause, "certain" if _is_certain(first, primary, endings, echoes) else "likely", first)


def _first_of(primary: Sequence[Event]) -> Event:
    """The earliest; what is told at the end of a job, whenever it happened, is beaten by what is surely a cause."""
    first = earliest(primary)
    late = [event for event in primary if event.late]
    if late and first.generic:
        return late[0]
    others = [event for event in primary if event.sure and not event.late and not event.generic]
    return earliest(others) if first.late and others else first


def _is_certain(first: Event, primary: Sequence[Event], endings: Sequence[Event], echoes: Sequence[Event]) -> bool:
    if not first.sure or any(event.cause != first.cause for event in primary):
        return False
    if any(event.sure for event in endings):
        return False
    if not first.generic:
        return True
    return first.raised is not None and not any(_surely_before(echo, first) for echo in echoes)


def _of_lesser(symptoms: Sequence[Event], endings: Sequence[Event], reported: bool) -> Verdict:
    """Without a primary sign: an end that the launcher tells, unless something else went wrong before it."""
    sure = [event for event in endings if event.sure]
    lesser = [event for event in symptoms if event.cause not in ("unknown", "script-error")] or list(symptoms)
    if not sure:
        return _of_symptoms(lesser) if lesser else Verdict(endings[0].cause, "likely", endings[0])
    end = earliest(sure)
    telling = [event for event in lesser if event.cause != "rank-killed" and not _WARNING.search(event.text, 0, 60)]
    if before := [event for event in telling if _surely_before(event, end)]:
        return Verdict(earliest(before).cause, "likely", earliest(before))
    return Verdict(end.cause, "likely" if reported else _certainty(end), end)


def _certainty(end: Event) -> str:
    """Why somebody cancelled a job, only they know: it may have hung."""
    return "certain" if end.sure and end.cause != "cancelled" else "likely"


def _of_symptoms(symptoms: Sequence[Event]) -> Verdict:
    first = earliest(symptoms)
    killed = next((event for event in symptoms if event.cause == "rank-killed"), None)
    # Peers of a killed rank time out, or cannot reach it.
    if killed and first.cause in _OF_PEERS and not _surely_before(first, killed, _MARGIN):
        first = killed
    if first.cause == "ranks-missing":  # whoever could not reach rank 0 is the one that did not come
        first = next((event for event in symptoms if event.cause == "network-unreachable"), first)
    return Verdict(first.cause, "unknown" if first.cause == "unknown" else "likely", first)


def _of_echoes(echoes: Sequence[Event], told: tuple[int, Report] | None, story: Story) -> Verdict:
    raised = [event for event in echoes if event.raised and event.rank is not None]
    own = [event for event in echoes if not (event.raised and event.raised.kind.endswith(("ChildFailedError", "Exit")))]
    if told and raised and len(story.crowd.seen) > 1:
        report = told[1]
        reported = {rank for reports in story.reports.values() for each in reports.found for rank in each.ranks}
        others = story.crowd.seen - {event.rank for event in raised} - reported
        # Whoever the launcher heard of first only missed somebody, who must have left without an error.
        if others and report.ranks and report.ranks[0] in {event.rank for event in raised} and not report.signal:
            return Verdict("collective-mismatch", "likely", earliest(raised), why="a rank left without an error")
    rank = told[1].ranks[0] if told and told[1].ranks else None
    node = told[1].node if told else None
    return Verdict("unknown", "unknown", earliest(own) if own else None, rank=rank, node=node)


def earliest(events: Iterable[Event]) -> Event:
    """The first by their times where two have one, else by file and place."""
    chosen, *others = events
    for event in others:
        if _before(event, chosen):
            chosen = event
    return chosen


def _before(one: Event, other: Event) -> bool:
    if one.file == other.file:
        if one.time is not None and other.time is not None and one.time != other.time:
            return one.time < other.time
        return one.number < other.number
    ours, theirs = (event.time if event.time is not None else event.since for event in (one, other))
    if ours is not None and theirs is not None and ours != theirs:
        return ours < theirs
    unlike = (one.rank is None, one.rank or 0, one.file), (other.rank is None, other.rank or 0, other.file)
    return unlike[0] < unlike[1]


def _surely_before(one: Event, other: Event, margin: float = 0.0) -> bool:
    if one.time is not None and other.time is not None and (one.file != other.file or margin):
        return one.time + max(margin, _MARGIN if one.file != other.file else 0.0) < other.time
    return one.file == other.file and one.number < other.number
