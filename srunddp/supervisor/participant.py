"""The failure monitor of every rank but rank 0: it tells rank 0's supervisor what happens here, and
obeys it.
"""

from collections.abc import Iterable

from srunddp.supervisor.connection import SupervisorConnection
from srunddp.supervisor.failure import Failure, FailureKind
from srunddp.supervisor.failure_monitor import FailureMonitor, NextStart, RankContext
from srunddp.supervisor.lease import Lease
from srunddp.supervisor.messages import (
    AllScriptsAreOver,
    EndedAfterVerdict,
    EndRequested,
    HasFailed,
    LeaseHasEnded,
    Ping,
    Pong,
    RankMessage,
    ScriptIsOver,
    Stacks,
    StacksWanted,
    StayUntilClosed,
    UsesMpi,
    Verdict,
    WorkerHasEnded,
)
from srunddp.supervisor.root_cause import LOST, Ending, RootCause, report_as_deputy

_KILLED = "srunddp itself was killed"


class Participant(FailureMonitor):
    """The failure monitor of a rank above 0."""

    def __init__(self, context: RankContext, connection: SupervisorConnection) -> None:
        super().__init__(context.folder, limits=context.limits)
        self._context = context
        self._connection = connection
        self._failure: Failure | None = None
        self._lease: Lease | None = None
        if context.takeover:
            self._lease = Lease(context.lost_after, context.clock, context.limits)
        self._waits = self._stays = self._lost = False
        # The supervisor's clock begins at 0: the first ping is one interval later, not at once.
        self._heard = self._pinged = 0.0
        self._stays_until = 0.0  # by the context's clock, where it has spoken for rank 0

    @property
    def released(self) -> bool:
        return self._done and not self._waits

    @property
    def finished(self) -> bool:
        # After a failure when rank 0 closes: a launcher kills all at the first bad end.
        stays = self._stays or self.root_cause is not None
        if stays:
            return not self._connection.open and self._context.clock() >= self._stays_until
        return self._left and self._connection.sent

    def connections(self) -> Iterable[SupervisorConnection]:
        return (self._connection,)

    def on_readable(self, connection: SupervisorConnection, now: float) -> None:
        self._heard = now
        for message in connection.read():
            self._on_message(message)
        self._notice_end(now)

    def _on_message(self, message: RankMessage) -> None:
        match message:
            case Verdict() if self.root_cause is None:
                code = 0 if message.node_is_given_up else message.exit_code
                self.root_cause = RootCause(message.culprits, "", "", code)
                self.restart = message.restart_at
                self.fenced = message.node_is_given_up
            case Pong() if self._lease:
                self._lease.note(message.sent_at, message.echo)
                self._asked_by = self._asked_by or message.asked_by
            case StacksWanted():
                self._connection.send(Stacks(self._context.stacks()))
            case AllScriptsAreOver():
                self._waits = False
            case StayUntilClosed():
                self._stays = True

    def fail(self, failure: Failure, now: float) -> None:
        self._failure = self._failure or failure
        self._connection.send(HasFailed.about(failure))
        self._notice_end(now)

    def done(self, *, waits: bool = False) -> None:
        # The store is rank 0's. But where a rank fails while another is in MPI_Finalize, Open MPI's
        # mpirun may hang.
        super().done()
        self._waits = waits
        self._connection.send(ScriptIsOver(waits))

    def left(self) -> None:
        super().left()
        self._connection.send(WorkerHasEnded())

    def asked(self, by: str) -> None:
        super().asked(by)
        self._connection.send(EndRequested(by))

    def uses_mpi(self) -> None:
        super().asked("MPI")
        self._connection.send(UsesMpi())

    def ended(self) -> None:
        self._connection.send(EndedAfterVerdict())

    def abandon(self, failure: Failure) -> bool:
        if not self._lease:
            return False
        self.root_cause = RootCause.of(failure)
        self.fenced = True
        self._connection.end()
        self._connection.open = False
        return True

    def tick(self, now: float) -> float:
        self._heard = self._heard or now  # nothing is expected before the first ping
        if (
            now - self._heard > self._context.silent_after
            and self._needs_rank_zero
            and not self._done
        ):
            self._on_end(self._context.starved, now, silent=True)
        if self._lease_ends(now) <= self._context.clock():
            # Or our end would be taken for a kill.
            self._connection.send(LeaseHasEnded())
            self._connection.end()
            self._on_end(f"no answer for {self._context.lost_after:g} s", now, silent=True)
        self._notice_end(now)
        if now >= self._pinged + self._context.ping_every:
            self._pinged = now
            self._connection.send(self._ping())
        due = self._pinged + self._context.ping_every - now
        if (stays := self._stays_until - self._context.clock()) > 0.0:
            due = min(due, stays)
        if self._left:
            return self._limits.looks_whether_sent
        return min(due, max(0.0, self._lease_ends(now) - self._context.clock()))

    def _ping(self) -> Ping:
        step = self._context.step()
        if self._lease is None:
            return Ping(step)
        times = self._lease.stamp()
        return Ping(step, times.sent_at, times.echo)

    def _lease_ends(self, now: float) -> float:
        is_bound = self._lease and self._needs_rank_zero and not self._context.asked(now)
        if self._lease and is_bound:
            return self._lease.ends
        return float("inf")

    def next_start(self) -> NextStart:
        if self._lease and self._lost:
            return NextStart(not_before=self._lease.other_ended)
        return NextStart()

    @property
    def _needs_rank_zero(self) -> bool:
        return not self._left and self.root_cause is None

    def _notice_end(self, now: float) -> None:
        if not self._connection.open and self._needs_rank_zero:
            self._on_end(_KILLED, now)

    def _on_end(self, cause: str, now: float, *, silent: bool = False) -> None:
        if self._context.asked(now) and not self._failure:
            # The launcher ends one node after the other, and the worker may have something to save.
            return
        self._lost = self._connection.lost or silent
        self._connection.open = False
        self.root_cause = self._own_root_cause(cause)
        if self._lease and not self._asked_by and not self._context.asked(now):
            self.restart = self._context.takeover
            self.fenced = True
            self.cut_off = self._lost
        # Else a new rank 0 says so, once others have come to it.
        if not (self._lost and self._lease):
            self._act_for_rank_zero()

    def _act_for_rank_zero(self) -> None:
        """Where rank 0 is gone, the first deputy says so, unless it is cut off itself."""
        deputies = self._context.deputies
        if (deputies.listening and not deputies.here) or self._is_cut_off():
            return
        if self.root_cause and (
            deputies.first(lost=self._lost) == self._context.rank or not deputies.listening
        ):
            report_as_deputy(self.root_cause, self._folder, self._limits)
            if deputies.listening and self.restart is None:
                self._stays_until = self._context.clock() + self._limits.deputy_stays

    def _is_cut_off(self) -> bool:
        return self._lost and not (
            self._context.link_is_up() and self._context.deputies.network_is_up()
        )

    def is_first_deputy(self) -> bool:
        return (
            not self._is_cut_off()
            and self._context.deputies.first(lost=self._lost) == self._context.rank
        )

    def _own_root_cause(self, cause: str) -> RootCause:
        """Without rank 0: this rank's own failure, else a lost node, rank 0's or ours, else rank
        0's supervisor.
        """
        context = self._context
        if self._failure and not (self._lost and self._failure.weight is FailureKind.SECONDARY):
            return RootCause.of(self._failure)
        if not self._lost:
            return RootCause((0,), context.nodes[0], cause, 137)
        ours = self._connection.lost and not context.link_is_up()
        if ours:
            rank = context.rank
            node = context.node
        else:
            rank = 0
            node = context.nodes[0]
        if self._connection.lost:
            cause = f"no answer for {context.lost_after:g} s"
        return RootCause((rank,), node, cause, LOST, ending=Ending.LOST)
