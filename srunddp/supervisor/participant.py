"""The failure monitor of every rank but rank 0. It tells rank 0's supervisor what happens to this
rank, and does what rank 0 decides.
"""

import math
from collections.abc import Iterable
from enum import Enum

from srunddp.supervisor.connection import SupervisorConnection
from srunddp.supervisor.failure import Failure, FailureKind, of_killed_supervisor
from srunddp.supervisor.failure_monitor import FailureMonitor, RankContext
from srunddp.supervisor.messages import (
    AllScriptsAreOver,
    EndedAfterVerdict,
    EndRequested,
    GpuFaults,
    GpuFaultsWanted,
    HasFailed,
    LeaseHasEnded,
    Ping,
    Pong,
    ProbeWanted,
    RankMessage,
    RunIsOver,
    SavesAfterVerdict,
    ScriptIsOver,
    Stacks,
    StacksWanted,
    UsesMpi,
    Verdict,
    WorkerHasEnded,
)
from srunddp.supervisor.node_probe import NodeProbe
from srunddp.supervisor.node_replacement import NextStart, WorkerLease
from srunddp.supervisor.root_cause import LOST, Ending, RootCause, report_as_deputy


class RankZeroEnd(Enum):
    """How another rank finds that rank 0 is gone; the value describes it in words, where "its"
    means rank 0's.

    Attributes:
        may_go_on: Whether the processes of rank 0 may still run, for example on the other side of
            a split network. If not, they have ended.
    """

    KILLED = "its supervisor has ended, and its kernel has closed or reset the connection"
    ENDED_UNHEARD = (
        "its supervisor has ended some time after it was last heard from: nobody can tell how"
    )
    UNREACHABLE = "its kernel does not answer: ours has given the connection up"
    SILENT = "its kernel answers, but its supervisor does not: it is stopped or starved"
    LEASE_OVER = "with spare nodes, it has not answered for as long as a worker may go on"

    @property
    def may_go_on(self) -> bool:
        return self not in (RankZeroEnd.KILLED, RankZeroEnd.ENDED_UNHEARD)


class Participant(FailureMonitor):
    """The failure monitor of a rank above 0.

    A participant needs rank 0 until the worker has ended with 0 or a root cause is known. Until
    then the loss of rank 0 is itself a root cause, see :class:`RankZeroEnd`. Afterwards the
    participant waits for rank 0 to close the connection. If the worker has ended with 0, rank 0
    first says that the run is over. If rank 0 is gone without saying so, this rank still ends with
    0, but reports that rank 0 is gone.
    """

    def __init__(self, context: RankContext, connection: SupervisorConnection) -> None:
        super().__init__(context.folder, limits=context.limits)
        self._context = context
        self._connection = connection
        self._failure: Failure | None = None
        self._lease: WorkerLease | None = None
        if context.spare_nodes:
            self._lease = context.spare_nodes.lease()
        # Whether the worker stays until the scripts of all ranks are over.
        self._waits = False
        # Whether rank 0 has said that the workers of all ranks have ended with 0.
        self._run_is_over = False
        self._rank_zero_end: RankZeroEnd | None = None
        # False once this rank ignores what still comes from rank 0, see _hangs_up().
        self._hears = True
        # When something last came from rank 0, and when the last ping was sent. The supervisor's
        # clock begins at 0, so the first ping is sent one interval later.
        self._heard = self._pinged = 0.0
        # For how long nothing had come from rank 0 when rank 0 ended the connection.
        self._silence_before_end = 0.0
        # The probe of other nodes that rank 0 has asked for; None if none is under way.
        self._probe: NodeProbe | None = None
        # Whether rank 0 has asked for the faults of this node's GPUs, and has no answer yet.
        self._asks_gpus = False
        # Until when this rank stays after it has reported the root cause in place of rank 0, by the
        # clock of the leases (RankContext.clock).
        self._stays_until = 0.0

    @property
    def released(self) -> bool:
        return self._done and not self._waits

    @property
    def finished(self) -> bool:
        # Leave only when rank 0 has closed the connection: a launcher may kill all other tasks when
        # one ends, and at once if it ends with an error.
        if not self._left and self.root_cause is None:
            return False
        return not self._connection.open and self._context.clock() >= self._stays_until

    def connections(self) -> Iterable[SupervisorConnection]:
        return (self._connection,)

    def on_readable(self, connection: SupervisorConnection, now: float) -> None:
        messages = connection.read()
        if messages or connection.open:
            self._heard = now
        else:
            self._silence_before_end = now - (self._heard or now)
        if not self._hears:
            # read() may set `open` to True, but this connection counts as ended.
            connection.open = False
            return
        for message in messages:
            self._on_message(message, now)
        self._notice_end(now)

    def _on_message(self, message: RankMessage, now: float) -> None:
        match message:
            case Verdict() if self.root_cause is None:
                # A rank whose worker has ended with 0 ends with 0 whatever the verdict.
                keeps_zero = message.node_is_given_up or self._left
                code = 0 if keeps_zero else message.exit_code
                self.root_cause = RootCause(message.culprits, "", "", code)
                self.restart = message.restart_at
                self.fenced = message.node_is_given_up
                self.returns = self.fenced and self.restart is not None
            case Pong() if self._lease:
                self._lease.note(message.sent_at, message.echo)
                self._asked_by = self._asked_by or message.asked_by
            case StacksWanted():
                self._connection.send(Stacks(self._context.stacks()))
            case ProbeWanted():
                self._end_probe()
                self._probe = NodeProbe(message, now, self._limits)
            case GpuFaultsWanted():
                self._ask_gpus()
            case AllScriptsAreOver():
                self._waits = False
            case RunIsOver():
                self._run_is_over = True

    def fail(self, failure: Failure, now: float) -> None:
        self._failure = self._failure or failure
        self._connection.send(HasFailed.about(failure, has_steps=self._context.has_steps()))
        self._notice_end(now)

    def done(self, *, waits: bool = False) -> None:
        # Rank 0's worker has torch's store, so this worker need not stay for the others. But with
        # Open MPI, mpirun may hang if a rank fails while another is in MPI_Finalize. Hence `waits`.
        super().done()
        self._waits = waits
        self._connection.send(
            ScriptIsOver(waits, self._context.has_steps(), self._context.ran_alone())
        )

    def left(self) -> None:
        super().left()
        self._connection.send(WorkerHasEnded())
        if self._lease:
            # This rank cannot take over from rank 0 any more: the next deputy does.
            self._context.deputies.stop_listening()

    def asked(self, by: str) -> None:
        super().asked(by)
        self._connection.send(EndRequested(by))

    def uses_mpi(self) -> None:
        super().asked("MPI")
        self._connection.send(UsesMpi())

    def ended(self) -> None:
        self._connection.send(EndedAfterVerdict())

    def saves(self) -> None:
        self._connection.send(SavesAfterVerdict())

    def abandon(self, failure: Failure, now: float) -> bool:
        if not self._lease:
            return False
        self.root_cause = RootCause.of(failure)
        # Drop a restart that a verdict may have announced: without its launcher, this process takes
        # no part in it.
        self.restart = None
        self.returns = False
        self.fenced = True
        self._connection.end()
        self._hangs_up()
        return True

    def _hangs_up(self) -> None:
        """Ignore whatever still comes from rank 0."""
        self._hears = False
        self._connection.open = False

    def tick(self, now: float) -> float:
        self._heard = self._heard or now  # the rendezvous may have taken long, so count from here
        self._notice_end(now)
        is_silent = now - self._heard > self._context.silent_after
        # After a verdict this rank has to stay although rank 0 sends nothing: other ranks may be
        # saving.
        if self._left and self.root_cause is None and is_silent:
            self._hangs_up()  # this rank needs nothing from rank 0, so it need not stay
        if now >= self._pinged + self._context.ping_every:
            self._pinged = now
            self._connection.send(self._ping())
        due = self._pinged + self._context.ping_every - now
        if self._probe is not None:
            due = min(due, self._look_at_probe(self._probe, now))
        due = min(due, self._look_at_gpus())
        if (stays := self._stays_until - self._context.clock()) > 0.0:
            due = min(due, stays)
        return min(due, max(0.0, self._lease_ends(now) - self._context.clock()))

    def _look_at_probe(self, probe: NodeProbe, now: float) -> float:
        """Tell rank 0 which nodes this node has reached if the probe is complete, or close the
        probe if the verdict is known. Return in how many seconds to look again.
        """
        if self.root_cause is not None:
            self._end_probe()
        elif result := probe.look(now):
            self._probe = None
            self._connection.send(result)
        return self._limits.probe_look

    def _ask_gpus(self) -> None:
        if self._context.gpus is None:
            self._connection.send(GpuFaults((), is_answer=True))
        else:
            self._asks_gpus = True
            self._context.gpus.ask()

    def _look_at_gpus(self) -> float:
        """Tell rank 0 of new faults of this node's GPUs, and answer its question if the answer is
        there. Return in how many seconds to look again; infinity if no answer is due.
        """
        gpus = self._context.gpus
        if gpus is None:
            return math.inf
        if news := gpus.news():
            self._connection.send(GpuFaults(news))
        if not self._asks_gpus:
            return math.inf
        faults = gpus.look()
        if faults is None:
            return self._limits.gpus_look
        self._asks_gpus = False
        self._connection.send(GpuFaults(faults, is_answer=True))
        return math.inf

    def _end_probe(self) -> None:
        if self._probe is not None:
            self._probe.close()
            self._probe = None

    def _ping(self) -> Ping:
        step = self._context.step()
        paused = self._context.paused()
        if self._lease is None:
            return Ping(step, paused=paused)
        times = self._lease.stamp()
        return Ping(step, times.sent_at, times.echo, paused=paused)

    def _lease_ends(self, now: float) -> float:
        """Return when this rank's lease is over; infinity if it has none, does not need rank 0 any
        more, or is being ended by the launcher.
        """
        is_bound = self._lease and self._needs_rank_zero and not self._context.asked(now)
        if self._lease and is_bound:
            return self._lease.ends
        return float("inf")

    def next_start(self) -> NextStart:
        if self._lease and self._rank_zero_may_go_on:
            return NextStart(not_before=self._lease.other_ended)
        return NextStart()

    @property
    def _needs_rank_zero(self) -> bool:
        return not self._left and self.root_cause is None

    @property
    def _expects_goodbye(self) -> bool:
        """Whether rank 0 still has to say that the run is over. A rank with a lease does not wait
        for this message, because another rank may take over from rank 0, and a rank whose worker
        has ended takes no part in that.
        """
        is_done = self._left and self.root_cause is None
        return is_done and self._hears and not self._run_is_over and self._lease is None

    @property
    def _rank_zero_may_go_on(self) -> bool:
        return self._rank_zero_end is not None and self._rank_zero_end.may_go_on

    def _notice_end(self, now: float) -> None:
        """End the run on this rank if rank 0 is gone while this rank needs it, or report that rank
        0 is gone if this rank needs only the message that the run is over.
        """
        if not self._needs_rank_zero and not self._expects_goodbye:
            return
        end = self._how_rank_zero_is_gone(now)
        if end is None:
            return
        if self._context.asked(now) and not self._failure:
            # The launcher's signal explains why rank 0 is gone: the launcher ends one node after
            # the other. The worker here may still have something to save.
            return
        if self._left and end is RankZeroEnd.SILENT:
            self._hangs_up()  # rank 0 may go on and end well
            return
        if self._left:
            self._report_missing_goodbye(end)
            return
        if end is RankZeroEnd.LEASE_OVER:
            # Send this first, because nothing can be sent once this side has ended the connection.
            # If rank 0 is still running, the message tells it that a node is lost; without the
            # message it would take the supervisor for killed.
            self._connection.send(LeaseHasEnded())
            self._connection.end()
        self._end_without_rank_zero(end, now)

    def _how_rank_zero_is_gone(self, now: float) -> RankZeroEnd | None:
        """Return how rank 0 is gone, by the surest sign that there is; None if it is not gone."""
        if not self._connection.open:
            if self._connection.lost or self._rank_zero_was_cut_off():
                return RankZeroEnd.UNREACHABLE
            if self._run_may_have_ended_unheard():
                return RankZeroEnd.ENDED_UNHEARD
            return RankZeroEnd.KILLED
        if self._lease_ends(now) <= self._context.clock():
            return RankZeroEnd.LEASE_OVER
        heard = self._heard or now
        if now - heard > self._context.silent_after:
            # Sending may have found that the connection is lost, before read() has found it.
            return RankZeroEnd.UNREACHABLE if self._connection.lost else RankZeroEnd.SILENT
        return None

    def _rank_zero_was_cut_off(self) -> bool:
        """Return whether rank 0's kernel has reset the connection because one of the nodes was cut
        off.

        With spare nodes, rank 0 gives up a rank from which nothing comes, and ends itself if it
        hears from too few ranks. When the network is back, rank 0's kernel resets the connection.
        If instead rank 0's supervisor was killed, this rank has heard from it shortly before.
        """
        context = self._context
        return (
            self._lease is not None
            and self._connection.reset
            and context.node != context.nodes[0]
            and self._silence_before_end > context.lease_may_be_over_after
        )

    def _run_may_have_ended_unheard(self) -> bool:
        """Return whether the run may have ended in order without this node hearing of it, because
        this node or rank 0's was cut off. It is also possible that rank 0's supervisor was starved
        and then killed.

        If a supervisor that was running well was killed, this rank has heard from it shortly
        before, because rank 0 sends pings too or answers this rank's at once.
        """
        context = self._context
        return (
            self._connection.reset
            and context.node != context.nodes[0]
            and self._silence_before_end > self._limits.unheard_pings * context.ping_every
        )

    def _end_without_rank_zero(self, end: RankZeroEnd, now: float) -> None:
        context = self._context
        self._rank_zero_end = end
        self._hangs_up()
        self.root_cause = self._own_root_cause(end)
        if context.spare_nodes and self._lease and not self._asked_by and not context.asked(now):
            self.restart = context.spare_nodes.takeover
            self.fenced = True
            self.cut_off = end.may_go_on
        # If rank 0 may go on and there are spare nodes, this rank does not report: a new rank 0
        # reports the loss when the other tasks have connected to it.
        if not (end.may_go_on and self._lease):
            self._act_for_rank_zero(self.root_cause)

    def _report_missing_goodbye(self, end: RankZeroEnd) -> None:
        """Report that rank 0 has gone before the end of the run, although this rank is done and its
        exit code stays 0. All other ranks may be done too, and then no other rank can report it.
        """
        self._rank_zero_end = end
        self._hangs_up()
        self._act_for_rank_zero(self._own_root_cause(end))

    def _act_for_rank_zero(self, root_cause: RootCause) -> None:
        """Report the root cause in place of rank 0 if this rank is the first deputy that can be
        reached, or if the run has no deputies. Do nothing if this node itself is cut off.
        """
        deputies = self._context.deputies
        if (deputies.listening and not deputies.here) or self._is_cut_off():
            return
        if (
            deputies.first(lost=self._rank_zero_may_go_on) == self._context.rank
            or not deputies.listening
        ):
            report_as_deputy(root_cause, self._folder, self._limits)
            if deputies.listening and self.restart is None:
                self._stays_until = self._context.clock() + self._limits.deputy_stays

    def _is_cut_off(self) -> bool:
        return self._rank_zero_may_go_on and not (
            self._context.link_is_up() and self._context.deputies.network_is_up()
        )

    def is_first_deputy(self) -> bool:
        return (
            not self._is_cut_off()
            and self._context.deputies.first(lost=self._rank_zero_may_go_on) == self._context.rank
        )

    def _own_root_cause(self, end: RankZeroEnd) -> RootCause:
        """Return the root cause as this rank sees it without rank 0.

        If this rank has failed, and the loss of rank 0 cannot have caused that, the root cause is
        this rank's failure. Otherwise, if ``end`` is KILLED, it is the death of rank 0's
        supervisor. In all other cases it is a lost node: rank 0's, or this one if its link is down
        or if it did not hear of rank 0 for too long.
        """
        context = self._context
        failure = self._failure
        # If rank 0's node is lost, an error of a collective is a consequence of that.
        may_follow = end is not RankZeroEnd.KILLED
        follows = may_follow and failure is not None and failure.weight is FailureKind.SECONDARY
        if failure is not None and not follows:
            return RootCause.of(failure)
        if end is RankZeroEnd.KILLED:
            return RootCause.of(of_killed_supervisor(0, context.nodes[0]))
        if end is RankZeroEnd.ENDED_UNHEARD:
            cause = (
                f"{context.node} did not hear of rank 0 on {context.nodes[0]} for"
                f" {self._silence_before_end:.0f} s, and rank 0 has ended meanwhile"
            )
            return RootCause((), context.node, cause, LOST, ending=Ending.LOST)
        rank = 0
        node = context.nodes[0]
        cause = f"no answer for {context.lost_after:g} s"
        if end is RankZeroEnd.SILENT:
            cause = context.starved
        if self._connection.lost and not context.link_is_up():
            rank = context.rank
            node = context.node
        return RootCause((rank,), node, cause, LOST, ending=Ending.LOST)
