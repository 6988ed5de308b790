"""Why something that was said is not the first failure: rules with names, in the order in which
they are asked.

What a rule sets aside is kept: the verdict names it with its rule, and some of it explains a later
failure that tells nothing of its cause.
"""

from collections.abc import Callable
from dataclasses import dataclass

from srunddp.triage.collect import GOES_ON, Evidence
from srunddp.triage.event import Event
from srunddp.triage.signatures import says

_MANY = 10  # lines after something: it did not end the rank


@dataclass(frozen=True)
class Rule:
    """Its name in the verdict, a sentence on what it sets aside, and whether it fits this event."""

    name: str
    sentence: str
    fits: Callable[[Event, Evidence], bool]


def _is_quoted(event: Event, _: Evidence) -> bool:
    return not event.raised and not event.end and bool(says("quoted", event.text))


def _is_warning(event: Event, evidence: Evidence) -> bool:
    said = event.kind == "primary" or (event.kind == "secondary" and not evidence.report)
    return event.kind == "hint" or (
        said and not event.raised and bool(says("below-error", event.text))
    )


def _is_launchers(event: Event, _: Evidence) -> bool:
    if event.raised and not event.raised.top:
        said = event.raised.previous
    else:
        said = event.text
    return bool(says("notice", said[:120]))


def _is_of_launcher(event: Event, _: Evidence) -> bool:
    return bool(event.end and event.end.is_victim)


def _was_survived(event: Event, evidence: Evidence) -> bool:
    if event.cause == "ranks-missing":  # a step needs all ranks
        return event.progress > 0 or (evidence.met and event.text.startswith("srunddp: waiting"))
    if event.progress >= GOES_ON or event.end or not evidence.is_stopped_after(event):
        return event.progress >= GOES_ON
    is_one = (
        event.rank is not None
        or max(evidence.observed.world_size or 0, len(evidence.observed.seen)) < 2
    )
    is_caught = not (event.raised and event.raised.top)
    return (is_one and event.lines >= _MANY) or (is_caught and event.overall >= GOES_ON)


def _is_of_shutdown(event: Event, evidence: Evidence) -> bool:
    """Before a good end of the run that its log tells of; a job script's word counts for less, and
    an exception that nobody caught for more than any word but an exit code.
    """
    outlived = evidence.is_outlived(event)
    if (
        outlived
        or evidence.report
        or event.ours
        or event.kind == "ending"
        or event.file not in evidence.finished
    ):
        return outlived
    number, weight = evidence.finished[event.file]
    is_heavy = event.raised is not None and event.raised.top
    if weight or is_heavy:
        return event.number < number and weight > is_heavy
    return event.progress > 0


# Asked of what is beside the first failure.
PEER = Rule(
    "peer-error",
    "another rank's end, or the run's, reached it",
    lambda each, _: each.kind == "secondary",
)
RULES = (
    Rule("quoted", "a configuration, a usage text or a debug line quotes it", _is_quoted),
    Rule(
        "ignored",
        "Python or a logger says it was ignored",
        lambda each, _: bool(each.raised and each.raised.aside),
    ),
    Rule(
        "handled",
        "a line beside it says that it was handled: retry, skip, fall back",
        lambda each, _: each.handled,
    ),
    Rule(
        "launcher-notice",
        "the launcher's own logger wrote it of the node, and went on",
        _is_launchers,
    ),
    Rule("warning", "a line of a level below error", _is_warning),
    Rule("ended-by-launcher", "the launcher ended this rank, because of another", _is_of_launcher),
    Rule(
        "survived",
        "at least three further steps followed; before an end from outside, steps of other ranks or"
        " ten lines of work",
        _was_survived,
    ),
    Rule("shutdown", "the run came to a good end, which this did not stop", _is_of_shutdown),
)
SENTENCES = {rule.name: rule.sentence for rule in (*RULES, PEER)}


def set_aside(evidence: Evidence) -> list[Event]:
    """What no rule sets aside; of the rest each event gets the rule that did."""
    events = [
        event
        for event in evidence.events
        if event.kind != "noise" and not (event.end and event.end.code == 0)
    ]
    for event in events:
        event.rule = next((rule.name for rule in RULES if rule.fits(event, evidence)), "")
    return [event for event in events if not event.rule]
