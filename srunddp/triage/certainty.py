"""Decides whether a diagnosis is certain.

The source of the first failure decides which objections are checked; if one applies, the diagnosis
is not certain. A guess or an ordinary line never makes a diagnosis certain; a line of srunddp's
always does.

Names such as ``frozen/root-cause-box-names-a-victim`` are folders of example logs in
tests/triage/corpus.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum, auto

from srunddp.triage.collect import GOES_ON, Evidence
from srunddp.triage.diagnosis import Diagnosis
from srunddp.triage.event import Event, surely_before
from srunddp.triage.signatures import Kind, says

_STILL = 1800.0  # seconds without a line that has a time, after which a run counts as stuck
# Causes that never contradict another one: each may be the same failure in less specific words.
_UNSPECIFIC = ("unknown", "script-error")


class Teller(Enum):
    """The source that reported the first failure.

    Attributes:
        GUESS: A line that may mean something else, or does not give the reason.
        END_FROM_OUTSIDE: A line which says that Slurm or a person ended the run.
        SRUNDDP: srunddp itself, which knows which rank failed first.
        AUTHORITY: A line of the kernel, of Slurm or of mpirun.
        UNCAUGHT_EXCEPTION: A traceback that begins with the program's first frame.
        LINE: Any other line; it may be about an error that was handled.
    """

    GUESS = auto()
    END_FROM_OUTSIDE = auto()
    SRUNDDP = auto()
    AUTHORITY = auto()
    UNCAUGHT_EXCEPTION = auto()
    LINE = auto()


@dataclass(frozen=True)
class Case:
    """The facts against which objections are checked.

    Attributes:
        found: The diagnosis.
        first: The event that shows the first failure.
        events: All events that may contradict the diagnosis, including ``first`` and the events
            that a rule sets aside.
        evidence: Everything else in the logs.
    """

    found: Diagnosis
    first: Event
    events: Sequence[Event]
    evidence: Evidence


Objection = Callable[[Case], bool]


def is_certain(case: Case) -> bool:
    """Tell whether the source of the first failure can be certain, and no objection applies."""
    objections = OBJECTIONS[teller(case)]
    return objections is not None and not any(applies(case) for applies in objections)


def teller(case: Case) -> Teller:
    """Find out which source reported the first failure."""
    first = case.first
    if first.reason and not first.rule and first.kind is Kind.PRIMARY and first.cause != "unknown":
        return Teller.SRUNDDP
    # That a job was cancelled does not give the cause either: the reason may be in no log.
    if first.rule or not first.sure or first.cause == "cancelled":
        return Teller.GUESS
    if case.evidence.observed.ones > 1:
        # Processes that each ran as rank 0 of 1 collide in many ways at once. Which error came
        # first says little.
        return Teller.GUESS
    if first.kind is Kind.ENDING:
        return Teller.END_FROM_OUTSIDE
    if first.ours:
        return Teller.SRUNDDP
    if says("authority", first.text):
        return Teller.AUTHORITY
    if first.raised and first.raised.top:
        return Teller.UNCAUGHT_EXCEPTION
    return Teller.LINE


def is_not_said_by_an_authority(case: Case) -> bool:
    """Tell whether the line is not from Slurm, the kernel or mpirun.

    Any script may print ``the job exceeded its time limit``, even about another job.
    """
    return not says("authority", case.first.text)


def a_rank_ended_by_itself(case: Case) -> bool:
    """Tell whether a launcher reported that a rank ended by itself, which may be the reason why the
    run was ended.

    ``frozen2/made-room-for-another``: srun reported an exit code before Slurm's line came.
    """
    return case.evidence.report is not None


def stood_still_before(case: Case) -> bool:
    """Tell whether the run was already stuck, for an unknown reason, when it was ended: it had
    written no line with a time for half an hour.

    ``open/stuck-until-limit``: the last step was a day before the time limit.
    """
    first = case.first
    if first.time is None or first.since is None:
        return False
    return first.time - first.since > _STILL


def never_made_a_step(case: Case) -> bool:
    """Tell whether the run reported no step before its time limit, so that it may have been stuck
    from the start.

    Example: a log that has only Slurm's line about the time limit.
    """
    return case.first.cause == "time-limit" and not any(case.evidence.steps.values())


def another_end_is_told(case: Case) -> bool:
    """Tell whether the logs also say that Slurm or a launcher ended the run, so that the exception
    may have been caught.

    Example: a job that went on without ``flash_attn`` until its time limit.
    """
    return case.first.raised is not None and any(
        each.kind is Kind.ENDING and each.sure and each.cause != "cancelled" for each in case.events
    )


def wrote_on_until_stopped(case: Case) -> bool:
    """Tell whether the rank went on writing after its traceback, until Slurm or a person ended the
    run.

    If so, the script has probably caught the exception without reporting that.
    """
    first = case.first
    return (
        first.raised is not None
        and first.lines >= GOES_ON
        and case.evidence.is_stopped_after(first)
    )


def is_of_an_unknown_rank(case: Case) -> bool:
    """Tell whether several ranks wrote lines, and no line shows which of them failed.

    ``open/nccl-error-after-gpu-lost``: the kernel names a node but no rank. If several ranks write
    the same line, they failed in the same way, and it does not matter which was first.
    """
    if case.found.rank is not None or len(case.found.seen) < 2:
        return False
    alike = [each for each in case.events if each.text == case.first.text]
    return len(alike) < 2


def made_steps_afterwards(case: Case) -> bool:
    """Tell whether the same rank reported another step after the event.

    One step is enough to make the diagnosis uncertain. The rule ``survived``, which sets an event
    aside, needs :data:`GOES_ON` steps.
    """
    return case.first.progress > 0


def another_cause_may_be_first(case: Case) -> bool:
    """Tell whether an event with a different cause may have come before the first failure.

    ``frozen2/half-of-them-wait``: the files of two nodes have different errors, and no times.
    """
    others = [each for each in case.events if each.cause not in (case.first.cause, *_UNSPECIFIC)]
    return not all(surely_before(case.first, each) for each in others)


def launcher_tells_otherwise(case: Case) -> bool:
    """Tell whether the launcher's first report is about another rank, is about a signal, or does
    not say how a rank ended.

    ``frozen/root-cause-box-names-a-victim``: torchrun's box shows SIGABRT, and nothing shows
    whether the traceback is the reason for it.
    """
    report = case.evidence.report
    if not report:
        return False
    if report.end is None or report.end.signal:
        return True
    if case.first.rank is None or report.rank is None:
        return False
    return case.first.rank not in report.end.ranks


def its_log_ends_well(case: Case) -> bool:
    """Tell whether the log with the first failure also says that the run ended well.

    ``open/prolog``: the last line is srun's "job step to complete".
    """
    return case.first.file in case.evidence.finished


def its_log_ends_well_unreported(case: Case) -> bool:
    """Tell whether the log with the first failure also says that the run ended well, while no
    launcher reported that a rank failed.

    Example: a script that caught its exception and ended with ``Job finished``. A launcher's report
    of an exit code counts more than such words.
    """
    return case.evidence.report is None and its_log_ends_well(case)


_OF_A_LINE: tuple[Objection, ...] = (
    another_end_is_told,
    wrote_on_until_stopped,
    is_of_an_unknown_rank,
    made_steps_afterwards,
    another_cause_may_be_first,
)
# The objections for each source; None means that this source is never certain.
OBJECTIONS: dict[Teller, tuple[Objection, ...] | None] = {
    Teller.GUESS: None,
    Teller.END_FROM_OUTSIDE: (
        is_not_said_by_an_authority,
        a_rank_ended_by_itself,
        stood_still_before,
        never_made_a_step,
    ),
    Teller.SRUNDDP: (),
    Teller.AUTHORITY: (*_OF_A_LINE, its_log_ends_well),
    Teller.UNCAUGHT_EXCEPTION: (
        *_OF_A_LINE,
        launcher_tells_otherwise,
        its_log_ends_well_unreported,
    ),
    Teller.LINE: None,
}
