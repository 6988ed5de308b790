"""Defines the rules by which an event is not the first failure. The rules are checked in the order
of ``RULES``.

The events that a rule sets aside are kept. The output names them with their rule, and some of them
explain a later failure that says nothing about its cause.
"""

from collections.abc import Callable
from dataclasses import dataclass

from srunddp.triage.collect import GOES_ON, Authority, Evidence
from srunddp.triage.event import MANY_LINES, Event
from srunddp.triage.signatures import Kind, says


@dataclass(frozen=True)
class Rule:
    """A reason why an event is not the first failure.

    Attributes:
        name: The rule's name in the output.
        sentence: The explanation in the output, about the events that the rule sets aside.
        fits: Tells whether the rule applies to an event.
    """

    name: str
    sentence: str
    fits: Callable[[Event, Evidence], bool]


def _is_quoted(event: Event, _: Evidence) -> bool:
    return not event.raised and not event.end and bool(says("quoted", event.text))


def _is_ignored(event: Event, _: Evidence) -> bool:
    return event.raised is not None and event.raised.aside


def _is_handled(event: Event, _: Evidence) -> bool:
    return event.handled


def _is_launchers(event: Event, _: Evidence) -> bool:
    if event.raised and not event.raised.top:
        said = event.raised.previous  # a logger writes its own line before the traceback
    else:
        said = event.text
    # A logger puts its name at the beginning of a line. Further on, a line only mentions the name.
    return bool(says("notice", said[:120]))


def _is_warning(event: Event, evidence: Evidence) -> bool:
    if event.kind is Kind.HINT:
        return True
    if event.kind is Kind.SECONDARY and evidence.report:
        # Keep the warning: if a launcher reported a rank's end, even a warning shows which ranks
        # noticed that end.
        return False
    if event.kind not in (Kind.PRIMARY, Kind.SECONDARY) or event.raised:
        return False
    return bool(says("below-error", event.text))


def _is_of_launcher(event: Event, _: Evidence) -> bool:
    return event.end is not None and event.end.is_victim


def _was_survived(event: Event, evidence: Evidence) -> bool:
    if evidence.met and says("own-unreached", event.text):
        return True  # the line is about a rank that reached rank 0 later
    if event.cause == "ranks-missing":
        if evidence.met and event.text.startswith("srunddp: waiting"):
            return True
        return event.progress > 0  # one step is enough: it needs all ranks, so none was missing
    if event.progress >= GOES_ON:
        return True
    if event.end or not evidence.is_stopped_after(event):
        return False
    # Slurm, a launcher or a person ended the run later, so the event probably did not end it: fewer
    # signs that the run went on are enough.
    return _worked_on(event, evidence) or _others_worked_on(event, evidence)


def _worked_on(event: Event, evidence: Evidence) -> bool:
    """Tell whether the rank went on writing after an event. False if the lines of the rank cannot
    be told from those of other ranks.
    """
    observed = evidence.observed
    is_alone = max(observed.world_size or 0, len(observed.seen)) < 2
    return (event.rank is not None or is_alone) and event.lines >= MANY_LINES


def _others_worked_on(event: Event, evidence: Evidence) -> bool:
    """Tell whether any rank made steps after an event, and the event is no uncaught exception."""
    is_uncaught = event.raised is not None and event.raised.top
    return not is_uncaught and event.overall >= GOES_ON


def _is_of_shutdown(event: Event, evidence: Evidence) -> bool:
    """Tell whether the run ended well in spite of an event.

    A line of the log which says that the run ended well has to follow the event. Such a line of the
    job script is not enough: the rank has to report another step after the event. After an uncaught
    exception, only a line about exit code 0 is enough.
    """
    if evidence.is_outlived(event):
        return True
    if event.cause == "check-failed" and evidence.ended_well:
        return True  # the check was made before the run, which ended well in spite of its result
    if evidence.ended_well and _is_of_a_rank(event, evidence):
        return True
    if evidence.report or event.ours or event.kind is Kind.ENDING:
        return False
    good_end = evidence.finished.get(event.file)
    if not good_end:
        return False
    if event.raised and event.raised.top:
        return good_end.by >= Authority.EXIT_CODE and event.number < good_end.number
    if good_end.by >= Authority.RUN:
        return event.number < good_end.number
    return event.progress > 0


def _is_of_a_rank(event: Event, evidence: Evidence) -> bool:
    """Tell whether a rank wrote an event, and not another command of the same job.

    The job's output has the lines of the ranks' own logs, and also the lines of other commands. So
    an uncaught exception or the report of an end counts only if a rank's own log has it too.
    """
    if event.file in evidence.files_of_ranks:
        return True
    is_end = event.ours or event.end or event.kind is Kind.ENDING
    is_uncaught = event.raised is not None and event.raised.top
    if not is_end and not is_uncaught:
        return True
    return any(
        each.text == event.text for each in evidence.events if each.file in evidence.files_of_ranks
    )


def _is_secondary(event: Event, _: Evidence) -> bool:
    return event.kind is Kind.SECONDARY


# This rule is checked only for events that were not chosen as the first failure.
PEER = Rule("peer-error", "the end of another rank or of the run caused it", _is_secondary)
RULES = (
    Rule("quoted", "a configuration, a usage text or a debug line quotes it", _is_quoted),
    Rule("ignored", "Python or a logger says it was ignored", _is_ignored),
    Rule(
        "handled",
        "a line next to it says that it was handled: retry, skip, fall back",
        _is_handled,
    ),
    Rule(
        "launcher-notice",
        "the launcher's own logger wrote it about the node, and went on",
        _is_launchers,
    ),
    Rule("warning", "its level is below error", _is_warning),
    Rule(
        "ended-by-launcher", "the launcher ended this rank because of another rank", _is_of_launcher
    ),
    Rule(
        "survived",
        "at least three further steps followed; if Slurm or a person ended the run later, steps of"
        " other ranks or ten lines of work",
        _was_survived,
    ),
    Rule("shutdown", "the run ended well in spite of it", _is_of_shutdown),
)
SENTENCES = {rule.name: rule.sentence for rule in (*RULES, PEER)}


def set_aside(evidence: Evidence) -> list[Event]:
    """Apply the rules to each event, and write the name of the first that fits into the event.

    Returns:
        The events to which no rule applies, without noise and without reports of exit code 0.
    """
    remaining = []
    for event in evidence.events:
        ended_well = event.end is not None and event.end.code == 0
        if event.kind is Kind.NOISE or ended_well:
            continue
        event.rule = next((rule.name for rule in RULES if rule.fits(event, evidence)), "")
        if not event.rule:
            remaining.append(event)
    return remaining
