"""What a task does only in a run with ``--spare-nodes``."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from srunddp.bootstrap.environment.slurm import fold_counts
from srunddp.bootstrap.rendezvous.discovery import Introduction
from srunddp.bootstrap.rendezvous.messages import RendezvousInfo
from srunddp.bootstrap.rendezvous.protocol import CancelToken
from srunddp.bootstrap.rendezvous.rank_setup import RankSetup, Rejoin, SpareNodeTerms
from srunddp.bootstrap.rendezvous.roles import ServerParts
from srunddp.errors import CutOffError, ReassignedError, RendezvousError, Scope, SrunddpError
from srunddp.spare_nodes import srun
from srunddp.spare_nodes.lease import Lease
from srunddp.supervisor.clock import Clock
from srunddp.supervisor.connection import SupervisorConnection
from srunddp.supervisor.failure_monitor import FailureMonitor
from srunddp.supervisor.limits import DEFAULT_LIMITS, Limits
from srunddp.supervisor.node_replacement import NodeReplacement, SpareNodesOfStart
from srunddp.supervisor.root_cause import LOST, Ending, RootCause, report_as_deputy
from srunddp.util.tcp import waiting_at

if TYPE_CHECKING:
    from srunddp.bootstrap.rendezvous.server import RendezvousServer


def spare_nodes_of_start(
    nodes: Mapping[int, str],
    world_size: int,
    takeover: str,
    lost_after: float,
    limits: Limits = DEFAULT_LIMITS,
    clock: Clock = time.monotonic,
    min_nodes: int = 0,
    returning_numbers: Mapping[str, tuple[int, ...]] | None = None,
    waiting: Callable[[], int] = lambda: 0,
) -> SpareNodesOfStart:
    """Return the facts about the spare nodes in one start that the failure monitor has to know.

    Args:
        nodes: The node of each task that this task knows, by the task's number.
        world_size: The number of ranks; the tasks from this number on wait on spare nodes.
        takeover: The text that says where the deputies listen. The ranks use it when rank 0 is
            gone. Empty if no rank can move.
        lost_after: How long a lease lasts, in seconds.
        limits: The supervisor's times.
        clock: The clock of the leases, which must also be the clock of the failure monitor. It has
            to go on while this process is suspended.
        min_nodes: The smallest number of nodes with which the run goes on when no spare node is
            left; 0 if it needs as many nodes as before.
        returning_numbers: By node, the numbers with which its tasks come back after the node was
            given up; None if they do not come back.
        waiting: Returns how many tasks of given-up nodes wait for the next start.
    """
    numbers = frozenset(number for number in nodes if number >= world_size)

    def replacement(connections: Mapping[int, SupervisorConnection]) -> NodeReplacement:
        # Imported here because only rank 0 needs it.
        from srunddp.spare_nodes.rank_zero import RankZeroSpareNodes

        return RankZeroSpareNodes(
            nodes,
            numbers,
            connections,
            {number: Lease(lost_after, clock, limits) for number in connections},
            clock,
            can_move=bool(takeover),
            min_nodes=min_nodes,
            returning_numbers=returning_numbers,
            waiting=waiting,
        )

    def lease() -> Lease | None:
        return Lease(lost_after, clock, limits) if takeover else None

    return SpareNodesOfStart(
        numbers=numbers, takeover=takeover, replacement=replacement, lease=lease
    )


@dataclass(frozen=True, kw_only=True)
class SpareNodes:
    """What a task does only in a run with ``--spare-nodes``, whether the task is a rank or waits.

    Attributes:
        setup: The facts about itself that this task knows before the rendezvous.
        lost_after: Seconds without an answer after which a node is lost.
        restart_grace: Seconds that a worker has to end before a restart.
        folder: The folder of the run's logs; None if the run writes none.
        say: Prints a line for the user.
        limits: The supervisor's times.
    """

    setup: RankSetup
    lost_after: float
    restart_grace: float
    folder: Path | None
    say: Callable[[str], None]
    limits: Limits = DEFAULT_LIMITS

    def of_start(self, nodes: Mapping[int, str], meeting: RendezvousInfo) -> SpareNodesOfStart:
        """Return the facts about the spare nodes in this start that the failure monitor has to
        know.

        Args:
            nodes: The node of each task that this task knows, by the task's number.
            meeting: The answer that this task got at the rendezvous.
        """
        options = self.setup.options
        has_restart_left = options.generation < options.max_restarts
        return spare_nodes_of_start(
            nodes,
            self.setup.environment.world_size,
            meeting.takeover if has_restart_left else "",
            self.lost_after,
            self.limits,
            min_nodes=self.setup.environment.min_nodes,
            returning_numbers=self._returning_numbers() if self._can_come_back(meeting) else None,
            waiting=self._waiting,
        )

    def _can_come_back(self, meeting: RendezvousInfo) -> bool:
        """Return whether tasks that are given up in this start come back. If the next start is the
        last start of the run, no task comes back, because no node is replaced after that start.
        """
        options = self.setup.options
        return bool(meeting.returns_at) and options.generation + 1 < options.max_restarts

    def _returning_numbers(self) -> Mapping[str, tuple[int, ...]]:
        environment = self.setup.environment
        first = environment.world_size + environment.spares
        found = dict[str, tuple[int, ...]]()
        for task, node in environment.step.layout().items() if environment.step else ():
            found[node] = (*found.get(node, ()), first + task)
        return found

    def _waiting(self) -> int:
        standing = self.setup.standing
        return 0 if standing is None else waiting_at(standing)

    def server(self, parts: ServerParts, terms: SpareNodeTerms) -> RendezvousServer:
        """Return rank 0's server for the rendezvous after a restart, which replaces lost ranks.

        Args:
            parts: The parts that every rendezvous server of rank 0 needs.
            terms: The terms that the previous start has handed on.
        """
        # Imported here because only rank 0 needs it, and only after a restart.
        from srunddp.spare_nodes.server import SpareNodeServer

        return SpareNodeServer(
            own=parts.introduction.hello,
            held=parts.held,
            channel=parts.channel,
            trust=parts.introduction.trust,
            say=parts.say,
            interrupt=parts.interrupt,
            spares=self.setup.environment.spares,
            may_shrink=self.setup.environment.may_shrink,
            names_nodes=True,
            agent_store=parts.agent_store,
            returns_at=self.setup.returns_at,
            sizes=self.setup.environment.node_sizes,
            number=terms.number,
            min_nodes=self.setup.environment.min_nodes,
            expected={*terms.expected},
            within=terms.within,
            not_before=terms.not_before,
            quorum=terms.quorum,
            lost_after=terms.lost_after,
            left=terms.left,
            # Only a new rank 0 has to report that the old rank 0 is lost, and to check that srun's
            # node answers.
            on_quorum=self._on_quorum if terms.takes_over else lambda: None,
        )

    def _on_quorum(self) -> None:
        """Report that the old rank 0 is lost, and check that srun's node answers.

        A new rank 0 calls this when it has a quorum: when enough tasks have connected.

        Raises:
            UnavailableError: The node of srun does not answer.
        """
        options = self.setup.options
        terms = options.rejoin.spare_nodes if options.rejoin else None
        if terms and terms.lost:
            node, cause = terms.lost
            root_cause = RootCause((0,), node, cause, LOST, ending=Ending.LOST)
            report_as_deputy(root_cause, self.folder, self.limits)
        many = f"restart {options.generation} of {options.max_restarts}"
        self.say(f"{many}: {self.setup.environment.node} takes over from rank 0's node")
        srun.require_srun(self.say)

    def rejoin(
        self, rejoin: Rejoin, failure_monitor: FailureMonitor, meeting: RendezvousInfo
    ) -> Rejoin:
        """Return how this process meets the others at the next start, with the terms for replacing
        ranks.

        Args:
            rejoin: How this process would meet the others without spare nodes.
            failure_monitor: The failure monitor of the start that is over.
            meeting: The answer that this task got at the rendezvous of that start.
        """
        environment = self.setup.environment
        known = failure_monitor.next_start()
        terms = SpareNodeTerms(
            rank=environment.rank,
            ranks_per_node=fold_counts(environment.node_sizes),
            layout=environment.layout,
            lost_after=self.lost_after,
            # After this time the lease of a rank that has not connected is over, so its worker has
            # ended. Any other rank has had the time that its script may take to end.
            within=self.lost_after + self.limits.lease_ends_within + self.restart_grace,
            expected=known.expected,
            not_before=known.not_before,
            quorum=known.quorum,
            returns_at=meeting.returns_at,
            left=known.left,
        )
        if failure_monitor.returns:
            return self._rejoin_to_return(rejoin, replace(terms, is_awaited=True))
        # At each restart rank 0 publishes where it listens. If the text says instead where the
        # deputies listen, which all ranks were told at the rendezvous, rank 0 is gone.
        is_without_rank_zero = rejoin.published == meeting.takeover
        can_take_over = environment.is_spare or environment.may_shrink
        if is_without_rank_zero and can_take_over and failure_monitor.is_first_deputy():
            return self._rejoin_as_rank_zero(rejoin, terms, failure_monitor.root_cause, meeting)
        return replace(rejoin, spare_nodes=terms)

    def rejoin_as(self, reassigned: ReassignedError) -> Rejoin:
        """Return how this task meets the others after it was given a different number. It meets
        them in the same start, by a second rendezvous.

        Args:
            reassigned: The new number and layout. Rank 0 has told them to all other tasks.
        """
        rejoin = self.setup.options.rejoin
        assert rejoin
        assert rejoin.spare_nodes
        terms = replace(
            rejoin.spare_nodes,
            rank=reassigned.rank,
            ranks_per_node=reassigned.ranks_per_node,
            layout=reassigned.layout,
            is_awaited=False,
        )
        rejoin = replace(rejoin, generation=reassigned.generation)
        if not self.setup.held:
            return replace(rejoin, spare_nodes=terms)
        # Here this task is rank 0. If it has taken over from an old rank 0, it has done so by now.
        # It keeps its socket, because some of the other tasks may already have connected to it.
        terms = replace(terms, takes_over=False, number=0, lost=None, expected=reassigned.expected)
        descriptor = self.setup.held.rendezvous.detach()
        return replace(rejoin, descriptor=descriptor, spare_nodes=terms)

    def rejoin_after(self, error: SrunddpError) -> Rejoin | None:
        """Return how this task comes back after a rendezvous that it could not complete; None if it
        does not come back.

        Args:
            error: Why the task could not complete the rendezvous.
        """
        rejoin = self.setup.options.rejoin
        environment = self.setup.environment
        if rejoin is None or rejoin.spare_nodes is None or environment.is_returning:
            return None
        if rejoin.generation >= self.setup.options.max_restarts:
            return None  # no start follows
        # After an error of the whole job there is no run to which the task could come back.
        is_alone = isinstance(error, RendezvousError) and error.scope is not Scope.JOB
        if not (is_alone or isinstance(error, CutOffError)) or not rejoin.spare_nodes.returns_at:
            return None
        return self._rejoin_to_return(rejoin, replace(rejoin.spare_nodes, is_awaited=False))

    def _rejoin_to_return(self, rejoin: Rejoin, terms: SpareNodeTerms) -> Rejoin:
        """Return how this task comes back after its node was given up.

        Args:
            rejoin: How this process would meet the others if its node were not given up.
            terms: The terms with which this process would then meet the others.
        """
        return replace(
            rejoin,
            published=terms.returns_at,
            descriptor=None,
            spare_nodes=replace(
                terms,
                rank=self.setup.environment.returning_number,
                expected=(),
                takes_over=False,
                number=0,
                lost=None,
            ),
        )

    def return_to_run(self, introduction: Introduction, interrupt: CancelToken | None) -> NoReturn:
        """Wait until the run takes this task back after its node was given up. This method never
        returns: the result is an exception.

        Args:
            introduction: What this task says of itself, and where rank 0 may be.
            interrupt: Ends the wait when this task fails.

        Raises:
            ReassignedError: The run takes the task back.
            NotNeededError: The run is over.
            RendezvousError: The others are not found, or Slurm has taken the node out of the job.
        """
        # Imported here because only a task that comes back needs it.
        from srunddp.spare_nodes.returning import wait_for_next_start

        wait_for_next_start(self.setup, introduction, interrupt, self.lost_after, self.limits)

    def dismiss_returning(self) -> None:
        """Tell the tasks that wait to come back that the run is over. Call this on rank 0."""
        if self.setup.standing is None or not waiting_at(self.setup.standing):
            return
        from srunddp.spare_nodes.returning import dismiss

        dismiss(self.setup, self.setup.standing)

    def _rejoin_as_rank_zero(
        self,
        rejoin: Rejoin,
        terms: SpareNodeTerms,
        cause: RootCause | None,
        meeting: RendezvousInfo,
    ) -> Rejoin:
        """Return how this task meets the others again when it takes over from rank 0.

        Args:
            rejoin: How this task would meet the others without spare nodes.
            terms: The terms with which this task would meet the others if rank 0 were not gone.
            cause: Why the previous start has ended.
            meeting: The answer that this task got at the rendezvous of that start.
        """
        environment = self.setup.environment
        if self.setup.deputy is None:
            return replace(rejoin, spare_nodes=terms)
        everyone = {*range(environment.world_size + environment.spares)} - {*meeting.vacant}
        on_node_of_rank_zero = {*range(environment.node_sizes[0])}
        lost = None
        if cause and cause.ending is Ending.LOST:
            lost = (cause.node, cause.cause)
        return replace(
            rejoin,
            descriptor=self.setup.deputy.detach(),
            spare_nodes=replace(
                terms,
                rank=0,
                takes_over=True,
                number=environment.rank,
                lost=lost,
                left=(meeting.master_node,),
                expected=tuple(sorted(everyone - on_node_of_rank_zero - {environment.rank})),
                quorum=len(everyone) // 2 + 1,
            ),
        )

    def await_srun(self) -> None:
        """Wait until srun's node can be reached. Call this before a process ends on a node that was
        cut off, because otherwise srun would not learn that the process has ended.
        """
        srun.await_srun()
