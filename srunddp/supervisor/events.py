"""The events that happen to one rank's supervisor, and the actions that it takes.
:mod:`srunddp.supervisor.phases` says which actions follow from which event.

An event or action without attributes is a plain subclass and not a dataclass, because each
dataclass makes the start of every rank slower. Two of them are still equal only if their classes
are the same, because the base class compares the classes as well.
"""

from __future__ import annotations

from typing import NamedTuple

from srunddp.supervisor.failure import Failure
from srunddp.util.quick_dataclass import dataclass


class VerdictTerms(NamedTuple):
    """The consequences of a verdict for this rank's worker.

    Attributes:
        is_culprit: Whether this rank is one of the ranks of the root cause.
        restarts: Whether another start follows.
        fenced: Whether another node may go on with the ranks of this node.
    """

    is_culprit: bool = False
    restarts: bool = False
    fenced: bool = False


@dataclass(frozen=True)
class Event:
    """Something that has happened to this rank.

    Attributes:
        at: The time by the supervisor's clock.
    """

    at: float


class RanksHaveMet(Event):
    """The rendezvous is complete. From now on this supervisor has a failure monitor."""


@dataclass(frozen=True)
class RanksDoNotMeet(Event):
    """The rendezvous has failed.

    Attributes:
        error: The exception that the rendezvous has raised.
    """

    error: BaseException


@dataclass(frozen=True)
class FailureEvent(Event):
    """This rank has failed.

    Attributes:
        failure: The failure, with its cause and its exit code.
    """

    failure: Failure


class RankHasFailed(FailureEvent):
    """The worker has ended, is stopped or hangs, and this counts as a failure."""


class ScriptFailed(FailureEvent):
    """The script has failed or stopped, and its worker has reported it. The worker is about to end
    by itself, but may have something to save first.
    """


class LauncherHasEnded(FailureEvent):
    """The process that started this one has ended, and no spare node takes over."""


@dataclass(frozen=True)
class ScriptSucceeded(Event):
    """The script has ended with 0, and its worker waits until it may leave.

    Attributes:
        waits: Whether the worker has to wait until the scripts of all ranks are over.
    """

    waits: bool = False


class MayLeave(Event):
    """The script is over, and no rank needs this worker any more."""


@dataclass(frozen=True)
class WorkerIsGone(Event):
    """The worker has ended, or cannot be killed.

    Attributes:
        status: The worker's exit code, or minus the number of the signal that ended it; None if it
            could not be killed.
        signal_may_follow: Whether the launcher may have ended the worker by a signal that has yet
            to reach this supervisor.
    """

    status: int | None
    signal_may_follow: bool = False


@dataclass(frozen=True)
class VerdictIsKnown(Event):
    """The verdict is known: rank 0 has decided that all ranks end, or this rank has decided it
    itself because rank 0 is gone.

    Attributes:
        terms: The consequences of the verdict for this rank.
        may_save: Whether the worker may have something to save: the script has set a handler for
            SIGTERM, and the launcher has not sent a signal that ends the run. After such a signal,
            ``--signal-grace`` is over by now, and another SIGTERM would interrupt the saving.
    """

    terms: VerdictTerms
    may_save: bool = False


class WorkerIsIdle(Event):
    """The worker is being ended, and since the last look it has neither run Python nor written a
    file, like a worker that waits for another rank.
    """


class NobodyNeedsUs(Event):
    """The failure monitor has nothing left to do, so this supervisor may leave."""


class TimeIsOver(Event):
    """The time limit of the phase has passed. Only some phases have a limit."""


@dataclass(frozen=True)
class Action:
    """Something for the supervisor to do."""


class HandOverWorld(Action):
    """Give the worker what it needs to start the script, and begin to read its messages."""


@dataclass(frozen=True)
class FailureAction(Action):
    """Something to do about a failure of this rank.

    Attributes:
        failure: The failure, with its cause and its exit code.
    """

    failure: Failure


class AbortRendezvous(FailureAction):
    """End the rendezvous. The thread that waits for the other ranks tells them of this failure."""


class TellFailure(FailureAction):
    """Tell the failure monitor that this rank has failed."""


class WriteFailure(FailureAction):
    """Write the traceback to the rank's log.

    This always comes after the failure has been reported: writing requires a fork, which must not
    delay the verdict.
    """


@dataclass(frozen=True)
class TellScriptIsOver(Action):
    """Tell the failure monitor that the script is over.

    Attributes:
        waits: Whether the worker stays until the scripts of all ranks are over.
    """

    waits: bool = False


class TellWorkerHasEnded(Action):
    """Tell the failure monitor that the worker has ended with 0."""


class TellMaySave(Action):
    """Tell the failure monitor that the worker handles SIGTERM and may save after the verdict."""


class LookAtWorker(Action):
    """Look at the worker, which is being ended. If it has done nothing since the previous look, the
    event :class:`WorkerIsIdle` follows.
    """


class KillLeftBehind(Action):
    """Begin to kill the processes that the worker has left behind, while the supervisor stays."""


class TellEndAfterVerdict(Action):
    """Tell the failure monitor that the worker has ended since the verdict."""


class AnnounceEnd(Action):
    """Tell the worker that the signal it is about to get is sent because of the root cause, and not
    by the launcher.
    """


class LetLeave(Action):
    """Tell the worker that it may leave."""


@dataclass(frozen=True)
class EndWorker(Action):
    """End the worker. If this action comes again, the earliest time for SIGKILL counts.

    Attributes:
        ask: Whether to send SIGTERM first; False if the worker is about to end by itself.
        within: Seconds until SIGKILL; None to set no such time, in which case SIGTERM is not sent
            either.
    """

    ask: bool
    within: float | None


class ReportStatus(Action):
    """Have the event :class:`RankHasFailed` follow, with the worker's exit code or signal as the
    cause.
    """


@dataclass(frozen=True)
class LingeringAction(Action):
    """Something to do about a worker that has not ended long after its script was over.

    Attributes:
        since: When the worker was told that it may leave.
    """

    since: float


class NameLingering(LingeringAction):
    """Print where the worker hangs."""


class ReportLingering(LingeringAction):
    """Have the event :class:`RankHasFailed` follow, whose cause says where the worker hangs."""


@dataclass(frozen=True)
class LeaveWith(Action):
    """Have the supervisor raise this error when it leaves. If this action is repeated, the last
    error counts.

    Attributes:
        error: The exception for :meth:`srunddp.supervisor.supervisor.Supervisor.run` to raise.
    """

    error: BaseException
