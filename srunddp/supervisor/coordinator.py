"""The failure monitor of rank 0: it reads from all ranks, decides which failure came first, and
ends the run with it.

What each rank has said goes into three parts that know nothing of each other: where each rank is
(:mod:`~srunddp.supervisor.rank_table`), who is still there (:mod:`~srunddp.supervisor.liveness`),
and how far the decision is (:mod:`~srunddp.supervisor.decision`). This module hands events to them,
and does what they ask for. What only spare nodes need is behind
:mod:`~srunddp.supervisor.node_replacement`.
"""

import math
import os
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace

from srunddp.supervisor.connection import SupervisorConnection
from srunddp.supervisor.decision import Decision, DecisionEvent, Facts, RankZeroAction
from srunddp.supervisor.failure import (
    Failure,
    FailureKind,
    by_launcher,
    of_killed_supervisor,
)
from srunddp.supervisor.failure_monitor import FailureMonitor, RankContext
from srunddp.supervisor.liveness import Liveness
from srunddp.supervisor.messages import (
    AllScriptsAreOver,
    EndedAfterVerdict,
    EndRequested,
    HasFailed,
    LeaseHasEnded,
    Ping,
    RankMessage,
    ScriptIsOver,
    Stacks,
    StacksWanted,
    StayUntilClosed,
    UsesMpi,
    Verdict,
    WorkerHasEnded,
)
from srunddp.supervisor.node_replacement import NextStart, NodeReplacement
from srunddp.supervisor.rank_table import RankEvent, RankState, RankTable
from srunddp.supervisor.root_cause import LOST, Ending, RootCause, find_root_cause, report, write
from srunddp.supervisor.stall import (
    StackRequest,
    StallDetector,
    find_hanging_rank,
    find_stalled_rank,
)
from srunddp.util.cgroup import kills_whole_step
from srunddp.util.console import write_stderr


class Coordinator(FailureMonitor):
    """The failure monitor of rank 0."""

    def __init__(
        self, context: RankContext, connections: Mapping[int, SupervisorConnection]
    ) -> None:
        super().__init__(context.folder, context.restarts, context.limits)
        self._context = context
        self._connections = connections
        self._rank_of = {connection: rank for rank, connection in connections.items()}
        # Invariant: the ranks whose connection has not ended.
        self._open = set(connections)

        self._replacement: NodeReplacement | None = None
        spare_numbers = frozenset[int]()
        if context.spare_nodes:
            self._replacement = context.spare_nodes.replacement(connections)
            spare_numbers = context.spare_nodes.numbers
        self._table = RankTable(context.nodes.keys() - spare_numbers, spare_numbers)
        self._liveness = Liveness(context, connections)
        self._decision = Decision(context.limits)
        self._stall = StallDetector(context.stall_timeout)
        # The last one: see ASKING_STALLED and ASKING_OTHERS.
        self._request = StackRequest((), deadline=0.0)

        # Whose worker stays until the scripts of all are over.
        self._waiting = set[int]()
        self._scripts_were_over = False  # before the first failure
        # The ranks that have told of their own failure; and those whose worker has ended after the
        # decision, or whose supervisor has.
        self._self_reported = set[int]()
        self._ended = set[int]()

        # srun ends the step when a task ends on a node that ran out of memory: after a restart for
        # that all stay until the workers of all have ended.
        restarts = context.restarts
        self._stays_together = restarts is not None and restarts.history.out_of_memory
        if self._stays_together:
            for connection in connections.values():
                connection.send(StayUntilClosed())

    # What the supervisor asks.

    @property
    def released(self) -> bool:
        # The worker hosts the store, and leaves when the scripts of all others are over.
        return self._table.scripts_are_over

    @property
    def finished(self) -> bool:
        if not self._open:
            # The others leave first. Where the decision is still to fall, as rank 0's own worker
            # has left and another has failed, the tick after this question brings it.
            return self.root_cause is not None or self._own_state is RankState.LEFT
        return self._decision.is_over

    @property
    def _own_state(self) -> RankState:
        return self._table[self._context.rank]

    def connections(self) -> Iterable[SupervisorConnection]:
        return self._rank_of.keys()

    def next_start(self) -> NextStart:
        return self._replacement.next_start() if self._replacement else NextStart()

    # What happens to this rank.

    def done(self, *, waits: bool = False) -> None:
        self._note(self._context.rank, RankEvent.SCRIPT_IS_OVER)

    def left(self) -> None:
        self._note(self._context.rank, RankEvent.WORKER_HAS_ENDED)

    def ended(self) -> None:
        self._ended.add(self._context.rank)

    def fail(self, failure: Failure, now: float) -> None:
        """A rank has failed, this one or another."""
        rank = failure.rank
        if rank not in self._table.ranks:
            self._drop(rank, failure.cause, now)
            return
        if rank == self._context.rank:
            self._self_reported.add(rank)
        is_first = not self._decision.failures
        if is_first:
            self._scripts_were_over = self._table.scripts_are_over
        self._note(rank, RankEvent.HAS_FAILED)
        if is_first:
            self._decision.finished_before = self._finished_ranks()
        self._act(self._decision.fail(failure, now))

    def abandon(self, failure: Failure, now: float) -> bool:
        if not self._replacement or not self._replacement.can_move:
            return False
        return self._lose(replace(RootCause.of(failure), ending=Ending.LOST), now)

    # What comes over the connections.

    def on_readable(self, connection: SupervisorConnection, now: float) -> None:
        rank = self._rank_of[connection]
        self._liveness.note(rank, now)
        for message in connection.read():
            if self._table[rank] is not RankState.DROPPED:
                self._on_message(rank, message, now)
        if self._table[rank] is RankState.DROPPED:
            connection.open = False
        elif not connection.open:
            self._on_end(rank, now)

    def _on_message(self, rank: int, message: RankMessage, now: float) -> None:
        match message:
            case ScriptIsOver(waits):
                self._note(rank, RankEvent.SCRIPT_IS_OVER)
                if waits:
                    self._waiting.add(rank)
            case WorkerHasEnded():
                self._note(rank, RankEvent.WORKER_HAS_ENDED)
            case HasFailed():
                self._self_reported.add(rank)
                self.fail(message.failure(rank, self._context.nodes[rank]), now)
            case EndedAfterVerdict():
                self._ended.add(rank)
            case Ping():
                self._on_ping(rank, message, now)
            case _:
                self._on_note(rank, message)

    def _on_note(self, rank: int, message: RankMessage) -> None:
        """Take in what changes neither the state of the rank nor that of the decision."""
        match message:
            case Stacks(text):
                self._request.add(rank, text)
            case EndRequested(by):
                self.asked(by)
            case UsesMpi():
                self.uses_mpi()
            case LeaseHasEnded() if self._replacement:
                self._connections[rank].lost = True  # its end follows

    def _on_ping(self, rank: int, ping: Ping, now: float) -> None:
        if self._table[rank] is RankState.WORKING:
            self._stall.note(rank, ping.step, now)
        if self._replacement and self._replacement.can_move:
            self._replacement.answer(rank, ping, self._asked_by)

    def _note(self, rank: int, event: RankEvent) -> None:
        self._table.apply(rank, event)
        self._stall.remove(rank)

    def _on_end(self, rank: int, now: float) -> None:
        """The connection to a rank has ended: with a goodbye, or as its supervisor was killed or
        its node is lost.
        """
        connection = self._connections[rank]
        self._open.discard(rank)
        self._ended.add(rank)
        if connection.reset and self._may_have_left(rank):
            # A message of rank 0's crossed the rank's goodbye on the way, and came to a socket that
            # was closed. The kernel there then resets the connection, and the goodbye is lost.
            self._note(rank, RankEvent.WORKER_HAS_ENDED)
        if self.root_cause or self._table[rank] in (RankState.LEFT, RankState.FAILED):
            return
        if rank not in self._table.ranks:
            cause = "no answer" if connection.lost else "srunddp itself was killed"
            self._drop(rank, cause, now)
        elif connection.lost:
            node = self._liveness.lost_node(rank, now, is_cut_off=self._is_cut_off())
            self._lose_node(node, f"no answer for {self._context.lost_after:g} s", now)
        else:
            self.fail(self._killed(rank, now), now)

    def _may_have_left(self, rank: int) -> bool:
        """Whether a rank has nothing left to do but to leave."""
        if self._table[rank] is RankState.SPARE:
            return self._table.scripts_are_over
        return self._table[rank] is RankState.DONE

    def _killed(self, rank: int, now: float) -> Failure:
        """The failure of a rank whose supervisor was killed."""
        failure = of_killed_supervisor(rank, self._context.nodes[rank])
        number = self._context.asked(now)
        if not number:
            return failure
        # The launcher has killed it: it has sent this rank a signal that ends the run, and it kills
        # whoever handles that for too long.
        return replace(
            failure,
            cause=by_launcher(number),
            exit_code=128 + number,
            weight=FailureKind.SIGNALLED,
        )

    def _drop(self, number: int, cause: str, now: float) -> None:
        """A task of a spare node has ended: the ranks go on, and its node takes none any more."""
        if not self._replacement or self._table[number] is RankState.DROPPED:
            return
        is_news = self._replacement.drop(number)
        if is_news and not self._asked_by and not self._context.asked(now):
            self.has_lost = True
            write_stderr(f"srunddp: spare node {self._context.nodes[number]} is lost: {cause}\n")
        self._note(number, RankEvent.IS_DROPPED)
        self._open.discard(number)

    # What is due.

    def tick(self, now: float) -> float:
        if self.root_cause is not None:
            self._move_on(now)
            return max(0.0, (self._decision.ends_at or now + self._limits.last_word) - now)
        self._look_around(now)
        self._move_on(now)
        if self.root_cause is not None:
            # At once again: what the supervisor then tells may be all that rank 0 waits for.
            return 0.0
        return max(0.0, self._next_due(now) - now)

    def _move_on(self, now: float) -> None:
        while event := self._decision.due(now, self._facts(now)):
            self._act(self._decision.apply(event, now))

    def _look_around(self, now: float) -> None:
        """Notice what no message says."""
        while self._waiting and self._table.scripts_are_over:
            self._connections[self._waiting.pop()].send(AllScriptsAreOver())
        # After that: nothing can be sent over a connection once this side has ended it, and the
        # tasks of spare nodes wait for the message above.
        if self._stays_together and self._table.workers_have_ended:
            self._end_connections()
        if self._is_cut_off():
            cause = f"no answer of half of the tasks for {self._context.lost_after:g} s"
            self._lose_node(self._context.node, cause, now)
        elif now >= self._liveness.next_look:
            self._look_for_the_silent(now)

    def _look_for_the_silent(self, now: float) -> None:
        self._liveness.look(now)
        if self._own_state is RankState.WORKING:
            self._stall.note(self._context.rank, self._context.step(), now)
        if not self._replacement or not self._replacement.can_move:  # else each ping gets an answer
            self._liveness.ping(self._table.ranks_in(RankState.WORKING))
        for rank in sorted(self._liveness.silent_supervisors(now)):
            if self._table[rank] is not RankState.FAILED:
                node = self._context.nodes[rank]
                self.fail(Failure(rank, node, self._context.starved, LOST), now)
        node_down = self._liveness.node_that_is_down(now, self._table.ranks)
        if node_down is not None:
            self._lose_node(node_down, "Slurm says that the node is down", now)

    def _facts(self, now: float) -> Facts:
        return Facts(
            steps_are_overdue=self._stall.detected(now),
            someone_may_fail=self._table.someone_may_fail,
            stacks_are_there=self._request.complete(now),
            all_have_ended=self.root_cause is not None and self._all_have_ended(self.root_cause),
        )

    def _all_have_ended(self, root_cause: RootCause) -> bool:
        """Whether the ranks have ended that may have something left to do.

        Each supervisor ends its worker when it is told of the decision. But a culprit has failed
        already, and who has stopped or got the launcher's signal may be saving: they have time to
        end by themselves. Not waited for is a culprit that has not told of its failure itself, as
        it hangs, or as its supervisor was killed.
        """
        have_time = self._decision.ended_in_order | {*root_cause.ranks}
        return have_time & self._self_reported <= self._ended

    def _next_due(self, now: float) -> float:
        """When the next thing is to be done, if nothing happens before."""
        due = [self._liveness.next_look, now + self._cut_off_in()]
        if self._decision.ends_at is not None:
            due.append(self._decision.ends_at)
        elif self._stall.due is not None:
            due.append(self._stall.due)
        return min(due)

    def _cut_off_in(self) -> float:
        """In how many seconds rank 0 has had no answer of most of the tasks for too long."""
        if self._replacement is None or self._table.scripts_are_over:
            return math.inf
        return self._replacement.cut_off_in(len(self._open))

    def _is_cut_off(self) -> bool:
        return self._cut_off_in() <= 0.0

    # What is done.

    def _act(self, action: RankZeroAction | None) -> None:
        failures = self._decision.failures
        match action:
            case RankZeroAction.ASK_FOR_STACKS:
                self._ask_for_stacks()
            case RankZeroAction.NAME_FIRST_FAILURE:
                self._end_run(find_root_cause(failures, self._decision.finished_before))
            case RankZeroAction.NAME_STALLED_RANK:
                self._end_run(
                    find_stalled_rank(
                        self._request.stacks,
                        self._stall,
                        self._context.nodes,
                        self._finished_ranks(),
                    )
                )
            case RankZeroAction.NAME_HANGING_RANK:
                hanging = find_hanging_rank(self._request.stacks, failures, self._context.nodes)
                first = find_root_cause(failures, self._decision.finished_before)
                self._end_run(hanging or first)
            case RankZeroAction.END_CONNECTIONS:
                self._end_connections()

    def _ask_for_stacks(self) -> None:
        """Ask the ranks that work, this one included."""
        working = self._table.ranks_in(RankState.WORKING)
        self._request = StackRequest(working, self._decision.ends_at or 0.0)
        for rank in working:
            if rank == self._context.rank:
                continue
            self._connections[rank].send(StacksWanted())
        if self._own_state is RankState.WORKING:
            self._request.add(self._context.rank, self._context.stacks())

    def _lose_node(self, node: str, cause: str, now: float) -> None:
        ranks = tuple(rank for rank, where in self._others().items() if where == node)
        self._lose(RootCause(ranks, node, cause, LOST, ending=Ending.LOST), now)

    def _lose(self, root_cause: RootCause, now: float) -> bool:
        """End the run for a lost node; returns whether nothing was decided before."""
        if (
            self._decision.apply(DecisionEvent.NODE_IS_LOST, now)
            is not RankZeroAction.NAME_LOST_NODE
        ):
            return False
        self._end_run(root_cause)
        return True

    def _end_run(self, root_cause: RootCause) -> None:
        """The decision has fallen: report, decide on a restart, tell all, write.

        The order matters:

        1. Report. Whoever is told ends, and a launcher kills all at the first bad end, rank 0 with
           its unsaid word included.
        2. Decide which nodes are left, and whether the ranks start anew. Rank 0 listens for the
           next rendezvous from then on.
        3. Tell the others, and with that where they meet: they may come at once.
        4. Write ``failure.json``. It takes a fork, and its file system may not answer; nobody waits
           for it.
        """
        self.root_cause = root_cause
        report(root_cause, self._others())
        left: Collection[str] = ()
        if self._replacement and self._restarts and not self._asked_by:
            left = self._replacement.nodes_to_leave(root_cause, self._restarts.history)
        obstacle = self._obstacle(root_cause, left)
        is_left = self._context.node in left
        self.cut_off = is_left and root_cause.ending is Ending.LOST
        self.fenced = self.cut_off or (is_left and not obstacle)
        if not self.fenced:
            self._decide_restart(root_cause, obstacle, moves=bool(left))
        self._tell(root_cause, left)
        write(root_cause, self._others(), self._folder)

    def _obstacle(self, root_cause: RootCause, left: Collection[str]) -> str:
        """Why the ranks cannot start anew; empty where they can."""
        if self._replacement and self._replacement.can_move:
            if self._replacement.are_too_few_for(left):
                return "no spare node is left"
        elif root_cause.ending is Ending.LOST:
            return "a node is lost"
        elif self._has_lost_a_rank():
            if kills_whole_step(os.environ):
                return "srunddp has ended on a rank; srun --oom-kill-step=0 leaves it there"
            return "srunddp has ended on a rank"
        return "all scripts are over" if self._scripts_were_over else ""

    def _has_lost_a_rank(self) -> bool:
        return not self._table.ranks - {self._context.rank} <= self._open

    def _tell(self, root_cause: RootCause, left: Collection[str]) -> None:
        """Send each rank the verdict."""
        published = self.restart
        if self.fenced and self._context.spare_nodes:
            # The others go on without this node, where the deputies listen.
            published = self._context.spare_nodes.takeover
        for rank, connection in self._connections.items():
            is_given_up = published is not None and self._context.nodes[rank] in left
            connection.send(
                Verdict(
                    root_cause.ranks,
                    root_cause.exit_code,
                    restart_at=None if is_given_up else published,
                    node_is_given_up=is_given_up,
                )
            )
        if self._replacement:
            there = [rank for rank in self._open if self._table[rank] is not RankState.LEFT]
            self._replacement.note_end(left, there)

    def _end_connections(self) -> None:
        for connection in self._connections.values():
            connection.end()

    def _finished_ranks(self) -> dict[int, str]:
        """The nodes of the ranks whose script is over without an error."""
        finished = self._table.ranks_in(RankState.DONE, RankState.LEFT)
        return {rank: self._context.nodes[rank] for rank in finished}

    def _others(self) -> dict[int, str]:
        """The nodes of the ranks that end with the run."""
        return {
            rank: self._context.nodes[rank]
            for rank in sorted(self._table.ranks)
            if rank == self._context.rank or self._table[rank] is not RankState.LEFT
        }
