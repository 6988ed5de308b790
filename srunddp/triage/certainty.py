"""Whether a diagnosis is certain: nothing contradicts it, and two signs agree.

What the first failure was told by decides which objections are asked. A guess is never certain, and
srunddp's own word always is.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum, auto

from srunddp.triage.collect import GOES_ON, Evidence
from srunddp.triage.diagnosis import Diagnosis
from srunddp.triage.event import Event, surely_before
from srunddp.triage.signatures import Kind, says

_STILL = 1800.0  # seconds without a line that tells a time
# Causes that do not contradict another one: each may be the same failure, told with fewer words.
_UNSPECIFIC = ("unknown", "script-error")


class Teller(Enum):
    """What the first failure is told by.

    Attributes:
        GUESS: a line that may mean something else.
        END_FROM_OUTSIDE: whoever ended the run.
        SRUNDDP: srunddp's own word; it knows which rank was first.
        AUTHORITY: the kernel, Slurm or mpirun.
        UNCAUGHT_EXCEPTION: a traceback that begins with the program's first frame.
        LINE: any other line, which somebody may have written of something that was handled.
    """

    GUESS = auto()
    END_FROM_OUTSIDE = auto()
    SRUNDDP = auto()
    AUTHORITY = auto()
    UNCAUGHT_EXCEPTION = auto()
    LINE = auto()


@dataclass(frozen=True)
class Case:
    """What an objection is asked of.

    Attributes:
        found: the diagnosis.
        first: the event that tells it.
        events: all that may contradict it, the first one too, and also what a rule sets aside.
        evidence: of the logs.
    """

    found: Diagnosis
    first: Event
    events: Sequence[Event]
    evidence: Evidence


Objection = Callable[[Case], bool]


def is_certain(case: Case) -> bool:
    """Tell whether nothing contradicts the diagnosis, and a second sign agrees."""
    objections = OBJECTIONS[teller(case)]
    return objections is not None and not any(applies(case) for applies in objections)


def teller(case: Case) -> Teller:
    """Find what the first failure is told by."""
    first = case.first
    # Whoever cancelled a job may have had a reason that no log tells.
    if first.rule or not first.sure or first.cause == "cancelled":
        return Teller.GUESS
    if case.evidence.observed.ones > 1:
        # Processes that each take themselves for the only one fail of many things at once.
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
    """Anybody may write ``the job exceeded its time limit``; Slurm, the kernel and mpirun know.

    A job script's own line, which may be of another job.
    """
    return not says("authority", case.first.text)


def a_rank_ended_by_itself(case: Case) -> bool:
    """A launcher told of a rank's own end, which may be why the run was ended.

    ``frozen2/made-room-for-another``: srun told of an exit code before Slurm's line came.
    """
    return case.evidence.report is not None


def stood_still_before(case: Case) -> bool:
    """A run that told no time for long had stopped before it was ended: why, nothing says.

    ``open/stuck-until-limit``: the last step was a day before the time limit.
    """
    first = case.first
    if first.time is None or first.since is None:
        return False
    return first.time - first.since > _STILL


def never_made_a_step(case: Case) -> bool:
    """A run that made no step until its time limit may have been stuck from the start.

    A log with Slurm's line on the time limit alone.
    """
    return case.first.cause == "time-limit" and not any(case.evidence.steps.values())


def another_end_is_told(case: Case) -> bool:
    """Somebody may have caught the exception, as something else ended the run later.

    A job that went on without ``flash_attn`` until its time limit.
    """
    return case.first.raised is not None and any(
        each.kind is Kind.ENDING and each.sure and each.cause != "cancelled" for each in case.events
    )


def wrote_on_until_stopped(case: Case) -> bool:
    """The rank wrote on after its traceback, until somebody cancelled the job.

    Then the exception was caught, by a script that did not say so.
    """
    first = case.first
    return (
        first.raised is not None
        and first.lines >= GOES_ON
        and case.evidence.is_stopped_after(first)
    )


def is_of_an_unknown_rank(case: Case) -> bool:
    """Of several ranks that spoke nothing tells whose failure it is.

    ``open/nccl-error-after-gpu-lost``: the kernel names a node and no rank. Where several ranks say
    the same they failed alike, and it does not matter whose line is first.
    """
    if case.found.rank is not None or len(case.found.seen) < 2:
        return False
    alike = [each for each in case.events if each.text == case.first.text]
    return len(alike) < 2


def made_steps_afterwards(case: Case) -> bool:
    """The same rank told of a step after it.

    ``open/no-module``: only one step, and it is of Slurm's ``STEP 530.0``. To be set aside as
    survived takes :data:`GOES_ON` steps; for a doubt one is enough.
    """
    return case.first.progress > 0


def another_cause_may_be_first(case: Case) -> bool:
    """Another cause was told, and not surely later.

    ``frozen2/half-of-them-wait``: the files of two nodes have another error each, without times.
    """
    others = [each for each in case.events if each.cause not in (case.first.cause, *_UNSPECIFIC)]
    return not all(surely_before(case.first, each) for each in others)


def launcher_tells_otherwise(case: Case) -> bool:
    """The launcher's first report is of another rank, or of a signal.

    ``frozen/root-cause-box-names-a-victim``: torchrun's box tells of SIGABRT, and nobody knows
    whether the traceback was the reason for it.
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
    """The same log tells of a good end.

    ``open/prolog``: srun's last line has "job step to complete".
    """
    return case.first.file in case.evidence.finished


def its_log_ends_well_unreported(case: Case) -> bool:
    """The same log tells of a good end, and no launcher of a rank's.

    A script that caught its exception and ended with ``Job finished``. A launcher's report of an
    exit code outweighs that word.
    """
    return case.evidence.report is None and its_log_ends_well(case)


_OF_A_LINE: tuple[Objection, ...] = (
    another_end_is_told,
    wrote_on_until_stopped,
    is_of_an_unknown_rank,
    made_steps_afterwards,
    another_cause_may_be_first,
)
# What is asked, by what the first failure is told by; None: it is never certain.
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
