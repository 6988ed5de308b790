"""Which of all that was said came first, and what followed from it."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from srunddp.triage.collect import Evidence
from srunddp.triage.event import Event, earliest, surely_before
from srunddp.triage.rules import AUTHORITY, PEER, set_aside
from srunddp.triage.signatures import table

_STILL = 1800.0  # seconds without a step
_OF_PEERS = ("collective-timeout", "network-unreachable", "ranks-missing", "nccl-internal")
_WHY_NOT = ("name-not-resolved", "no-such-interface", "loopback-address", "address-in-use")
_UNSPECIFIC = ("rank-killed", "unknown", "script-error")
# What several processes do to one another that take themselves for the only one.
_COLLISIONS = {
    "address-in-use", "checkpoint-mismatch", "cuda-out-of-memory", "file-missing", "invalid-device", "script-error",
}  # fmt: skip
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
    remaining, observed = set_aside(evidence), evidence.observed
    found = _find_cause(remaining, evidence)
    found.world_size, found.seen = observed.world_size, sorted(observed.seen)
    if found.seen:
        found.silent = [rank for rank in range(found.world_size or 0) if rank not in observed.seen]
    if found.first:
        _tell_whose(found, found.first, remaining, evidence)
    others = [each for each in evidence.events if each.kind not in ("word", "noise") and each is not found.first]
    for each in others:
        each.rule = each.rule or (PEER.name if PEER.fits(each, evidence) else "")
    found.followed = [each for each in others if not each.rule and not each.report]
    found.set_aside = [each for each in others if each.rule]
    return found


def _find_cause(remaining: list[Event], evidence: Evidence) -> Diagnosis:
    if all(event.kind == "word" for event in remaining):
        return _from_nothing(evidence)
    aside = [event for event in evidence.events if event.rule]
    found = _from_srunddp(remaining) or _from_remaining(remaining, aside, evidence)
    behind = _explaining(aside, found.cause or "", found.first)
    return Diagnosis(behind.cause, "likely", behind) if behind else found


def _from_nothing(evidence: Evidence) -> Diagnosis:
    """Where nothing failed: whether a log says that it went well."""
    if not evidence.lines:
        return Diagnosis("unknown", "unknown", why="the logs are empty")
    if evidence.observed.ones > 1:
        return Diagnosis("world-of-one", "likely", why=f"{evidence.observed.ones} processes say that they are alone")
    if evidence.finished and not (evidence.cut and not evidence.well):
        return Diagnosis(None, "likely")
    last = f"{evidence.speaker}: {evidence.last[evidence.speaker]!r}"
    why = f"no failure found, and no end either; last words: {last}"
    return Diagnosis("unknown", "unknown", why=why)


def _from_srunddp(remaining: Sequence[Event]) -> Diagnosis | None:
    """By srunddp's own lines: it knows who was first."""
    primary = [event for event in remaining if event.ours and event.kind == "primary"]
    named = [event for event in primary if event.rank is not None] or primary
    if not named:
        return None
    event = min(named, key=lambda each: (each.cause == "unknown", each.generic))
    if event.cause == "rank-killed" or re.search(r"sys\.exit|the process ended", event.text):
        theirs = [each for each in remaining if each.kind == "primary" and not each.ours and each.cause != event.cause]
        if why := next((each for each in theirs if each.late or each.rank in (event.rank, None)), None):
            return Diagnosis(why.cause, "likely", why, rank=event.rank, node=event.node)
    return Diagnosis(event.cause, "certain" if event.sure else "likely", event) if event.cause != "unknown" else None


def _from_remaining(remaining: list[Event], aside: list[Event], evidence: Evidence) -> Diagnosis:
    primary, symptoms, endings = (
        [event for event in remaining if event.kind == kind] for kind in ("primary", "symptom", "ending")
    )
    if evidence.report and evidence.report.cause != "unknown":
        symptoms.append(evidence.report)
    endings = [event for event in endings if event.sure or not evidence.report]
    if evidence.observed.ones > 1 and primary and {event.cause for event in primary} <= _COLLISIONS:
        return Diagnosis("world-of-one", "likely", earliest(primary), why="each process took itself for rank 0 of 1")
    if primary:
        found = _from_primary(primary, symptoms, endings, evidence)
        if found.first and found.first in primary and _is_certain(found.first, [*remaining, *aside], evidence):
            found.certainty = "certain"
        return found
    if symptoms or endings:
        return _from_symptoms_and_endings(symptoms, endings, evidence)
    return _from_peers(remaining, evidence)


def _from_primary(
    primary: Sequence[Event], symptoms: Sequence[Event], endings: Sequence[Event], evidence: Evidence
) -> Diagnosis:
    first = earliest(primary)
    earlier = [each for each in endings if surely_before(each, first)]
    earlier += [each for each in symptoms if each.time is not None and surely_before(each, first)]
    earlier = [each for each in earlier if each.cause not in _UNSPECIFIC and (each.kind == "ending" or first.time)]
    if earlier and not first.late:
        return Diagnosis(earlier[0].cause, _certainty(earlier[0], evidence), earlier[0])
    # The same was told by others before, with less weight.
    same = [each for each in symptoms if each.cause == first.cause and surely_before(each, first)]
    return Diagnosis(first.cause, "likely", earliest([first, *same]))


def _from_symptoms_and_endings(symptoms: Sequence[Event], endings: Sequence[Event], evidence: Evidence) -> Diagnosis:
    """Without a primary sign: an end that the launcher tells, unless something else went wrong before it."""
    sure = [event for event in endings if event.sure]
    symptoms = [event for event in symptoms if event.cause not in ("unknown", "script-error")] or symptoms
    if not sure:
        return _from_symptoms(symptoms) if symptoms else Diagnosis(endings[0].cause, "likely", endings[0])
    end = earliest(sure)
    before = [event for event in symptoms if event.cause != "rank-killed" and surely_before(event, end)]
    first = earliest(before) if before else end
    return Diagnosis(first.cause, _certainty(first, evidence), first)


def _certainty(end: Event, evidence: Evidence) -> str:
    """Why somebody cancelled a job, only they know; and a run that stood still was ended by more than its limit."""
    still = end.time is not None and evidence.moved is not None and end.time - evidence.moved > _STILL
    if evidence.report or (end.cause == "time-limit" and (still or not any(evidence.steps.values()))):
        return "likely"
    official = AUTHORITY.search(end.text, 0, 120)
    return "certain" if end.kind == "ending" and end.sure and end.cause != "cancelled" and official else "likely"


def _from_symptoms(symptoms: Sequence[Event]) -> Diagnosis:
    first = earliest(symptoms)
    if first.cause in _OF_PEERS:  # peers of a killed rank time out, or cannot reach it
        first = next((event for event in symptoms if event.cause == "rank-killed"), first)
    missing = [event for event in symptoms if event.cause in ("ranks-missing", "network-unreachable")]
    why = [event for cause in _WHY_NOT for event in symptoms if event.cause == cause]
    if first in missing and why:  # whoever could not reach rank 0 did not come, and a line may say why
        raised = [event for event in missing if event.raised and not why[0].raised]
        return Diagnosis(why[0].cause, "likely", earliest(raised or why[:1]), why=why[0].text if raised else "")
    return Diagnosis(first.cause, "unknown" if first.cause == "unknown" else "likely", first)


def _from_peers(remaining: Sequence[Event], evidence: Evidence) -> Diagnosis:
    """From launchers' reports and what peers tell of an end: by the rank that all missed, or that ended first."""
    report, seen = evidence.report, evidence.observed.seen
    secondary = [event for event in remaining if event.kind == "secondary"]
    victims = {event.rank for event in secondary if event.raised} - {None}
    own = [each for each in secondary if not (each.raised and each.raised.kind.endswith(("ChildFailedError", "Exit")))]
    rank = report.rank if report else None
    if rank in victims or rank is None:
        left = seen - victims - set().union(*(each.ranks for each in _ends(evidence)))
        rank = _sole(victims, evidence)
        if report and left and own and (rank is None or rank in left):
            rank = min(left) if len(left) == 1 else None
            why = "a rank left without an error"
            return Diagnosis("collective-mismatch", "likely", earliest(own), rank=rank, why=why, victim=True)
        report = report if report and rank == report.rank else None
    ends = [*secondary, *([report] if report else [])]
    words = [each for each in remaining if each.kind == "word" and each.rank in (None, rank) and each.progress < 2]
    if words := [each for each in words if not any(surely_before(end, each) for end in ends)]:
        return Diagnosis("script-error", "likely", words[-1], rank=rank)
    first = report or (earliest(own) if own else None)
    return Diagnosis("unknown", "unknown", first, rank=rank, victim=report is None)


def _tell_whose(found: Diagnosis, first: Event, remaining: Sequence[Event], evidence: Evidence) -> None:
    """Rank and node of the first failure: by its line, its launcher's report, or the peers that tell of its end."""
    observed = evidence.observed
    peers = {each.rank for each in remaining if each.kind == "secondary" and each.raised}
    if first.cause == "collective-timeout":
        found.rank = _sole({each.rank for each in remaining if each.cause == first.cause}, evidence)
        found.victim = found.rank not in (None, first.rank)
    if found.rank is None and not found.victim:
        found.rank = first.rank if first.rank is not None else _sole(peers, evidence)
        if found.rank is None and (report := _sole_report(remaining, evidence)):
            found.rank, found.node = report.rank, report.node
        if found.rank is None and first.raised and not evidence.report:
            missed = any(each.kind == "secondary" or each.cause in _OF_PEERS for each in remaining)
            ranks = set(range(observed.world_size or 0)) - observed.seen if missed else observed.seen
            found.rank = min(ranks) if len(ranks) == 1 else None
    if found.rank is None and found.certainty == "certain" and first.kind != "ending" and not first.ours:
        alike = sum(each.text == first.text for each in remaining) > 1
        known: set[int | None] = set().union(observed.seen, *(each.ranks for each in _ends(evidence)))
        found.certainty = "certain" if alike or len(known) < 2 else "likely"
    found.node = first.node or found.node or observed.nodes.get(-1 if found.rank is None else found.rank)


def _sole(victims: set[int | None], evidence: Evidence) -> int | None:
    """The one rank that is not among those that another's end has reached."""
    others = (set(range(evidence.observed.world_size or 0)) or evidence.observed.seen) - victims
    return min(others) if victims - {None} and len(others) == 1 else None


def _ends(evidence: Evidence) -> list[Event]:
    """What launchers report of ranks' ends."""
    return [event for event in evidence.events if event.report and event.report.code]


def _sole_report(remaining: Sequence[Event], evidence: Evidence) -> Event | None:
    """The one rank that did not end well by itself, where launchers report just one; or the first of several that
    told nothing of a peer's end, where others did."""
    own = [event for event in _ends(evidence) if not event.rule and event.rank is not None]
    if len(set().union(*(event.ranks for event in own))) == 1:
        return own[0]
    peers = {each.rank for each in remaining if each.kind == "secondary" or (each.raised and each.cause in _OF_PEERS)}
    own = [each for each in own if each.rank not in peers]
    one = [each for each in own if peers and len(each.ranks) == 1]
    return next((each for each in own if each.report and each.report.root), one[0] if one else None)


def _explaining(aside: list[Event], cause: str, first: Event | None) -> Event | None:
    """What was said before, more quietly, of a failure that does not tell its cause."""
    if cause not in (*_UNSPECIFIC, "collective-timeout", "ranks-missing") and (not first or first.sure):
        return None
    what = f"{cause}\n{first.text}\n{_below(first)}" if first and cause in ("script-error", "unknown") else cause
    for event in aside:
        behind = table().causes[event.cause].behind
        late = first and cause != "unknown" and surely_before(first, event)
        if event.rule == "launcher-notice" or event.cause == cause or late:
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
    others = [each for each in others if each.cause not in (first.cause, "unknown", "script-error")]
    if not first.sure or first.progress or evidence.observed.ones > 1:
        return False
    if not all(surely_before(first, each) for each in others):
        return False
    if not AUTHORITY.search(first.text, 0, 120):
        if not first.raised or not first.raised.top:
            return False
        if report := evidence.report:
            return None in (first.rank, report.rank) or first.rank in report.ranks
    return first.file not in evidence.finished
