"""Finds the event that shows the first failure."""

from collections.abc import Iterable, Sequence
from dataclasses import replace

from srunddp.triage.collect import Evidence
from srunddp.triage.diagnosis import Certainty, Diagnosis
from srunddp.triage.event import Event, earliest, is_same, surely_before
from srunddp.triage.rank_labels import the_only_other
from srunddp.triage.signatures import Kind, says, table

# Causes that a rank reports about missing peers; they do not say why the peers are missing.
OF_PEERS = ("collective-timeout", "network-unreachable", "ranks-missing", "nccl-internal")
_UNSPECIFIC = (*OF_PEERS, "rank-killed", "unknown", "script-error")
# The causes of errors when several processes collide because each forms a world of one rank.
_COLLISIONS = {
    "address-in-use",
    "checkpoint-mismatch",
    "cuda-out-of-memory",
    "file-missing",
    "invalid-device",
    "script-error",
}


def first_failure(remaining: Sequence[Event], evidence: Evidence) -> Diagnosis:
    """Find the first failure among the events that no rule sets aside.

    Args:
        remaining: The events that no rule sets aside, at least one of a kind other than ``WORD``.
        evidence: Everything else in the logs.

    Returns:
        A diagnosis. Its rank is set only if the failure was inferred from the reports of peers.
    """
    if _is_of_worlds_of_one(remaining, evidence):
        return Diagnosis(
            "world-of-one",
            Certainty.LIKELY,
            earliest(_of_kind(Kind.PRIMARY, remaining)),
            why="each process ran as rank 0 of 1",
        )
    first = _by_signs(remaining, evidence)
    if not first:
        return _by_peers(remaining, evidence)
    if first.cause == "unknown":
        return Diagnosis(first.cause, Certainty.UNKNOWN, first)
    return Diagnosis(first.cause, Certainty.LIKELY, first)


def _of_kind(kind: Kind, events: Iterable[Event]) -> list[Event]:
    return [event for event in events if event.kind is kind]


def _is_of_worlds_of_one(remaining: Sequence[Event], evidence: Evidence) -> bool:
    """Tell whether several processes each say that they are the only rank, and all primary events
    are errors by which such processes collide with one another.
    """
    causes = {event.cause for event in _of_kind(Kind.PRIMARY, remaining)}
    return evidence.observed.ones > 1 and bool(causes) and causes <= _COLLISIONS


def _by_signs(remaining: Sequence[Event], evidence: Evidence) -> Event | None:
    """Find the earliest event which shows a cause, or that Slurm or a person ended the run.

    Without such an event, take the earliest symptom; without a symptom or a launcher's report, a
    line which may mean that somebody ended the run. None if there is nothing of this.
    """
    endings = _of_kind(Kind.ENDING, remaining)
    symptoms = _of_kind(Kind.SYMPTOM, remaining)
    report = evidence.report
    if report and report.cause != "unknown":
        symptoms.append(report)  # the signal in the report shows the cause
    strong = _knowing_best(_of_kind(Kind.PRIMARY, remaining))
    strong += [event for event in endings if event.sure]
    if strong:
        return _earliest_with_symptoms(strong, symptoms)
    if symptoms:
        own = [each for each in symptoms if each.cause not in OF_PEERS]
        return earliest(own or symptoms)
    # A mere guess that somebody ended the run counts less than a launcher's report of a rank's end.
    if endings and not report:
        return endings[0]
    return None


def _knowing_best(primary: list[Event]) -> list[Event]:
    """Keep the primary events that are most reliable about which rank failed first.

    The most reliable event is srunddp's own. If it only says how the rank ended, it is replaced by
    other events of the same rank, or of an unknown rank, which may say why.
    """
    own = told_by_srunddp(primary)
    if not own:
        return primary
    others = [
        event
        for event in primary
        if not event.ours and event.rank in (None, own.rank) and not is_same(own, event)
    ]
    tells_the_end_alone = own.cause == "rank-killed" or not own.sure
    if others and tells_the_end_alone:
        return others
    return [own]


def told_by_srunddp(remaining: Iterable[Event]) -> Event | None:
    """Return the event of the root cause that srunddp itself has named; None if it has named none.

    An event that names a rank is preferred to one that names none. Among equal events, one from a
    file of srunddp's is preferred to one from a line.
    """
    told = [event for event in remaining if event.ours and event.kind is Kind.PRIMARY]
    return next((event for event in told if event.rank is not None), next(iter(told), None))


def _earliest_with_symptoms(strong: Sequence[Event], symptoms: Sequence[Event]) -> Event:
    """Return the earliest strong sign, or a symptom that surely came before it and explains it."""
    first = earliest(strong)
    if first.ours:
        return first
    # Any symptom may explain why Slurm or a person ended the run. Any other failure is explained
    # only by a symptom of the same cause.
    explaining = [
        each for each in symptoms if first.kind is Kind.ENDING or each.cause == first.cause
    ]
    sooner = [each for each in explaining if surely_before(each, first)]
    return earliest([*sooner, first])


def _by_peers(remaining: Sequence[Event], evidence: Evidence) -> Diagnosis:
    """Make a diagnosis from launchers' reports and from what peers noticed.

    The first failure is that of the rank whose end all peers noticed, or of the rank that a
    launcher reported first.
    """
    report = evidence.report
    secondary = _of_kind(Kind.SECONDARY, remaining)
    victims = {event.rank for event in secondary if event.raised and event.rank is not None}
    rank = report.rank if report else None
    if rank is None or rank in victims:
        missed = the_only_other(victims, evidence.observed)
        left = _ended_untold(victims, evidence)
        # The peers miss a rank that neither reported an error nor ended badly: it made fewer
        # collective calls than the others, and left its loop before them.
        if report and left and secondary and (missed is None or missed in left):
            return Diagnosis(
                "collective-mismatch",
                Certainty.LIKELY,
                earliest(secondary),
                rank=min(left) if len(left) == 1 else None,
                why="a rank left without an error",
                victim=True,
            )
        rank = missed
        if report and report.rank != rank:
            report = None  # the report is about a victim
    ends = [*secondary, report] if report else secondary
    # A line about a failure that was written before any end may give the reason. Of several, the
    # last one is nearest to the end.
    words = [
        each
        for each in _of_kind(Kind.WORD, remaining)
        if not any(surely_before(end, each) for end in ends)
    ]
    if words:
        return Diagnosis("script-error", Certainty.LIKELY, words[-1], rank=rank)
    first = report or earliest(secondary)
    return Diagnosis("unknown", Certainty.UNKNOWN, first, rank=rank, victim=report is None)


def _ended_untold(victims: set[int], evidence: Evidence) -> set[int]:
    """Return the ranks with output that reported no error of a peer, and whose end no launcher has
    reported.

    Args:
        victims: The ranks that reported an error of a peer.
        evidence: Everything else in the logs.
    """
    reported = {rank for event in evidence.events if event.end for rank in event.end.ranks}
    return evidence.observed.seen - victims - reported


def explained_by(aside: Sequence[Event], found: Diagnosis) -> Diagnosis | None:
    """Look for an earlier event that explains a failure without a clear cause.

    Args:
        aside: The events that a rule set aside.
        found: The diagnosis without the events in ``aside``.

    Returns:
        The diagnosis with the first event that explains the failure; None if there is none.
    """
    first = found.first
    if found.cause not in _UNSPECIFIC and (not first or first.sure):
        return None
    for event in aside:
        if event.rule == "launcher-notice":
            continue
        # An event that surely came later explains nothing, unless the cause is completely unknown.
        if first and found.cause != "unknown" and surely_before(first, event):
            continue
        if _explains(event, found):
            is_of_another = event.rank is not None and event.rank != found.rank
            return replace(
                found,
                cause=event.cause,
                certainty=Certainty.LIKELY,
                first=event,
                victim=is_of_another,
            )
    return None


def explained_by_gpu(events: Iterable[Event], found: Diagnosis) -> Diagnosis:
    """Add the cause that srunddp has found in a GPU to the failure that srunddp has reported.

    Args:
        events: The events that no rule sets aside.
        found: The diagnosis so far.

    Returns:
        The diagnosis, unchanged if srunddp has reported no such cause or no failure.
    """
    if not found.own:
        return found
    for event in events:
        is_sure = event.kind is Kind.PRIMARY and bool(says("own-gpu", event.text))
        if is_sure and _explains(event, found):
            return replace(found, cause=event.cause, why=event.text)
    return found


def _explains(event: Event, found: Diagnosis) -> bool:
    """Tell whether an event that was not chosen can be the reason for the diagnosed failure."""
    behind = table().causes[event.cause].behind
    if behind:
        return bool(behind.search(_searched(found)))
    return found.cause == "unknown" and event.kind is Kind.PRIMARY and not event.progress


def _searched(found: Diagnosis) -> str:
    """Return the text of a failure in which the ``behind`` patterns of signatures.yaml are
    searched: its cause, and if that is unspecific also its line and its line of code.
    """
    first = found.first
    if found.cause not in ("script-error", "unknown") or not first:
        return str(found.cause)
    code = first.raised.below if first.raised and not first.sure else ""
    return f"{found.cause}\n{first.text}\n{code}"
