"""Which of all that was said came first, and what followed from it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from srunddp.triage.collect import GOES_ON, Evidence
from srunddp.triage.event import MARGIN, Event, earliest, surely_before
from srunddp.triage.launcher_reports import Report
from srunddp.triage.relevance import Told, explaining_event, first_report, is_certain, partition_relevant

_STILL = 1800.0  # seconds without a step
_WARNING = re.compile(r"\[W\d*|(?<!NCCL )\bWARN(?:ING)?\b|Warning: ")
_OF_PEERS = ("collective-timeout", "network-unreachable", "ranks-missing", "nccl-internal")
_WAITED = ("ranks-missing", "network-unreachable")
_WHY_NOT = ("name-not-resolved", "no-such-interface", "loopback-address", "address-in-use", "network-unreachable")
_SAY_LITTLE = ("rank-killed", "unknown", "script-error")
# What several processes do to one another that take themselves for the only one.
_COLLISIONS = {
    "address-in-use", "checkpoint-mismatch", "cuda-out-of-memory", "file-missing", "invalid-device", "script-error",
}  # fmt: skip
_OF_SLURM = re.compile(r"slurmstepd|srun: |\*\*\* (?:JOB|STEP) ")
_CRASH = (4, 7, 8, 9, 11)


@dataclass
class Diagnosis:
    """What failed first.

    Attributes:
        cause: an id of the table; None where nothing failed.
        certainty: ``certain``, ``likely`` or ``unknown``.
        first: what it was told by, if anything; rank, node: whose.
        followed: what came of it.
        victim: first only tells of somebody else's end.
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
    victim: bool = False


def diagnose(story: Evidence) -> Diagnosis:
    """The verdict upon what the logs tell."""
    verdict = _judge(story)
    crowd = story.crowd
    verdict.world_size, verdict.seen = crowd.world_size, sorted(crowd.seen)
    if verdict.world_size and verdict.seen:
        verdict.silent = [rank for rank in range(verdict.world_size) if rank not in crowd.seen]
    if verdict.first:
        if verdict.rank is None and verdict.first.rank is None and not verdict.victim and (told := _sole_report(story)):
            verdict.rank, verdict.node = told.ranks[0], told.node
        if verdict.rank is None and not verdict.victim:
            verdict.rank = verdict.first.rank
        verdict.node = (
            verdict.first.node or verdict.node or crowd.nodes.get(-1 if verdict.rank is None else verdict.rank)
        )
        verdict.followed = [each for each in story.events if each is not verdict.first and each.kind != "noise"]
    return verdict


def _judge(story: Evidence) -> Diagnosis:
    report = first_report(story)
    standing, weak = partition_relevant(story, report)
    ours = _own_verdict([event for event in standing if event.ours], [*standing, *weak])
    found = ours or _of_standing(standing, weak, story, report)
    if found.cause is None:
        return _unless_cut(found, story)
    if behind := explaining_event(weak, found.cause, found.first):
        return Diagnosis(behind.cause, "likely", behind)
    return found


def _of_standing(standing: list[Event], weak: list[Event], story: Evidence, report: Told | None) -> Diagnosis:
    if report:
        standing = standing + _of_report(report)
    if not standing and not report:
        return _nothing(story)
    primary, symptoms, endings, echoes = (
        [event for event in standing if event.kind == kind] for kind in ("primary", "symptom", "ending", "secondary")
    )
    endings = [event for event in endings if event.sure or not (report and not report[1].is_victim)]
    if story.crowd.ones > 1 and primary and {event.cause for event in primary} <= _COLLISIONS:
        return Diagnosis("world-of-one", "likely", earliest(primary), why="each process took itself for rank 0 of 1")
    if primary:
        found = _of_primary(primary, symptoms, endings, story)
        if found.first in primary and found.first and is_certain(found.first, story, report, standing, weak):
            found.certainty = "certain"
        return found
    if story.crowd.ones > 1 and not symptoms and not endings:
        return _nothing(story)
    if symptoms or endings:
        return _of_lesser(symptoms, endings, bool(report and not report[1].is_victim), story)
    return _of_echoes(echoes, report, story)


def _own_verdict(told: Sequence[Event], events: Sequence[Event]) -> Diagnosis | None:
    """srunddp's own: it knows who was first."""
    told = [event for event in told if event.kind == "primary"]
    named = [event for event in told if event.rank is not None] or told
    if named:
        event = min(named, key=lambda each: (each.cause == "unknown", each.generic))
        if why := _behind(event, events):
            return Diagnosis(why.cause, "likely", why, rank=event.rank, node=event.node)
        if event.cause != "unknown":
            return Diagnosis(event.cause, "certain" if event.sure else "likely", event)
    return None


def _behind(event: Event, events: Sequence[Event]) -> Event | None:
    """What tells why a rank was killed, or left with an exit code alone."""
    if event.cause != "rank-killed" and not re.search(r"sys\.exit|the process ended", event.text):
        return None
    told = [each for each in events if each.kind == "primary" and not each.ours and each.progress < GOES_ON]
    theirs = [each for each in told if each.cause != event.cause and (each.late or each.rank in (event.rank, None))]
    return next(iter(theirs), None)


def _nothing(story: Evidence) -> Diagnosis:
    if not story.lines:
        return Diagnosis("unknown", "unknown", why="the logs are empty")
    if story.crowd.ones > 1:
        return Diagnosis("world-of-one", "likely", why=f"{story.crowd.ones} processes say that they are alone")
    if story.stopped and not story.finished:
        return Diagnosis("unknown", "unknown", why=f"the log stops at {story.stopped!r}")
    return Diagnosis(None, "likely")


def _unless_cut(found: Diagnosis, story: Evidence) -> Diagnosis:
    """Where nothing failed: whether the logs come to an end at all."""
    if story.finished or (story.ended and not story.cut):
        return found
    who, text = story.speaker
    return Diagnosis("unknown", "unknown", why=f"the log just ends, the last word is {who}'s: {text!r}")


def _sole_report(story: Evidence) -> Report | None:
    """The one rank that did not end well by itself, where launchers report just one."""
    told = [each for reports in story.reports.values() for each in reports.found if each.ranks and not each.is_victim]
    ranks = {rank for each in told for rank in each.ranks}
    return told[0] if len(ranks) == 1 else next((each for each in told if each.root), None)


def _of_report(told: Told) -> list[Event]:
    """What the first end that a launcher reports says by itself."""
    index, report = told
    cause = "rank-killed" if report.signal in _CRASH else "module-missing" if report.code == 127 else ""
    if not cause:
        return []
    rank = report.ranks[0] if report.ranks else None
    return [Event(cause, "symptom", False, index, report.number, report.text, rank, report.node)]


def _of_primary(
    primary: Sequence[Event], symptoms: Sequence[Event], endings: Sequence[Event], story: Evidence
) -> Diagnosis:
    first = _first_of(primary)
    for before in (*endings, *symptoms):
        if first.late or before.cause in _SAY_LITTLE or not surely_before(before, first):
            continue
        if before.kind == "ending":
            return Diagnosis(before.cause, _certainty(before, story), before)
        if before.time is not None and first.time is not None:
            return Diagnosis(before.cause, "likely", before)
    # The same was told by others before, with less weight.
    same = [each for each in symptoms if each.cause == first.cause and surely_before(each, first)]
    return Diagnosis(first.cause, "likely", earliest([first, *same]))


def _first_of(primary: Sequence[Event]) -> Event:
    """The earliest; what is told at the end of a job, whenever it happened, is beaten by what is surely a cause."""
    first = earliest(primary)
    late = [event for event in primary if event.late]
    if late and first.generic:
        return late[0]
    others = [event for event in primary if event.sure and not event.late and not event.generic]
    return earliest(others) if first.late and others else first


def _of_lesser(symptoms: Sequence[Event], endings: Sequence[Event], reported: bool, story: Evidence) -> Diagnosis:
    """Without a primary sign: an end that the launcher tells, unless something else went wrong before it."""
    sure = [event for event in endings if event.sure]
    lesser = [event for event in symptoms if event.cause not in ("unknown", "script-error")] or list(symptoms)
    if not sure:
        return _of_symptoms(lesser) if lesser else Diagnosis(endings[0].cause, "likely", endings[0])
    end = earliest(sure)
    telling = [event for event in lesser if event.cause != "rank-killed" and not _WARNING.search(event.text, 0, 60)]
    if before := [event for event in telling if surely_before(event, end)]:
        return Diagnosis(earliest(before).cause, "likely", earliest(before))
    return Diagnosis(end.cause, "likely" if reported else _certainty(end, story), end)


def _certainty(end: Event, story: Evidence) -> str:
    """Why somebody cancelled a job, only they know; and a run that stood still was ended by more than its limit."""
    still = end.time is not None and story.moved is not None and end.time - story.moved > _STILL
    if end.cause == "time-limit" and (still or not any(story.steps.values())):
        return "likely"
    return "certain" if end.sure and end.cause != "cancelled" and _OF_SLURM.search(end.text) else "likely"


def _of_symptoms(symptoms: Sequence[Event]) -> Diagnosis:
    first = earliest(symptoms)
    killed = next((event for event in symptoms if event.cause == "rank-killed"), None)
    # Peers of a killed rank time out, or cannot reach it.
    if killed and first.cause in _OF_PEERS and not surely_before(first, killed, MARGIN):
        first = killed
    if first.cause in _WAITED:  # whoever could not reach rank 0 is the one that did not come, and why may be told
        first = next((event for why in _WHY_NOT for event in symptoms if event.cause == why), first)
    return Diagnosis(first.cause, "unknown" if first.cause == "unknown" else "likely", first)


def _of_echoes(echoes: Sequence[Event], told: Told | None, story: Evidence) -> Diagnosis:
    raised = [event for event in echoes if event.raised and event.rank is not None]
    victims = {event.rank for event in echoes if event.rank is not None}
    own = [event for event in echoes if not (event.raised and event.raised.kind.endswith(("ChildFailedError", "Exit")))]
    if told and raised and len(story.crowd.seen) > 1:
        report = told[1]
        reported = {rank for reports in story.reports.values() for each in reports.found for rank in each.ranks}
        others = story.crowd.seen - victims - reported
        # Whoever the launcher heard of first only missed somebody, who must have left without an error.
        if others and report.ranks and report.ranks[0] in victims and not report.signal:
            left = min(others) if len(others) == 1 else None
            why = "a rank left without an error"
            return Diagnosis("collective-mismatch", "likely", earliest(raised), rank=left, why=why, victim=True)
    rank = told[1].ranks[0] if told and told[1].ranks else None
    if rank in victims or (
        rank is None and len(story.crowd.seen - victims) == 1
    ):  # whoever the launcher heard of first missed somebody else
        silent = story.crowd.seen - victims
        rank = min(silent) if len(silent) == 1 else None
        return Diagnosis("unknown", "unknown", earliest(own) if own else None, rank=rank, victim=True)
    return Diagnosis(
        "unknown", "unknown", earliest(own) if own else None, rank=rank, node=told[1].node if told else None
    )
