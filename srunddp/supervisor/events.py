"""What happens to one rank's supervisor, and what it does upon that: the words in which
:mod:`srunddp.supervisor.phases` says which follows from which.

A kind without facts of its own is a plain subclass, as a dataclass compares the class as well: a
dataclass more costs the start of every rank some time.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from srunddp.supervisor.failure import Failure


class VerdictTerms(NamedTuple):
    """What a verdict means for the end of this rank's worker.

    Attributes:
        is_culprit: This rank is the root cause, or one of its ranks.
        restarts: All ranks start again.
        fenced: Others may go on with this node's ranks.
    """

    is_culprit: bool = False
    restarts: bool = False
    fenced: bool = False


@dataclass(frozen=True)
class Event:
    """Something has happened to this rank.

    Attributes:
        at: When, by the supervisor's clock.
    """

    at: float


class RanksHaveMet(Event):
    """The rendezvous is complete; from now on the failure monitor is there."""


@dataclass(frozen=True)
class RanksDoNotMeet(Event):
    """The rendezvous has failed.

    Attributes:
        error: Why.
    """

    error: BaseException


@dataclass(frozen=True)
class FailureEvent(Event):
    """This rank has failed.

    Attributes:
        failure: How.
    """

    failure: Failure


class RankHasFailed(FailureEvent):
    """The worker has ended, is stopped or hangs, and that is a failure."""


class ScriptFailed(FailureEvent):
    """The script has failed or stopped, and has said so. The worker is about to end by itself, and
    may have something to do before.
    """


class LauncherHasEnded(FailureEvent):
    """The process that started this one has ended, and no spare node takes over."""


@dataclass(frozen=True)
class ScriptSucceeded(Event):
    """The script has ended with 0, and its worker waits until it may leave.

    Attributes:
        waits: It waits until the scripts of all ranks are over.
    """

    waits: bool = False


class MayLeave(Event):
    """Nobody needs the worker any more, whose script is over."""


@dataclass(frozen=True)
class WorkerIsGone(Event):
    """The worker has ended, or cannot be killed.

    Attributes:
        status: Its exit code, or minus its signal; None for one that could not be killed.
        signal_may_follow: A signal has ended it that the launcher may have sent, and may be about
            to send here.
    """

    status: int | None
    signal_may_follow: bool = False


@dataclass(frozen=True)
class VerdictIsKnown(Event):
    """Rank 0 has decided that all end, or whoever decides where rank 0 is gone.

    Attributes:
        terms: What it means here.
    """

    terms: VerdictTerms


class NobodyNeedsUs(Event):
    """The failure monitor has said all that it had to say."""


class TimeIsOver(Event):
    """The time of the phase is over, which some phases have."""


@dataclass(frozen=True)
class Action:
    """Something for the supervisor to do."""


class HandOverWorld(Action):
    """Give the worker what it needs to start the script, and watch for what it says."""


@dataclass(frozen=True)
class FailureAction(Action):
    """Something to do about a failure of this rank.

    Attributes:
        failure: Which.
    """

    failure: Failure


class AbortRendezvous(FailureAction):
    """End the rendezvous: the thread that waits for the other ranks tells them of this failure."""


class TellFailure(FailureAction):
    """Tell the failure monitor that this rank has failed."""


class WriteFailure(FailureAction):
    """Write the traceback to the rank's log.

    Always after the failure has been told: it forks, and a slow file system must not delay the
    verdict.
    """


@dataclass(frozen=True)
class TellScriptIsOver(Action):
    """Tell the failure monitor that the script is over.

    Attributes:
        waits: The worker stays until the scripts of all ranks are over.
    """

    waits: bool = False


class TellWorkerHasEnded(Action):
    """Tell the failure monitor that the worker has ended with 0."""


class TellEndAfterVerdict(Action):
    """Tell the failure monitor that the worker has ended since the verdict."""


class AnnounceEnd(Action):
    """Let the worker know that the signal to come is for another's failure."""


class LetLeave(Action):
    """Tell the worker that it may leave."""


@dataclass(frozen=True)
class EndWorker(Action):
    """Make the worker go. Of several of these the earliest time counts.

    Attributes:
        ask: By SIGTERM first; not one that is about to end by itself.
        within: Seconds until SIGKILL; None leaves it its time.
    """

    ask: bool
    within: float | None


class ReportStatus(Action):
    """Make a failure of how the worker has ended; :class:`RankHasFailed` follows."""


@dataclass(frozen=True)
class LingeringAction(Action):
    """Something to do about a worker that has not ended for long after its script.

    Attributes:
        since: When it was told that it may leave.
    """

    since: float


class NameLingering(LingeringAction):
    """Print where it hangs."""


class ReportLingering(LingeringAction):
    """Make a failure of where it hangs; :class:`RankHasFailed` follows."""


@dataclass(frozen=True)
class LeaveWith(Action):
    """Leave with this error in the end; of several the last one counts.

    Attributes:
        error: To be raised.
    """

    error: BaseException
