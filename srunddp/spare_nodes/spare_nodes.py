"""What ``--spare-nodes`` adds to one rank's part in a run, in one object."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from srunddp.bootstrap.rendezvous.messages import RendezvousInfo
from srunddp.bootstrap.rendezvous.rank_setup import RankSetup, Rejoin, SpareNodeTerms
from srunddp.bootstrap.rendezvous.roles import RankZero
from srunddp.spare_nodes.lease import Lease
from srunddp.supervisor.clock import Clock
from srunddp.supervisor.connection import SupervisorConnection
from srunddp.supervisor.failure_monitor import FailureMonitor
from srunddp.supervisor.limits import DEFAULT_LIMITS, Limits
from srunddp.supervisor.node_replacement import NodeReplacement, WorkerLease
from srunddp.supervisor.root_cause import LOST, Ending, RootCause, report_as_deputy

if TYPE_CHECKING:
    from srunddp.bootstrap.rendezvous.server import RendezvousServer


@dataclass(frozen=True, kw_only=True)
class StartSpareNodes:
    """The spare nodes of one start, for the failure monitor: a ``SpareNodesOfStart``.

    Attributes:
        nodes: Of each task that this rank knows.
        world_size: From which number on tasks wait on spare nodes.
        takeover: What stands for rank 0's publication where rank 0 is gone; empty in the last
            start.
        lost_after: How long a lease lasts, in seconds.
        clock: That of the leases, which a suspension does not stop.
        limits: The supervisor's times.
    """

    nodes: Mapping[int, str]
    world_size: int
    takeover: str
    lost_after: float
    clock: Clock
    limits: Limits = DEFAULT_LIMITS

    @property
    def numbers(self) -> frozenset[int]:
        """The numbers of the tasks that wait on spare nodes, as far as this rank knows them."""
        return frozenset(number for number in self.nodes if number >= self.world_size)

    def replacement(self, connections: Mapping[int, SupervisorConnection]) -> NodeReplacement:
        """Return rank 0's part."""
        # Of the ranks rank 0 alone needs it.
        from srunddp.spare_nodes.rank_zero import RankZeroSpareNodes

        return RankZeroSpareNodes(
            self.nodes,
            self.numbers,
            connections,
            {number: self._new_lease() for number in connections},
            self.clock,
            can_move=bool(self.takeover),
        )

    def lease(self) -> WorkerLease | None:
        """Begin the lease of a rank above 0; None where no rank moves."""
        return self._new_lease() if self.takeover else None

    def _new_lease(self) -> Lease:
        return Lease(self.lost_after, self.clock, self.limits)


@dataclass(frozen=True, kw_only=True)
class SpareNodes:
    """What a rank does with ``--spare-nodes`` beside what it does without.

    Attributes:
        setup: This rank's.
        lost_after: Seconds without an answer after which a node is lost.
        restart_grace: Seconds that a worker has to end before a restart.
        folder: Of the run's logs; None where it has none.
        say: Takes lines for the user.
        limits: The supervisor's times.
    """

    setup: RankSetup
    lost_after: float
    restart_grace: float
    folder: Path | None
    say: Callable[[str], None]
    limits: Limits = DEFAULT_LIMITS

    def of_start(
        self, nodes: Mapping[int, str], meeting: RendezvousInfo, clock: Clock
    ) -> StartSpareNodes:
        """Return what the failure monitor of the start that begins has to know.

        Args:
            nodes: Of each task that this rank knows.
            meeting: What this rank was told at the rendezvous.
            clock: That of the leases.
        """
        options = self.setup.options
        has_restart_left = options.generation < options.max_restarts
        return StartSpareNodes(
            nodes=nodes,
            world_size=self.setup.environment.world_size,
            takeover=meeting.takeover if has_restart_left else "",
            lost_after=self.lost_after,
            clock=clock,
            limits=self.limits,
        )

    def server(self, rank_zero: RankZero, terms: SpareNodeTerms) -> RendezvousServer:
        """Return the server of a restart, which replaces the ranks that do not come.

        Args:
            rank_zero: What every server of this rank has.
            terms: What the start before has left.
        """
        # Of the ranks rank 0 alone needs it, and only after a restart.
        from srunddp.spare_nodes.server import SpareNodeServer

        return SpareNodeServer(
            own=rank_zero.introduction.hello,
            held=rank_zero.held,
            channel=rank_zero.channel,
            trust=rank_zero.introduction.trust,
            say=rank_zero.say,
            interrupt=rank_zero.interrupt,
            spares=self.setup.environment.spares,
            sizes=self.setup.environment.node_sizes,
            expected={*terms.expected},
            within=terms.within,
            not_before=terms.not_before,
            quorum=terms.quorum,
            lost_after=terms.lost_after,
            # Only a new rank 0 may be on the smaller side of a network that is split.
            on_quorum=self._on_quorum if terms.takes_over else lambda: None,
        )

    def _on_quorum(self) -> None:
        """On a new rank 0, to which more than half of the tasks have come."""
        # Nearly no run comes here.
        from srunddp.spare_nodes.srun import require_srun

        options = self.setup.options
        terms = options.rejoin.spare_nodes if options.rejoin else None
        if terms and terms.lost:
            node, cause = terms.lost
            root_cause = RootCause((0,), node, cause, LOST, ending=Ending.LOST)
            report_as_deputy(root_cause, self.folder, self.limits)
        many = f"restart {options.generation} of {options.max_restarts}"
        self.say(f"{many}: {self.setup.environment.node} takes over from rank 0's node")
        require_srun(self.say)

    def rejoin(
        self, rejoin: Rejoin, failure_monitor: FailureMonitor, meeting: RendezvousInfo
    ) -> Rejoin:
        """Return how this process meets the others again, where lost ranks are replaced.

        Args:
            rejoin: How it would meet them without spare nodes.
            failure_monitor: Of the start that is over.
            meeting: What this rank was told then.
        """
        environment = self.setup.environment
        known = failure_monitor.next_start()
        terms = SpareNodeTerms(
            rank=environment.rank,
            lost_after=self.lost_after,
            # By then a rank that does not come has ended its worker, as its lease is over; one that
            # does come has had the time for its script's end.
            within=self.lost_after + self.limits.lease_ends_within + self.restart_grace,
            expected=known.expected,
            not_before=known.not_before,
            quorum=known.quorum,
        )
        # For each restart rank 0 publishes a place of its own. It is gone where the places of the
        # deputies, which all were told at the rendezvous, stand for it.
        is_without_rank_zero = rejoin.published == meeting.takeover
        if is_without_rank_zero and environment.is_spare and failure_monitor.is_first_deputy():
            return self._rejoin_as_rank_zero(rejoin, terms, failure_monitor.root_cause, meeting)
        return replace(rejoin, spare_nodes=terms)

    def rejoin_as(self, rank: int) -> Rejoin:
        """Return how this task of a spare node meets the others again, as the rank that it was
        given.

        They are still in the rendezvous of this start, which is one after a restart.
        """
        rejoin = self.setup.options.rejoin
        assert rejoin
        assert rejoin.spare_nodes
        return replace(rejoin, spare_nodes=replace(rejoin.spare_nodes, rank=rank))

    def _rejoin_as_rank_zero(
        self,
        rejoin: Rejoin,
        terms: SpareNodeTerms,
        cause: RootCause | None,
        meeting: RendezvousInfo,
    ) -> Rejoin:
        """Return how a task of a spare node meets the others that takes over from rank 0.

        Args:
            rejoin: How it would meet them without spare nodes.
            terms: By which it would meet them if rank 0 were still there.
            cause: Why the start before has ended.
            meeting: What this process was told then.
        """
        environment = self.setup.environment
        if self.setup.deputy is None:
            return replace(rejoin, spare_nodes=terms)
        everyone = {*range(environment.world_size + environment.spares)} - {*meeting.vacant}
        on_node_of_rank_zero = {*range(environment.node_sizes[0])}
        lost: tuple[str, ...] = ()
        if cause and cause.ending is Ending.LOST:
            lost = (cause.node, cause.cause)
        return replace(
            rejoin,
            descriptor=self.setup.deputy.detach(),
            spare_nodes=replace(
                terms,
                rank=0,
                takes_over=True,
                lost=lost,
                expected=tuple(sorted(everyone - on_node_of_rank_zero - {environment.rank})),
                quorum=len(everyone) // 2 + 1,
            ),
        )

    def await_srun(self) -> None:
        """Before this process ends on a node that was cut off: wait for srun to hear of the end."""
        from srunddp.spare_nodes.srun import await_srun

        await_srun()
