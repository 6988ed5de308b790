"""Which of all that was said came first, and what followed from it."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from srunddp.triage.collect import Evidence
from srunddp.triage.event import Event, earliest, surely_before
from srunddp.triage.launcher_reports import Report
from srunddp.triage.rules import AUTHORITY, ENDED, PEER, set_aside
from srunddp.triage.signatures import table

_STILL = 1800.0  # seconds without a step
_WARNING = re.compile(r"\[W\d*|(?<!NCCL )\bWARN(?:ING)?\b|Warning: ")
_OF_PEERS = ("collective-timeout", "network-unreachable", "ranks-missing", "nccl-internal")
_MISSING_PEERS = ("ranks-missing", "network-unreachable")
_WHY_NOT = ("name-not-resolved", "no-such-interface", "loopback-address", "address-in-use", "network-unreachable")
_UNSPECIFIC = ("rank-killed", "unknown", "script-error")
_TELLS_LITTLE = (*_UNSPECIFIC, "collective-timeout", "ranks-missing")
# What several processes do to one another that take themselves for the only one.
_COLLISIONS = {
    "address-in-use", "checkpoint-mismatch", "cuda-out-of-memory", "file-missing", "invalid-device", "script-error",
}  # fmt: skip
_OF_SLURM = re.compile(r"slurmstepd|srun: |\*\*\* (?:JOB|STEP) ")
# What a script hands a library.
_OF_DATA = re.compile(r"shape|size|dimension|batch|label|range|argument|CUDA|index|key|match")


@dataclass
class Diagnosis:
    """What failed first.

    Attributes:
        cause: an id of the table; None where nothing failed.
        certainty: ``certain``, ``likely`` or ``unknown``.
        first: what it was told by, if anything; rank, node: whose.
        followed: what came of it; set_aside: what a rule says that it is no failure by itself.
        victim: first only tells of somebody else's end.
        seen, silent: ranks that spoke, and those that were expected and did not.
    """

    cause: str | None
    certainty: str
    first: Event | None = None
    followed: list[Event] = field(default_factory=list)
    set_aside: list[Event] = field(default_factory=list)
    rank: int | None = None
    node: str | None = None
    world_size: int | None = None
    seen: list[int] = field(default_factory=list)
    silent: list[int] = field(default_factory=list)
    why: str = ""
    victim: bool = False


def diagnose(evidence: Evidence) -> Diagnosis:
    """What failed first, by what the logs tell; which ranks have no line."""
    standing, observed = set_aside(evidence), evidence.observed
    found = _find_cause(standing, evidence)
    found.world_size, found.seen = observed.world_size, sorted(observed.seen)
    if found.world_size and found.seen:
        found.silent = [rank for rank in range(found.world_size) if rank not in observed.seen]
    if found.first:
        _tell_whose(found, found.first, standing, evidence)
    others = [each for each in standing if each is not found.first and each.kind != "word"]
    for each in others:
        each.rule = next((rule.name for rule in (ENDED, PEER) if rule.fits(each, evidence)), "")
    found.followed = [each for each in others if not each.rule]
    told = [each for each in evidence.events if each.rule and each.kind != "word" and each is not found.first]
    found.set_aside = told + list(_victims(evidence))
    return found


def _victims(evidence: Evidence) -> Iterable[Event]:
    """The ends that a launcher reports of ranks that it ended itself."""
    for file, reports in evidence.reports.items():
        for report in reports.found:
            if report.is_victim and report.code:
                yield _of_report(report, file, ENDED.name)


def _of_report(report: Report, file: int, rule: str = "") -> Event:
    """What the end that a launcher reports says by itself."""
    cause = "rank-killed" if report.signal not in (0, 6) else "module-missing" if report.code == 127 else "unknown"
    rank = report.ranks[0] if report.ranks else None
    return Event(cause, "symptom", False, file, report.number, report.text, rank, report.node, rule=rule)


def _find_cause(standing: list[Event], evidence: Evidence) -> Diagnosis:
    aside = [event for event in evidence.events if event.rule]
    if not evidence.report and all(event.kind == "word" for event in standing):
        return _from_nothing(evidence)
    found = _from_srunddp(standing) or _from_standing(standing, aside, evidence)
    if found.cause is None:
        return found
    if behind := _explaining(aside, found.cause, found.first):
        return Diagnosis(behind.cause, "likely", behind)
    return found


def _from_standing(standing: list[Event], aside: list[Event], evidence: Evidence) -> Diagnosis:
    report, alone = evidence.report, evidence.observed.ones > 1
    if report and (end := _of_report(report[1], report[0])).cause != "unknown":
        standing = [*standing, end]
    primary, symptoms, endings = (
        [event for event in standing if event.kind == kind] for kind in ("primary", "symptom", "ending")
    )
    endings = [event for event in endings if event.sure or not report]
    if alone and primary and {event.cause for event in primary} <= _COLLISIONS:
        return Diagnosis("world-of-one", "likely", earliest(primary), why="each process took itself for rank 0 of 1")
    if primary:
        found = _from_primary(primary, symptoms, endings, evidence)
        if found.first in primary and found.first and _is_certain(found.first, [*standing, *aside], evidence):
            found.certainty = "certain"
        return found
    if symptoms or endings:
        return _from_symptoms_and_endings(symptoms, endings, evidence)
    return _from_peers(standing, evidence)


def _from_srunddp(standing: Sequence[Event]) -> Diagnosis | None:
    """By srunddp's own lines: it knows who was first."""
    primary = [event for event in standing if event.ours and event.kind == "primary"]
    named = [event for event in primary if event.rank is not None] or primary
    if not named:
        return None
    event = min(named, key=lambda each: (each.cause == "unknown", each.generic))
    if event.cause == "rank-killed" or re.search(r"sys\.exit|the process ended", event.text):
        theirs = [each for each in standing if each.kind == "primary" and not each.ours and each.cause != event.cause]
        if why := next((each for each in theirs if each.late or each.rank in (event.rank, None)), None):
            return Diagnosis(why.cause, "likely", why, rank=event.rank, node=event.node)
    return Diagnosis(event.cause, "certain" if event.sure else "likely", event) if event.cause != "unknown" else None


def _from_nothing(evidence: Evidence) -> Diagnosis:
    """Where nothing failed: whether a log says that it went well."""
    if not evidence.lines:
        return Diagnosis("unknown", "unknown", why="the logs are empty")
    if evidence.observed.ones > 1:
        return Diagnosis("world-of-one", "likely", why=f"{evidence.observed.ones} processes say that they are alone")
    if evidence.finished and not (evidence.cut and not evidence.well):
        return Diagnosis(None, "likely")
    who, text = evidence.speaker
    why = f"no failure found, and no end either; last words: {who}: {text!r}"
    return Diagnosis("unknown", "unknown", why=why)


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


def _from_symptoms_and_endings(symptoms: Sequence[Event], endings: Sequence[Event], evidence: Evidence) -> Diagnosis:
    """Without a primary sign: an end that the launcher tells, unless something else went wrong before it."""
    sure = [event for event in endings if event.sure]
    lesser = [event for event in symptoms if event.cause not in ("unknown", "script-error")] or list(symptoms)
    if not sure:
        return _from_symptoms(lesser) if lesser else Diagnosis(endings[0].cause, "likely", endings[0])
    end = earliest(sure)
    telling = [event for event in lesser if event.cause != "rank-killed" and not _WARNING.search(event.text, 0, 60)]
    if before := [event for event in telling if surely_before(event, end)]:
        return Diagnosis(earliest(before).cause, "likely", earliest(before))
    return Diagnosis(end.cause, _certainty(end, evidence), end)


def _certainty(end: Event, evidence: Evidence) -> str:
    """Why somebody cancelled a job, only they know; and a run that stood still was ended by more than its limit."""
    still = end.time is not None and evidence.moved is not None and end.time - evidence.moved > _STILL
    if evidence.report or (end.cause == "time-limit" and (still or not any(evidence.steps.values()))):
        return "likely"
    return "certain" if end.sure and end.cause != "cancelled" and _OF_SLURM.search(end.text) else "likely"


def _from_symptoms(symptoms: Sequence[Event]) -> Diagnosis:
    first = earliest(symptoms)
    killed = next((event for event in symptoms if event.cause == "rank-killed"), None)
    if killed and first.cause in _OF_PEERS:  # peers of a killed rank time out, or cannot reach it
        first = killed
    if first.cause in _MISSING_PEERS:  # whoever could not reach rank 0 did not come, and a line may say why
        why = next((event for why in _WHY_NOT for event in symptoms if event.cause == why), first)
        raised = [event for event in symptoms if event.raised and event.cause in _MISSING_PEERS]
        if raised and why.cause != first.cause and not why.raised:
            return Diagnosis(why.cause, "likely", earliest(raised), why=why.text)
        first = why
    return Diagnosis(first.cause, "unknown" if first.cause == "unknown" else "likely", first)


def _from_peers(standing: Sequence[Event], evidence: Evidence) -> Diagnosis:
    """From launchers' reports and what peers tell of an end: by the rank that all missed, or that ended first."""
    report, observed = evidence.report, evidence.observed
    secondary = [event for event in standing if event.kind == "secondary"]
    victims = {event.rank for event in secondary if event.raised and event.rank is not None}
    own = [each for each in secondary if not (each.raised and each.raised.kind.endswith(("ChildFailedError", "Exit")))]
    rank = report[1].ranks[0] if report and report[1].ranks else None
    if rank in victims or rank is None:
        left = observed.seen - victims - _reported(evidence)
        rank = _sole(victims, evidence)
        if report and left and own and not report[1].signal and (rank is None or rank in left):
            why = "a rank left without an error"
            rank = min(left) if len(left) == 1 else None
            return Diagnosis("collective-mismatch", "likely", earliest(own), rank=rank, why=why, victim=True)
        report = report if report and rank in report[1].ranks else None
    ends = [*secondary, *([_of_report(report[1], report[0])] if report else [])]
    words = [each for each in standing if each.kind == "word" and each.rank in (None, rank)]
    words = [each for each in words if not any(surely_before(end, each) for end in ends)]
    if words:
        return Diagnosis("script-error", "likely", words[-1], rank=rank)
    first = _of_report(report[1], report[0]) if report else earliest(own) if own else None
    return Diagnosis("unknown", "unknown", first, rank=rank, victim=report is None)


def _sole(victims: Iterable[int | None], evidence: Evidence) -> int | None:
    """The one rank that is not among those that another's end has reached."""
    victims = set(victims)
    expected = set(range(evidence.observed.world_size or 0)) or evidence.observed.seen
    others = expected - victims
    return min(others) if victims and len(others) == 1 else None


def _tell_whose(found: Diagnosis, first: Event, standing: Sequence[Event], evidence: Evidence) -> None:
    """Rank and node of the first failure: by its line, its launcher's report, or the peers that tell of its end."""
    observed = evidence.observed
    peers = {each.rank for each in standing if each.kind == "secondary" and each.raised}
    if first.cause == "collective-timeout":
        peers = {each.rank for each in standing if each.cause == first.cause}
        found.rank = _sole(peers - {None}, evidence)
        found.victim = found.rank not in (None, first.rank)
    if found.rank is None and first.rank is None and not found.victim:
        found.rank = _sole(peers - {None}, evidence)
        if found.rank is None and (report := _sole_report(standing, evidence)):
            found.rank = report.ranks[0]
        if found.rank is None and not evidence.report:
            found.rank = min(observed.seen) if len(observed.seen) == 1 else None
    if found.rank is None and not found.victim:
        found.rank = first.rank
    if found.rank is None and found.certainty == "certain" and first.kind != "ending":
        alike = sum(each.text == first.text for each in standing) > 1 or first.ours
        found.certainty = "certain" if alike or len(observed.seen | _reported(evidence)) < 2 else "likely"
    found.node = first.node or found.node or observed.nodes.get(-1 if found.rank is None else found.rank)


def _reported(evidence: Evidence) -> set[int]:
    return {rank for reports in evidence.reports.values() for each in reports.found for rank in each.ranks}


def _sole_report(standing: Sequence[Event], evidence: Evidence) -> Report | None:
    """The one rank that did not end well by itself, where launchers report just one; or the first of several that
    told nothing of a peer's end, where others did."""
    every = [each for reports in evidence.reports.values() for each in reports.found]
    own = [each for each in every if each.ranks and not each.is_victim]
    if len({rank for each in own for rank in each.ranks}) == 1:
        return own[0]
    peers = {each.rank for each in standing if each.raised and (each.kind == "secondary" or each.cause in _OF_PEERS)}
    own = [each for each in own if each.root or (peers and len(each.ranks) == 1 and each.ranks[0] not in peers)]
    return next((each for each in own if each.root), own[0] if own else None)


def _explaining(aside: list[Event], cause: str, first: Event | None) -> Event | None:
    """What was said before, more quietly, of a failure that does not tell its cause."""
    if cause not in _TELLS_LITTLE and not (first and not first.sure):
        return None
    what = cause
    if first and cause in ("script-error", "unknown"):
        what = f"{cause}\n{first.text}\n{_below(first)}"
    for event in aside:
        behind = table().causes[event.cause].behind
        if event.rule == "launcher-notice" or event.cause == cause:
            continue
        if first and cause != "unknown" and surely_before(first, event):
            continue
        if behind.search(what) if behind else cause == "unknown" and event.kind == "primary" and not event.progress:
            return event
    return None


def _below(first: Event) -> str:
    """Where an exception came from, as far as that may matter: what the script surely raised itself says it all."""
    if not first.raised or first.sure:
        return ""
    code = first.raised.code.rpartition("\n")[2]
    return code if first.raised.inner or _OF_DATA.search(first.text) else f"{code}\nin a library"


def _is_certain(first: Event, others: list[Event], evidence: Evidence) -> bool:
    """Nothing contradicts it, and two signs agree: a traceback that nobody caught, and the launcher's report or that
    its process said no more. Slurm's and the kernel's own word need no other."""
    if not first.sure or first.progress or evidence.observed.ones > 1:
        return False
    if any(_contradicts(each, first) for each in others):
        return False
    if AUTHORITY.search(first.text, 0, 120):
        return first.file not in evidence.finished
    if not first.raised or not first.raised.top:
        return False
    if report := evidence.report:
        return first.rank is None or not report[1].ranks or first.rank in report[1].ranks
    return first.file not in evidence.finished


def _contradicts(other: Event, first: Event) -> bool:
    if other is first or other.cause == first.cause or other.kind == "word":
        return False
    if other.kind == "primary" or (other.kind == "ending" and other.sure):
        return True
    if other.kind == "secondary":
        return first.generic and surely_before(other, first)
    return other.cause not in ("unknown", "script-error") and not surely_before(first, other)
