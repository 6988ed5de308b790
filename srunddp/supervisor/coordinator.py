"""The failure monitor of rank 0: it reads from all ranks, decides which failure came first, and
ends the run with it.

The order of failures is that of their arrival here, not of clocks on different nodes. Those that
another has likely caused wait a moment for it.
"""

from collections.abc import Iterable, Mapping
from dataclasses import replace

from srunddp.supervisor.connection import DownNodes, SupervisorConnection
from srunddp.supervisor.failure import Failure, FailureKind, by_launcher
from srunddp.supervisor.failure_monitor import FailureMonitor, NextStart, RankContext, State
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
from srunddp.supervisor.root_cause import LOST, Ending, RootCause, find_root_cause, report, write
from srunddp.supervisor.spare_nodes import SpareNodes
from srunddp.supervisor.stall import (
    StackRequest,
    StallDetector,
    find_hanging_rank,
    find_stalled_rank,
    may_be_of_a_hang,
)
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
        self._spares: SpareNodes | None = None
        if context.takeover:
            self._spares = SpareNodes(context, connections)
        # Of spare nodes.
        self._unranked = {number for number in context.nodes if 0 < context.world_size <= number}
        self._states = dict.fromkeys(context.nodes, State.WORKING) | dict.fromkeys(
            self._unranked, State.DONE
        )
        self._dropped: set[int] = set()  # of these, which may take no rank any more
        # Both are known once the run has ended.
        self._left_nodes = set[str]()
        self._next_start = NextStart()
        self._last_received = dict.fromkeys(connections, 0.0)
        self._is_late = self._over = False
        self._waiting: set[int] = set()  # the ranks that leave when the scripts of all are over
        # The ranks whose worker has, after a failure, or whose supervisor has.
        self._ended: set[int] = set()
        self._closing_since: float | None = None
        self._self_reported: set[int] = set()  # the ranks that have told of their own failure
        # All, and of which kinds they are.
        self._failures = list[Failure]()
        self._kinds = set[FailureKind]()
        # The nodes of the ranks that had finished at the first failure.
        self._left_before: dict[int, str] = {}
        self._decide_at: float | None = None
        self._pinged = 0.0
        self._down = DownNodes(context.limits)
        self._stall = StallDetector(context.stall_timeout)
        self._request: StackRequest | None = None  # since the ranks have stalled, or one may hang
        self._working = len(self._states) - len(self._unranked)
        self._open = len(connections)
        # srun ends the step when a task ends on a node that ran out of memory: all stay until this
        # is 0; -1: none does.
        if context.restarts and context.restarts.history.out_of_memory:
            self._staying = self._working
        else:
            self._staying = -1
        if self._staying > 0:
            for connection in connections.values():
                connection.send(StayUntilClosed())

    @property
    def released(self) -> bool:
        # The worker hosts the store, and leaves when the scripts of all others are over.
        return not self._working

    @property
    def finished(self) -> bool:
        # The others leave first.
        has_left = self._states[self._context.rank] is State.LEFT
        return ((has_left or self.root_cause is not None) and not self._open) or self._is_late

    def connections(self) -> Iterable[SupervisorConnection]:
        return self._rank_of.keys()

    def on_readable(self, connection: SupervisorConnection, now: float) -> None:
        rank = self._rank_of[connection]
        self._last_received[rank] = now
        for message in connection.read():
            if rank not in self._dropped:
                self._on_message(rank, message, now)
        if rank in self._dropped:
            connection.open = False
        elif not connection.open:
            self._open -= 1
            self._ended.add(rank)
            self._on_end(rank, now)

    def _on_message(self, rank: int, message: RankMessage, now: float) -> None:
        match message:
            case ScriptIsOver():
                self._set_state(rank, State.DONE)
                if message.waits:
                    self._waiting.add(rank)
            case WorkerHasEnded():
                self._set_state(rank, State.LEFT)
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
        """Take in what leaves the rank in the state that it is in."""
        match message:
            case Stacks() if self._request:
                self._request.add(rank, message.text)
            case EndRequested():
                self.asked(message.by)
            case UsesMpi():
                self.uses_mpi()
            case LeaseHasEnded() if self._spares:
                self._connections[rank].lost = True  # its end follows

    def _on_ping(self, rank: int, ping: Ping, now: float) -> None:
        if self._states[rank] is State.WORKING:
            self._stall.note(rank, ping.step, now)
        if self._spares:
            self._spares.answer(rank, ping, self._asked_by)

    def _set_state(self, rank: int, state: State) -> None:
        if self._states[rank] is State.WORKING:
            self._working -= 1
        if state is State.LEFT and rank not in self._unranked:
            self._staying -= 1
        if not self._staying:
            self._end_connections()
        if self._states[rank] is not State.FAILED:
            self._states[rank] = state
        self._stall.remove(rank)

    def _on_end(self, rank: int, now: float) -> None:
        if self._states[rank] is State.DONE and self._connections[rank].reset:
            # Its last word crossed one of ours on the way, upon which its kernel took it back.
            self._set_state(rank, State.LEFT)
        if self.root_cause or self._states[rank] in (State.LEFT, State.FAILED):
            return
        if rank in self._unranked:
            self._drop_spare(
                rank,
                "no answer" if self._connections[rank].lost else "srunddp itself was killed",
                now,
            )
            return
        if self._connections[rank].lost:
            self._end_run(self._lost(rank, now))
            return
        killed = Failure(rank, self._context.nodes[rank], "srunddp itself was killed", 137)
        # As we have been, and so is whoever handles that signal for too long.
        if number := self._context.asked(now):
            cause = by_launcher(number)
            code = 128 + number
            killed = replace(killed, cause=cause, exit_code=code, weight=FailureKind.SIGNALLED)
        self.fail(killed, now)

    def _lost(self, rank: int, now: float) -> RootCause:
        """The node of a rank that does not answer; where none does, or our own link is down, it is
        our own.
        """
        nodes = self._context.nodes
        own = self._context.node
        others = {other for other in self._connections if nodes[other] != own}
        silent = self._silent(now, self._context.lost_after / 2)
        silent |= {other for other, connection in self._connections.items() if connection.lost}
        ours = silent >= others and len({nodes[other] for other in others}) > 1
        if ours or self._majority_ends() <= self._context.clock() or not self._context.link_is_up():
            node = own
        else:
            node = nodes[rank]
        return self._lost_node(node, f"no answer for {self._context.lost_after:g} s")

    def _lost_node(self, node: str, cause: str) -> RootCause:
        ranks = tuple(rank for rank, where in self._others().items() if where == node)
        return RootCause(ranks, node, cause, LOST, ending=Ending.LOST)

    def _silent(self, now: float, seconds: float) -> set[int]:
        """The ranks whose connection is open, but of which nothing has come for so long."""
        silent = {
            rank
            for rank, received in self._last_received.items()
            if now - (received or now) > seconds
        }
        return {rank for rank in silent if self._connections[rank].open}

    def _drop_spare(self, number: int, cause: str, now: float) -> None:
        """A task of a spare node has ended: the ranks go on, and its node takes none any more."""
        if number in self._dropped:
            return
        nodes = self._context.nodes
        connection = self._connections[number]
        is_new = nodes[number] not in {nodes[each] for each in self._dropped}
        if is_new and not self._asked_by and not self._context.asked(now):
            self.has_lost = True
            write_stderr(f"srunddp: spare node {nodes[number]} is lost: {cause}\n")
        self._dropped.add(number)
        self._set_state(number, State.LEFT)
        self._open -= connection.open
        connection.send(Verdict((number,), LOST, node_is_given_up=True))
        connection.end()
        connection.open = False

    def fail(self, failure: Failure, now: float) -> None:
        """A rank has failed, this one or another."""
        if failure.rank in self._unranked:
            self._drop_spare(failure.rank, failure.cause, now)
            return
        self._over = self._over or (self.released and not self._failures)
        self._set_state(failure.rank, State.FAILED)
        if failure.rank == self._context.rank:
            self._self_reported.add(failure.rank)
        if not self._failures:
            self._left_before = self._finished_ranks()
            self._request = None
        self._failures.append(failure)
        self._kinds.add(failure.weight)
        if failure.weight is FailureKind.PRIMARY:
            self._decide()
        elif max(self._kinds) >= FailureKind.STOPPED:
            self._decide_at = now + self._limits.signalled_waits
        elif self._decide_at is None:
            self._decide_at = now + self._limits.secondary_waits

    def _finished_ranks(self) -> dict[int, str]:
        """The nodes of the ranks whose script is over."""
        ranks = sorted(self._states.keys() - self._unranked)
        return {
            rank: self._context.nodes[rank]
            for rank in ranks
            if self._states[rank] in (State.DONE, State.LEFT)
        }

    def _decide(self) -> None:
        if not self.root_cause:
            self._end_run(find_root_cause(self._failures, self._left_before))

    def _end_run(self, root_cause: RootCause) -> None:
        self.root_cause = root_cause
        # Said before the others are told: a launcher kills all at the first bad end.
        report(root_cause, self._others())
        self._left_nodes = left = self._nodes_to_leave(root_cause)
        obstacle = self._obstacle(root_cause, left)
        is_own = self._context.node in left
        self.cut_off = is_own and root_cause.ending is Ending.LOST
        self.fenced = self.cut_off or (is_own and not obstacle)
        if not self.fenced:
            self._decide_restart(root_cause, obstacle, moves=bool(left))
        self._tell(root_cause, left, self._context.takeover if self.fenced else self.restart)
        write(root_cause, self._others(), self._folder)

    def _tell(self, root_cause: RootCause, left: set[str], published: str | None) -> None:
        culprits = root_cause.ranks
        code = root_cause.exit_code
        for rank, connection in self._connections.items():
            if published is not None and self._context.nodes[rank] in left:
                connection.send(Verdict(culprits, code, node_is_given_up=True))
            else:
                connection.send(Verdict(culprits, code, restart_at=published))
        there = [
            rank
            for rank, each in self._connections.items()
            if each.open and self._states[rank] is not State.LEFT
        ]
        self._next_start = NextStart(
            expected=tuple(rank for rank in sorted(there) if self._context.nodes[rank] not in left),
            quorum=self._spares.quorum if self._spares else 1,
        )

    def next_start(self) -> NextStart:
        if self._spares is None:
            return self._next_start
        # Not when the verdict was told: more may have been heard of a lost node since.
        return replace(self._next_start, not_before=self._spares.ended_by(self._left_nodes))

    def _nodes_to_leave(self, root_cause: RootCause) -> set[str]:
        if self._restarts and not self._asked_by:
            history = self._restarts.history
        else:
            history = None
        if not self._spares or not history or root_cause.ending is Ending.STOPPED:
            return set()
        return self._spares.left(root_cause, history.node if history.count else "")

    def abandon(self, failure: Failure) -> bool:
        if self._spares and not self.root_cause:
            self._end_run(replace(RootCause.of(failure), ending=Ending.LOST))
        return self._spares is not None

    def _obstacle(self, root_cause: RootCause, left: set[str]) -> str:
        """Why the ranks cannot start anew; empty where they can."""
        if self._over:
            over = "all scripts are over"
        else:
            over = ""
        if self._spares:
            if left and self._spares.free(left) < len(left):
                return "no spare node is left"
            return over
        if root_cause.ending is Ending.LOST:
            return "a node is lost"
        if not all(
            connection.open
            for rank, connection in self._connections.items()
            if rank not in self._unranked
        ):
            return "srunddp has ended on a rank"
        return over

    def _close_connections(self, root_cause: RootCause, now: float) -> float:
        """After the end of the run: as soon as the scripts that are to end by themselves have done
        so.
        """
        own_end = {each.rank for each in self._failures if each.weight >= FailureKind.STOPPED} | {
            *root_cause.ranks
        }
        if self._closing_since is None and own_end & self._self_reported <= self._ended:
            self._closing_since = now
            self._end_connections()
        # The others close first: what is lost on the way to them can be sent again only while our
        # end is there.
        self._is_late = (
            self._closing_since is not None and now >= self._closing_since + self._limits.last_word
        )
        return self._limits.last_word

    def _end_connections(self) -> None:
        for connection in self._connections.values():
            connection.end()

    def _others(self) -> dict[int, str]:
        """The nodes of the ranks that end with the run."""
        gone = {
            rank for rank in self._connections if self._states[rank] is State.LEFT
        } | self._unranked
        return {
            rank: node for rank, node in sorted(self._context.nodes.items()) if rank not in gone
        }

    def done(self, *, waits: bool = False) -> None:
        self._set_state(self._context.rank, State.DONE)

    def left(self) -> None:
        self._set_state(self._context.rank, State.LEFT)

    def ended(self) -> None:
        self._ended.add(self._context.rank)

    def tick(self, now: float) -> float:
        if self.root_cause:
            return self._close_connections(self.root_cause, now)
        while self.released and self._waiting:
            self._connections[self._waiting.pop()].send(AllScriptsAreOver())
        if self._majority_ends() <= self._context.clock():
            cause = f"no answer of half of the tasks for {self._context.lost_after:g} s"
            self._end_run(self._lost_node(self._context.node, cause))
            return 0.0
        if now >= self._pinged + self._context.ping_every:
            self._pinged = now
            self._ping(now)
        if not self.root_cause and self._failures:
            self._decide_late(now)
        elif not self.root_cause:
            self._watch_steps(now)
        return 0.0 if self.root_cause else max(0.0, self._due(now) - now)

    def _due(self, now: float) -> float:
        """When the next thing is to be done, if nothing else happens before."""
        following = self._decide_at if self._failures else self._stall.due
        following = self._request.deadline if self._request else following
        ping = min(
            self._pinged + self._context.ping_every,
            now + max(0.0, self._majority_ends() - self._context.clock()),
        )
        return ping if following is None else min(ping, following)

    def _majority_ends(self) -> float:
        if self._spares and self._working:
            return self._spares.majority_ends(self._open)
        return float("inf")

    def _ping(self, now: float) -> None:
        if self._states[self._context.rank] is State.WORKING:
            self._stall.note(self._context.rank, self._context.step(), now)
        for rank, connection in self._connections.items():
            if connection.open and self._states[rank] is State.WORKING and not self._spares:
                connection.send(Pong())
            # Nothing is expected before the first ping.
            self._last_received[rank] = self._last_received[rank] or now
        for rank in self._silent(now, self._context.silent_after):
            if self._states[rank] is not State.FAILED:
                self.fail(
                    Failure(rank, self._context.nodes[rank], self._context.starved, LOST), now
                )
        silent = {
            self._context.nodes[rank]
            for rank in self._silent(now, self._limits.slurm_is_asked_after) - self._unranked
        }
        if down := silent & self._down.names:
            self._end_run(self._lost_node(min(down), "Slurm says that the node is down"))
        elif silent:
            self._down.ask(silent)

    def _watch_steps(self, now: float) -> None:
        if not self._stall.detected(now):
            self._request = None  # a rank has made a step meanwhile
            return
        if (stacks := self._find_stacks(now)) is not None:
            self._end_run(
                find_stalled_rank(stacks, self._stall, self._context.nodes, self._finished_ranks())
            )

    def _find_stacks(self, now: float) -> dict[int, str] | None:
        """Of the ranks that are working, which are asked for them; None while some are still to
        come.
        """
        if not self._request:
            working = [rank for rank, state in self._states.items() if state is State.WORKING]
            self._request = StackRequest(working, now + self._limits.stalled_answer_within)
            for rank in set(working) & {*self._connections}:
                self._connections[rank].send(StacksWanted())
            if self._context.rank in working:
                self._request.add(self._context.rank, self._context.stacks())
        return self._request.stacks if self._request.complete(now) else None

    def _decide_late(self, now: float) -> None:
        """No failure so far is surely the cause: it may be of a rank that hangs, and has not
        failed.
        """
        others = self._working or State.DONE in {
            self._states[each] for each in self._states.keys() - self._unranked
        }
        if now < (self._decide_at or 0.0) and others:
            return
        if not self._left_before and may_be_of_a_hang(self._failures):
            if (stacks := self._find_stacks(now)) is None:
                return
            if found := find_hanging_rank(stacks, self._failures, self._context.nodes):
                self._end_run(found)
        self._decide()
