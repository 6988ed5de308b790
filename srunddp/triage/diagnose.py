"""Finds which of all events was the first failure, and what followed from it."""

from collections.abc import Sequence

from srunddp.triage.certainty import Case, is_certain
from srunddp.triage.collect import Authority, Evidence
from srunddp.triage.diagnosis import Certainty, Diagnosis
from srunddp.triage.event import Event, is_same
from srunddp.triage.first_failure import (
    explained_by,
    explained_by_gpu,
    first_failure,
    told_by_srunddp,
)
from srunddp.triage.rules import PEER, set_aside
from srunddp.triage.signatures import Kind
from srunddp.triage.stalls import stalled
from srunddp.triage.whose import tell_whose

_MOST_TOLD = 100  # failures reported by srunddp with which each event is compared


def diagnose(evidence: Evidence) -> Diagnosis:
    """Find what failed first, and which ranks have no output.

    Args:
        evidence: What was found in the logs. The name of a rule that sets an event aside is written
            into the event.
    """
    remaining = set_aside(evidence)
    aside = [event for event in evidence.events if event.rule]
    if all(event.kind is Kind.WORD for event in remaining):
        found = _without_failure(remaining, evidence)
    else:
        found = first_failure(remaining, evidence)
    found.own = told_by_srunddp(remaining)
    if found.own:
        found.why = found.why or found.own.note
    else:
        found = _by_stacks(found, evidence) or found
    if found.first:
        # Find the rank first: whether an earlier event explains the failure depends on the rank.
        tell_whose(found, found.first, remaining, evidence)
        found = explained_by(aside, found) or found
        found = explained_by_gpu(remaining, found)
    _tell_world(found, evidence)
    # Check the certainty after _tell_world(), because an objection asks how many ranks have output.
    if found.first and is_certain(Case(found, found.first, [*remaining, *aside], evidence)):
        found.certainty = Certainty.CERTAIN
    _tell_others(found, evidence)
    return found


def _by_stacks(found: Diagnosis, evidence: Evidence) -> Diagnosis | None:
    """Make a diagnosis from the stacks that ranks printed, if the logs do not show the cause: it is
    unknown, or they only say that Slurm or a person ended the run.

    Returns:
        None if the logs show a cause, if nothing failed, or if the stacks do not show what the
            ranks wait for.
    """
    is_told = found.first and found.first.kind is not Kind.ENDING and found.cause != "unknown"
    # If a launcher reported that a rank ended, that rank is no longer where its stack shows it.
    if is_told or found.cause is None or evidence.report:
        return None
    return stalled(evidence.stacks, evidence.observed.world_size or 0)


def _tell_world(found: Diagnosis, evidence: Evidence) -> None:
    """Add the number of expected ranks, the ranks with output and those without."""
    observed = evidence.observed
    found.world_size = observed.world_size
    found.seen = sorted(observed.seen)
    # If lines and files name no ranks at all, nobody knows which ranks have no output.
    if found.seen or observed.of_files:
        everybody = range(found.world_size or 0)
        found.silent = [rank for rank in everybody if rank not in observed.seen]


def _tell_others(found: Diagnosis, evidence: Evidence) -> None:
    """Add what followed from the first failure, and the events that rules set aside."""
    told = [each for each in (found.own,) if each]
    found.frame = _frame(found, evidence)
    for each in evidence.events:
        if each.kind in (Kind.WORD, Kind.NOISE) or each is found.first:
            continue
        if any(is_same(own, each) for own in told):
            continue
        if each.reason and len(told) < _MOST_TOLD:
            told.append(each)
        if not each.rule and PEER.fits(each, evidence):
            each.rule = PEER.name
        if each.rule:
            found.set_aside.append(each)
        elif not each.end:
            found.followed.append(each)


def _frame(found: Diagnosis, evidence: Evidence) -> str:
    """Return the last place in the script's code that a traceback of the first failure shows; empty
    if there is no traceback.
    """
    if not found.first:
        return ""
    own = found.own
    told = [each for each in evidence.events if own and own is found.first and is_same(own, each)]
    frames = [each.raised.frame for each in (found.first, *told) if each.raised]
    return next(filter(None, frames), "")


def _without_failure(words: Sequence[Event], evidence: Evidence) -> Diagnosis:
    """Make the diagnosis if no sign of a failure is left: nothing failed, the cause is unknown, or
    several processes each say that they are the only rank.
    """
    alone = evidence.observed.ones
    if alone > 1:
        why = f"{alone} processes say that they are alone"
        return Diagnosis("world-of-one", Certainty.LIKELY, why=why)
    doubt = _doubt_of_a_good_end(words, evidence)
    # If a log is cut off, words of the job script may be about a part of the run, so they are not
    # enough.
    needed = Authority.RUN if evidence.cut else Authority.JOB_SCRIPT
    is_told = any(end.by >= needed for end in evidence.finished.values())
    if evidence.ended_well and not evidence.runs:
        return Diagnosis(None, Certainty.CERTAIN)
    if is_told and not doubt:
        return Diagnosis(None, Certainty.LIKELY)
    if not doubt:
        doubt = "the logs are empty"
        if evidence.last:
            speaker, text = list(evidence.last.items())[-1]
            doubt = f"last words: {speaker}: {text!r}"
    why = f"no failure found, and no end either; {doubt}"
    return Diagnosis("unknown", Certainty.UNKNOWN, why=why)


def _doubt_of_a_good_end(words: Sequence[Event], evidence: Evidence) -> str:
    """Return why the run may not have ended well although a log says so; empty if nothing does."""
    finished = evidence.finished
    if evidence.runs:
        return (
            "Slurm says that the job still runs; `scancel --signal=URG JOB` shows where each"
            " rank is"
        )
    if evidence.why:
        return evidence.why
    # After exit code 0 the good end is certain, whatever other lines say.
    if any(end.by >= Authority.EXIT_CODE for end in finished.values()):
        return ""
    for each in words:
        if each.file in finished and finished[each.file].number < each.number:
            return f"after a line that reports a good end: {each.text!r}"
    most = max((evidence.steps.get(file, 0) for file in finished), default=0)
    for file, steps in evidence.steps.items():
        if 0 < steps < most and file not in finished:
            return f"{evidence.names[file]} ends earlier"
    return ""
