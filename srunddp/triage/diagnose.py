"""Which of all that was said came first, and what followed from it."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from srunddp.triage.collect import GOES_ON, Evidence
from srunddp.triage.event import Event, earliest, surely_before
from srunddp.triage.rules import PEER, set_aside
from srunddp.triage.signatures import says, table

_STILL = 1800.0  # seconds without a line that tells a time
# What ranks tell that miss others, and not why those are missing.
_OF_PEERS = ("collective-timeout", "network-unreachable", "ranks-missing", "nccl-internal")
_UNSPECIFIC = (*_OF_PEERS, "rank-killed", "unknown", "script-error")
# What several processes do to one another that take themselves for the only one.
_COLLISIONS = {
    "address-in-use",
    "checkpoint-mismatch",
    "cuda-out-of-memory",
    "file-missing",
    "invalid-device",
    "script-error",
}


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
    remaining = set_aside(evidence)
    observed = evidence.observed
    aside = [event for event in evidence.events if event.rule]
    if all(event.kind == "word" for event in remaining):
        found = _from_nothing(remaining, evidence)
    else:
        found = _from_signs(remaining, evidence) or _from_peers(remaining, evidence)
    found.world_size = observed.world_size
    found.seen = sorted(observed.seen)
    if found.seen:
        found.silent = [rank for rank in range(found.world_size or 0) if rank not in observed.seen]
    if found.first:
        _tell_whose(found, found.first, remaining, evidence)
        found = _from_before(aside, found) or found
    if found.first and _is_certain(found, found.first, [*remaining, *aside], evidence):
        found.certainty = "certain"
    others = [
        each
        for each in evidence.events
        if each.kind not in ("word", "noise") and each is not found.first
    ]
    for each in others:
        each.rule = each.rule or (PEER.name if PEER.fits(each, evidence) else "")
    found.followed = [each for each in others if not each.rule and not each.end]
    found.set_aside = [each for each in others if each.rule]
    return found


def _from_nothing(words: Sequence[Event], evidence: Evidence) -> Diagnosis:
    """Where nothing failed: whether a log says that it went well."""
    if evidence.observed.ones > 1:
        return Diagnosis(
            "world-of-one",
            "likely",
            why=f"{evidence.observed.ones} processes say that they are alone",
        )
    against = _against_a_good_end(words, evidence)
    weight = max((weight for _, weight in evidence.finished.values()), default=-1)
    if weight >= evidence.cut and not against:
        return Diagnosis(None, "likely")
    last = "".join(
        f"last words: {speaker}: {text!r}" for speaker, text in list(evidence.last.items())[-1:]
    )
    why = f"no failure found, and no end either; {against or last or 'the logs are empty'}"
    return Diagnosis("unknown", "unknown", why=why)


def _against_a_good_end(words: Sequence[Event], evidence: Evidence) -> str:
    """What contradicts a log's word that all went well, if anything does."""
    if evidence.runs:
        return (
            "Slurm says that the job still runs; `scancel --signal=URG JOB` shows where each"
            " rank is"
        )
    if any(weight >= 2 for _, weight in evidence.finished.values()):
        return ""
    if later := [
        each for each in words if 0 < evidence.finished.get(each.file, (0, 0))[0] < each.number
    ]:
        return f"after a word of a good end: {later[0].text!r}"
    most = max((evidence.steps.get(file, 0) for file in evidence.finished), default=0)
    behind = [
        file
        for file, steps in evidence.steps.items()
        if 0 < steps < most and file not in evidence.finished
    ]
    if behind:
        return f"{evidence.names[behind[0]]} ends earlier"
    return ""


def _from_signs(remaining: Sequence[Event], evidence: Evidence) -> Diagnosis | None:
    """By the earliest sign of a cause or of an end from outside; if there is none, by those that
    count for less.
    """
    primary, symptoms, endings = (
        [event for event in remaining if event.kind == kind]
        for kind in ("primary", "symptom", "ending")
    )
    if evidence.observed.ones > 1 and primary and {event.cause for event in primary} <= _COLLISIONS:
        return Diagnosis(
            "world-of-one",
            "likely",
            earliest(primary),
            why="each process took itself for rank 0 of 1",
        )
    report = evidence.report
    if report and report.cause != "unknown":
        symptoms.append(report)
    if strong := [*_by_srunddp(primary), *(event for event in endings if event.sure)]:
        first = earliest(strong)
        # What explains an end from outside, or the same that was told with less weight.
        weak = [each for each in symptoms if first.kind == "ending" or each.cause == first.cause]
        if not first.ours:
            first = earliest([*(each for each in weak if surely_before(each, first)), first])
    elif symptoms:
        first = earliest([each for each in symptoms if each.cause not in _OF_PEERS] or symptoms)
    elif endings and not report:
        first = endings[0]
    else:
        return None
    return Diagnosis(first.cause, "unknown" if first.cause == "unknown" else "likely", first)


def _by_srunddp(primary: list[Event]) -> list[Event]:
    """What srunddp tells, which knows who was first; of a rank that just ended, other lines may
    tell more.
    """
    own = min(
        (event for event in primary if event.ours),
        key=lambda event: event.rank is None,
        default=None,
    )
    if not own:
        return primary
    why = [event for event in primary if not event.ours and event.rank in (None, own.rank)]
    if why and (own.cause == "rank-killed" or not own.sure):
        return why
    return [own]


def _from_peers(remaining: Sequence[Event], evidence: Evidence) -> Diagnosis:
    """From launchers' reports and what peers tell of an end: by the rank that all missed, or that
    ended first.
    """
    report = evidence.report
    seen = evidence.observed.seen
    secondary = [event for event in remaining if event.kind == "secondary"]
    victims = {event.rank for event in secondary if event.raised} - {None}
    rank = report.rank if report else None
    if rank in victims or rank is None:
        left = (
            seen
            - victims
            - {rank for event in evidence.events if event.end for rank in event.end.ranks}
        )
        rank = _sole(victims, evidence)
        if report and left and secondary and (rank is None or rank in left):
            rank = min(left) if len(left) == 1 else None
            why = "a rank left without an error"
            return Diagnosis(
                "collective-mismatch",
                "likely",
                earliest(secondary),
                rank=rank,
                why=why,
                victim=True,
            )
        if not (report and rank == report.rank):
            report = None
    ends = [*secondary, *([report] if report else [])]
    words = [
        each
        for each in remaining
        if each.kind == "word" and not any(surely_before(end, each) for end in ends)
    ]
    if words:
        return Diagnosis("script-error", "likely", words[-1], rank=rank)
    return Diagnosis(
        "unknown", "unknown", report or earliest(secondary), rank=rank, victim=report is None
    )


def _from_before(aside: Sequence[Event], found: Diagnosis) -> Diagnosis | None:
    """What was said before, more quietly, of a failure that does not tell its cause."""
    first = found.first
    cause = found.cause
    if cause not in _UNSPECIFIC and (not first or first.sure):
        return None
    if first:
        said = f"\n{first.text}\n{first.raised.below if first.raised and not first.sure else ''}"
    else:
        said = ""
    what = f"{cause}{said if cause in ('script-error', 'unknown') else ''}"
    for event in aside:
        behind = table().causes[event.cause].behind
        if event.rule == "launcher-notice" or (
            first and cause != "unknown" and surely_before(first, event)
        ):
            continue
        if (
            behind.search(what)
            if behind
            else cause == "unknown" and event.kind == "primary" and not event.progress
        ):
            is_of_other = event.rank not in (None, found.rank)  # than the rank that failed
            return replace(
                found, cause=event.cause, certainty="likely", first=event, victim=is_of_other
            )
    return None


def _tell_whose(
    found: Diagnosis, first: Event, remaining: Sequence[Event], evidence: Evidence
) -> None:
    """Rank and node of the first failure: by its line, its launcher's report, or the peers that
    tell of its end.
    """
    observed = evidence.observed
    seen = evidence.observed.seen
    report = None
    if first.cause == "collective-timeout":
        found.rank = _sole({each.rank for each in remaining if each.cause == first.cause}, evidence)
        found.victim = found.rank not in (None, first.rank)
    if found.rank is None and not found.victim:
        peers = _sole(
            {each.rank for each in remaining if each.kind == "secondary" and each.raised}, evidence
        )
        report = _sole_report(remaining, evidence)
        missed = any(each.kind == "secondary" or each.cause in _OF_PEERS for each in remaining)
        left = set(range(observed.world_size or 0)) - seen if missed else seen
        if len(left) == 1 and not evidence.report:
            alone = min(left)
        else:
            alone = None
        known = (first.rank, peers, report.rank if report else None, alone)
        found.rank = next((rank for rank in known if rank is not None), None)
    if report and report.rank == found.rank:
        node = report.node
    else:
        node = None
    found.node = first.node or node or observed.nodes.get(-1 if found.rank is None else found.rank)


def _sole(victims: set[int | None], evidence: Evidence) -> int | None:
    """The one rank that is not among those that another's end has reached."""
    others = (set(range(evidence.observed.world_size or 0)) or evidence.observed.seen) - victims
    if victims - {None} and len(others) == 1:
        return min(others)
    return None


def _sole_report(remaining: Sequence[Event], evidence: Evidence) -> Event | None:
    """The one rank that did not end well by itself, where launchers report just one; or the first
    of several that told nothing of a peer's end, where others did.
    """
    own = [event for event in remaining if event.end and event.rank is not None]
    if len({rank for event in own if event.end for rank in event.end.ranks}) == 1:
        return own[0]
    peers = {
        each.rank
        for each in remaining
        if each.kind == "secondary" or (each.raised and each.cause in _OF_PEERS)
    }
    one = [
        each
        for each in own
        if peers and each.end and len(each.end.ranks) == 1 and each.rank not in peers
    ]
    return one[0] if one else None


def _is_certain(
    found: Diagnosis, first: Event, others: Sequence[Event], evidence: Evidence
) -> bool:
    """Nothing contradicts it, and two signs agree: a traceback that nobody caught, and the
    launcher's report or that its process said no more. srunddp's, Slurm's and the kernel's own word
    need no other.
    """
    if first.rule or not first.sure or first.cause == "cancelled" or evidence.observed.ones > 1:
        return False
    if first.kind == "ending":  # and a run that stood still was ended by more than its limit
        still = (
            first.time is not None and first.since is not None and first.time - first.since > _STILL
        )
        still |= first.cause == "time-limit" and not any(evidence.steps.values())
        return bool(says("authority", first.text)) and not evidence.report and not still
    if first.ours:
        return True
    ended = any(
        each.kind == "ending" and each.sure and each.cause != "cancelled" for each in others
    )
    wrote = first.lines >= GOES_ON and not evidence.report and evidence.is_stopped_after(first)
    if first.raised and (ended or wrote):
        return False  # it may have been caught
    alike = len([each for each in others if each.text == first.text]) > 1
    others = [each for each in others if each.cause not in (first.cause, "unknown", "script-error")]
    if found.rank is None and len(found.seen) > 1 and not alike:
        return False
    if first.progress or not all(surely_before(first, each) for each in others):
        return False
    if not says("authority", first.text):
        if not first.raised or not first.raised.top:
            return False
        if report := evidence.report:
            end = report.end
            is_its = None in (first.rank, report.rank)
            return end is not None and not end.signal and (is_its or first.rank in end.ranks)
    return first.file not in evidence.finished
