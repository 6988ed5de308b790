"""Why something that was said is not the first failure: rules with names, in the order in which they are asked.

What a rule sets aside is kept: the verdict names it with its rule, and some of it explains a later failure that tells
nothing of its cause.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass

from srunddp.triage.collect import GOES_ON, LAUNCHER, Evidence
from srunddp.triage.event import Event
from srunddp.triage.progress import HANDLED, is_below_error

_WAITS = re.compile(r"^srunddp: waiting|Waiting in store based barrier")
_ATTEMPT = re.compile(r"(.*)attempt_(\d+)/")
_NOTICE = re.compile(r"\[(?:ft_launcher|RankMonServer)\d*@")
_SIGNAL = re.compile(r"SIGTERM|[Ss]ignal: ?(?:15|Terminated)|SignalException|death signal|Signal: Terminated")
# Who says so has it from the kernel, or from Slurm's own book-keeping.
AUTHORITY = re.compile(
    r"^Slurm: job|\b(?:slurmstepd\S*|srun|sbatch|salloc|mpirun|NVRM|kernel)\b[^:]{0,40}:|There are not enough slots"
)


@dataclass(frozen=True)
class Rule:
    """Attributes:
    name: as the verdict shows it; sentence: of what it sets aside.
    fits: whether it sets this event aside.
    """

    name: str
    sentence: str
    fits: Callable[[Event, Evidence], bool]


def _is_handled(event: Event, _: Evidence) -> bool:
    said = event.kind != "ending" and not event.raised and not LAUNCHER.search(event.text)
    return event.handled or (said and bool(HANDLED.search(event.text)))


def _is_warning(event: Event, evidence: Evidence) -> bool:
    said = event.kind == "primary" or (event.kind == "secondary" and not evidence.report)
    return event.kind == "hint" or (said and not event.raised and is_below_error(event.text))


def _is_launchers(event: Event, _: Evidence) -> bool:
    said = event.raised.previous if event.raised and not event.raised.top else event.text
    return bool(_NOTICE.search(said, 0, 120)) and event.cause != "rank-stalled"


def _is_of_launcher(event: Event, evidence: Evidence) -> bool:
    if event.kind == "secondary" and _SIGNAL.search(event.text):
        return bool(evidence.report) or any(each.kind == "ending" for each in evidence.events)
    return bool(event.report and event.report.is_victim)


def _is_of_earlier_attempt(event: Event, evidence: Evidence) -> bool:
    """An end after which the run went on, or what stands in the file of an attempt before the last that did so."""
    later = max(evidence.finished.get(event.file, 0), evidence.restarted.get(event.file, 0))
    if event.kind in ("ending", "report") and event.progress >= GOES_ON and later > event.number:
        return True
    run, attempt = _attempt(evidence.names[event.file])
    went_on = (name for file, name in enumerate(evidence.names) if attempt >= 0 and _went_on(file, evidence))
    return any(_attempt(name)[0] == run and _attempt(name)[1] > attempt for name in went_on)


def _attempt(name: str) -> tuple[str, int]:
    """Whose attempt a file is of, as torchrun keeps them apart, and its number."""
    match = _ATTEMPT.match(name)
    return (match[1], int(match[2])) if match else ("", -1)


def _went_on(file: int, evidence: Evidence) -> bool:
    return evidence.steps.get(file, 0) >= GOES_ON or file in evidence.finished


def _was_survived(event: Event, evidence: Evidence) -> bool:
    if _WAITS.search(event.text):
        return event.progress > 0 or 0 in evidence.observed.worlds
    return event.kind not in ("ending", "report") and event.progress >= GOES_ON and not event.late


def _is_of_shutdown(event: Event, evidence: Evidence) -> bool:
    """Before a good end of the run that its log tells of, or beside one; a job script's word counts for less."""
    if evidence.report or event.ours or event.kind == "ending" or not evidence.finished:
        return False
    if event.late and event.file in evidence.well and not AUTHORITY.search(event.text, 0, 120):
        return True  # a table of jobs, of this one or of others
    if evidence.finished.get(event.file, 0) <= event.number:  # what comes after a good end, or in another file
        return event.kind in ("symptom", "secondary", "word")
    if event.raised:
        return event.progress > 0
    said = event.kind != "primary" and evidence.steps.get(event.file, 0) > 0
    return event.file in evidence.well or event.progress > 0 or said


ENDED = Rule("ended-by-launcher", "the launcher ended this rank, because of another", _is_of_launcher)
# Asked of what is beside the first failure.
PEER = Rule("peer-error", "another rank's end, told by a peer", lambda event, _: event.kind == "secondary")
RULES = (
    Rule("quoted", "a configuration, a usage text or a debug line quotes it", lambda event, _: event.is_quoted),
    Rule("ignored", "Python or a logger says that it ignored it", lambda event, _: event.is_ignored),
    Rule("handled", "a line beside it says that it was handled: retry, skip, fall back", _is_handled),
    Rule("launcher-notice", "the launcher's own logger wrote it of the node, and went on", _is_launchers),
    Rule("warning", "a line of a level below error", _is_warning),
    Rule("earlier-attempt", "the ranks were started again after it", _is_of_earlier_attempt),
    ENDED,
    Rule("survived", "at least three further steps followed", _was_survived),
    Rule("shutdown", "the run came to a good end, which this did not stop", _is_of_shutdown),
)
SENTENCES = {rule.name: rule.sentence for rule in (*RULES, PEER)}


def set_aside(evidence: Evidence) -> list[Event]:
    """What no rule sets aside; of the rest each event gets the rule that did."""
    events = [event for event in evidence.events if event.kind != "noise" and (not event.report or event.report.code)]
    for event in events:
        event.rule = next((rule.name for rule in RULES if rule.fits(event, evidence)), "")
    return [event for event in events if not event.rule]
