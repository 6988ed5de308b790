"""Which of all that was said came first, and what followed from it."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from srunddp.triage.collect import GOES_ON, Evidence
from srunddp.triage.event import MARGIN, Event, earliest, surely_before
from srunddp.triage.launcher_reports import Report
from srunddp.triage.relevance import FileReport, explaining_event, first_report, is_certain, partition_relevant

_STILL = 1800.0  # seconds without a step
_WARNING = re.compile(r"\[W\d*|(?<!NCCL )\bWARN(?:ING)?\b|Warning: ")
_OF_PEERS = ("collective-timeout", "network-unreachable", "ranks-missing", "nccl-internal")
_MISSING_PEERS = ("ranks-missing", "network-unreachable")
_WHY_NOT = ("name-not-resolved", "no-such-interface", "loopback-address", "address-in-use", "network-unreachable")
_UNSPECIFIC = ("rank-killed", "unknown", "script-error")
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


def diagnose(evidence: Evidence) -> Diagnosis:
    """What failed first, by what the logs tell; which ranks have no line."""
    found, observed = _find_cause(evidence), evidence.observed
    found.world_size, found.seen = observed.world_size, sorted(observed.seen)
    if found.world_size and found.seen:
        found.silent = [rank for rank in range(found.world_size) if rank not in observed.seen]
    if first := found.first:
        if found.rank is None and first.rank is None and not found.victim and (sole := _sole_report(evidence)):
            found.rank, found.node = sole.ranks[0], sole.node
        if found.rank is None and not found.victim:
            found.rank = first.rank
        found.node = first.node or found.node or observed.nodes.get(-1 if found.rank is None else found.rank)
        found.followed = [each for each in evidence.events if each is not first and each.kind != "noise"]
    return found


def _find_cause(evidence: Evidence) -> Diagnosis:
    report = first_report(evidence)
    relevant, weak = partition_relevant(evidence, report)
    ours = _from_srunddp([event for event in relevant if event.ours], [*relevant, *weak])
    found = ours or _from_relevant(relevant, weak, evidence, report)
    if found.cause is None:
        return _unless_cut(found, evidence)
    if behind := explaining_event(weak, found.cause, found.first):
        return Diagnosis(behind.cause, "likely", behind)
    return found


def _from_relevant(
    relevant: list[Event], weak: list[Event], evidence: Evidence, report: FileReport | None
) -> Diagnosis:
    if report:
        relevant = relevant + _events_of_report(report)
    if not relevant and not report:
        return _nothing(evidence)
    primary, symptoms, endings, secondary = (
        [event for event in relevant if event.kind == kind] for kind in ("primary", "symptom", "ending", "secondary")
    )
    endings = [event for event in endings if event.sure or not (report and not report[1].is_victim)]
    if evidence.observed.ones > 1 and primary and {event.cause for event in primary} <= _COLLISIONS:
        return Diagnosis("world-of-one", "likely", earliest(primary), why="each process took itself for rank 0 of 1")
    if primary:
        found = _from_primary(primary, symptoms, endings, evidence)
        if found.first in primary and found.first and is_certain(found.first, evidence, report, relevant, weak):
            found.certainty = "certain"
        return found
    if evidence.observed.ones > 1 and not symptoms and not endings:
        return _nothing(evidence)
    if symptoms or endings:
        return _from_symptoms_and_endings(symptoms, endings, bool(report and not report[1].is_victim), evidence)
    return _from_secondary(secondary, report, evidence)


def _from_srunddp(ours: Sequence[Event], events: Sequence[Event]) -> Diagnosis | None:
    """By srunddp's own lines: it knows who was first."""
    primary = [event for event in ours if event.kind == "primary"]
    named = [event for event in primary if event.rank is not None] or primary
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
    others = [each for each in events if each.kind == "primary" and not each.ours and each.progress < GOES_ON]
    theirs = (each for each in others if each.cause != event.cause and (each.late or each.rank in (event.rank, None)))
    return next(theirs, None)


def _nothing(evidence: Evidence) -> Diagnosis:
    if not evidence.lines:
        return Diagnosis("unknown", "unknown", why="the logs are empty")
    if evidence.observed.ones > 1:
        return Diagnosis("world-of-one", "likely", why=f"{evidence.observed.ones} processes say that they are alone")
    if evidence.stopped and not evidence.finished:
        return Diagnosis("unknown", "unknown", why=f"the log stops at {evidence.stopped!r}")
    return Diagnosis(None, "likely")


def _unless_cut(found: Diagnosis, evidence: Evidence) -> Diagnosis:
    """Where nothing failed: whether the logs come to an end at all."""
    if evidence.finished or (evidence.ended and not evidence.cut):
        return found
    who, text = evidence.speaker
    return Diagnosis("unknown", "unknown", why=f"the log just ends, the last word is {who}'s: {text!r}")


def _sole_report(evidence: Evidence) -> Report | None:
    """The one rank that did not end well by itself, where launchers report just one."""
    every = [each for reports in evidence.reports.values() for each in reports.found]
    own = [each for each in every if each.ranks and not each.is_victim]
    ranks = {rank for each in own for rank in each.ranks}
    return own[0] if len(ranks) == 1 else next((each for each in own if each.root), None)


def _events_of_report(reported: FileReport) -> list[Event]:
    """What the first end that a launcher reports says by itself."""
    index, report = reported
    cause = "rank-killed" if report.signal in _CRASH else "module-missing" if report.code == 127 else ""
    if not cause:
        return []
    rank = report.ranks[0] if report.ranks else None
    return [Event(cause, "symptom", False, index, report.number, report.text, rank, report.node)]


def _from_primary(
    primary: Sequence[Event], symptoms: Sequence[Event], endings: Sequence[Event], evidence: Evidence
) -> Diagnosis:
    first = _first_of(primary)
    for before in (*endings, *symptoms):
        if first.late or before.cause in _UNSPECIFIC or not surely_before(before, first):
            continue
        if before.kind == "ending":
            return Diagnosis(before.cause, _certainty(before, evidence), before)
        if before.time is not None and first.time is not None:
            return Diagnosis(before.cause, "likely", before)
    # The same was told by others before, with less weight.
    same = [each for each in symptoms if each.cause == first.cause and surely_before(each, first)]
    return Diagnosis(first.cause, "likely", earliest([first, *same]))


def _first_of(primary: Sequence[Event]) -> Event:
    """The earliest; what is told at the end of a job, whenever it happened, is beaten by what is surely a cause."""
    first = earliest(primary)
    if first.generic:
        return next((event for event in primary if event.late), first)
    others = [event for event in primary if event.sure and not event.late and not event.generic]
    return earliest(others) if first.late and others else first


def _from_symptoms_and_endings(
    symptoms: Sequence[Event], endings: Sequence[Event], reported: bool, evidence: Evidence
) -> Diagnosis:
    """Without a primary sign: an end that the launcher tells, unless something else went wrong before it."""
    sure = [event for event in endings if event.sure]
    lesser = [event for event in symptoms if event.cause not in ("unknown", "script-error")] or list(symptoms)
    if not sure:
        return _from_symptoms(lesser) if lesser else Diagnosis(endings[0].cause, "likely", endings[0])
    end = earliest(sure)
    telling = [event for event in lesser if event.cause != "rank-killed" and not _WARNING.search(event.text, 0, 60)]
    if before := [event for event in telling if surely_before(event, end)]:
        return Diagnosis(earliest(before).cause, "likely", earliest(before))
    return Diagnosis(end.cause, "likely" if reported else _certainty(end, evidence), end)


def _certainty(end: Event, evidence: Evidence) -> str:
    """Why somebody cancelled a job, only they know; and a run that stood still was ended by more than its limit."""
    still = end.time is not None and evidence.moved is not None and end.time - evidence.moved > _STILL
    if end.cause == "time-limit" and (still or not any(evidence.steps.values())):
        return "likely"
    return "certain" if end.sure and end.cause != "cancelled" and _OF_SLURM.search(end.text) else "likely"


def _from_symptoms(symptoms: Sequence[Event]) -> Diagnosis:
    first = earliest(symptoms)
    killed = next((event for event in symptoms if event.cause == "rank-killed"), None)
    # Peers of a killed rank time out, or cannot reach it.
    if killed and first.cause in _OF_PEERS and not surely_before(first, killed, MARGIN):
        first = killed
    if first.cause in _MISSING_PEERS:  # whoever could not reach rank 0 did not come, and a line may say why
        first = next((event for why in _WHY_NOT for event in symptoms if event.cause == why), first)
    return Diagnosis(first.cause, "unknown" if first.cause == "unknown" else "likely", first)


def _from_secondary(secondary: Sequence[Event], reported: FileReport | None, evidence: Evidence) -> Diagnosis:
    """From what only tells of a peer's end: the rank that all missed, where just one is left."""
    report, seen = reported[1] if reported else None, evidence.observed.seen
    raised = [event for event in secondary if event.raised and event.rank is not None]
    victims = {event.rank for event in secondary if event.rank is not None}
    if report and raised and len(seen) > 1:
        every = {rank for reports in evidence.reports.values() for each in reports.found for rank in each.ranks}
        others = seen - victims - every
        # Whoever the launcher heard of first only missed somebody, who must have left without an error.
        if others and report.ranks and report.ranks[0] in victims and not report.signal:
            left = min(others) if len(others) == 1 else None
            why = "a rank left without an error"
            return Diagnosis("collective-mismatch", "likely", earliest(raised), rank=left, why=why, victim=True)
    own = [each for each in secondary if not (each.raised and each.raised.kind.endswith(("ChildFailedError", "Exit")))]
    first = earliest(own) if own else None
    rank, silent = report.ranks[0] if report and report.ranks else None, seen - victims
    # Whoever the launcher heard of first missed somebody else.
    if rank in victims or (rank is None and len(silent) == 1):
        missed = min(silent) if len(silent) == 1 else None
        return Diagnosis("unknown", "unknown", first, rank=missed, victim=True)
    return Diagnosis("unknown", "unknown", first, rank=rank, node=report.node if report else None)
