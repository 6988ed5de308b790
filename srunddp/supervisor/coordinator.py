"""The failure monitor of rank 0: it reads the messages of all ranks, decides which failure came
first, and ends the run.

Three parts, which are independent of each other, keep what the ranks have reported: the state of
each rank (:mod:`~srunddp.supervisor.rank_table`), which ranks still answer
(:mod:`~srunddp.supervisor.liveness`), and how far the decision has come
(:mod:`~srunddp.supervisor.decision`). This module hands events to them and carries out what the
decision asks for. Everything that only spare nodes need is behind the interfaces of
:mod:`~srunddp.supervisor.node_replacement`.
"""

import math
import os
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace

from srunddp.supervisor.connection import SupervisorConnection
from srunddp.supervisor.decision import (
    FINDINGS,
    Decision,
    DecisionEvent,
    DecisionState,
    DecisionTimes,
    Facts,
    RankZeroAction,
)
from srunddp.supervisor.failure import (
    Failure,
    FailureCategory,
    FailureKind,
    GpuFault,
    GpuFaultKind,
    by_launcher,
    of_killed_supervisor,
)
from srunddp.supervisor.failure_monitor import FailureMonitor, RankContext, may_be_of_gpu
from srunddp.supervisor.liveness import Liveness
from srunddp.supervisor.messages import (
    AllScriptsAreOver,
    EndedAfterVerdict,
    EndRequested,
    GpuFaults,
    GpuFaultsWanted,
    HasFailed,
    LeaseHasEnded,
    Ping,
    ProbeResult,
    RankMessage,
    RunIsOver,
    SavesAfterVerdict,
    ScriptIsOver,
    Stacks,
    StacksWanted,
    UsesMpi,
    Verdict,
    WorkerHasEnded,
    is_numeric,
)
from srunddp.supervisor.network_cut import FEWEST, NetworkProbe
from srunddp.supervisor.node_probe import NodeProbe
from srunddp.supervisor.node_replacement import NextStart, NodeReplacement
from srunddp.supervisor.rank_table import RankEvent, RankState, RankTable
from srunddp.supervisor.restart import Starts, StartSteps, first_step_limit
from srunddp.supervisor.root_cause import (
    LOST,
    STALLED,
    Ending,
    RootCause,
    find_root_cause,
    of_cut,
    report,
    write,
)
from srunddp.supervisor.stall import (
    StackRequest,
    StallDetector,
    find_hanging_rank,
    find_stalled_rank,
    is_someone_elsewhere,
)
from srunddp.util.cgroup import kills_whole_step
from srunddp.util.console import write_amid_output


class Coordinator(FailureMonitor):
    """Rank 0's failure monitor, which decides from what all ranks report when and why the run ends.

    Args:
        context: The facts about rank 0.
        connections: The connection to each other supervisor, by its rank; for a task of a spare
            node, by the number of the task.
    """

    def __init__(
        self, context: RankContext, connections: Mapping[int, SupervisorConnection]
    ) -> None:
        super().__init__(context.folder, context.restarts, context.limits, context.gpus)
        self._context = context
        self._connections = connections
        self._rank_of = {connection: rank for rank, connection in connections.items()}
        # The ranks, and numbers of tasks of spare nodes, whose connection has not ended.
        self._open = set(connections)

        self._replacement: NodeReplacement | None = None
        spare_numbers = frozenset[int]()
        if context.spare_nodes:
            self._replacement = context.spare_nodes.replacement(connections)
            spare_numbers = context.spare_nodes.numbers
        self._table = RankTable(context.nodes.keys() - spare_numbers, spare_numbers)
        self._liveness = Liveness(context, connections)
        self._decision = Decision(
            DecisionTimes(context.limits, context.signal_grace, context.ends_within)
        )
        first_step_within = 0.0
        if context.restarts:
            first_step_within = first_step_limit(
                context.restarts.history, context.stall_timeout, context.limits
            )
        self._stall = StallDetector(context.stall_timeout, first_step_within)
        # Whether to say once that --stall-timeout, which the user has set, has no effect as long as
        # no step is counted.
        self._explains_steps = context.asks_for_stall_timeout
        # Whether a rank has made a step in this start.
        self._has_steps = False
        # The ranks whose script has ended, and which never were in a process group with other
        # ranks.
        self._alone = set[int]()
        # The ranks whose silence the decision waits to end, in WAITING_FOR_SILENT; None before.
        self._silent: set[int] | None = None
        # The latest request for stacks, with the answers; used in ASKING_STALLED and ASKING_OTHERS.
        self._request = StackRequest((), deadline=0.0)
        # The latest probe, in which the nodes try to reach each other; None before the first. And
        # this node's part in that probe; None while this node does not probe.
        self._network: NetworkProbe | None = None
        self._own_probe: NodeProbe | None = None
        # The GPU faults that ranks have reported, by node; each fault once.
        self._gpu_faults = dict[str, list[GpuFault]]()
        # In ASKING_GPUS, the ranks that have been asked, have not answered yet, and are still
        # connected.
        self._asked_about_gpus = set[int]()

        # The ranks to be told when the scripts of all ranks are over: until then their worker
        # stays.
        self._waiting = set[int]()
        # Whether the scripts of all ranks were over before the first failure.
        self._scripts_were_over = False
        # The ranks that have ended their worker because their lease was over: rank 0 had not
        # answered.
        self._lease_has_ended = set[int]()
        # The ranks whose own supervisor has reported their failure.
        self._self_reported = set[int]()
        # The ranks whose worker handles SIGTERM, and so may have been saving since the verdict.
        self._saving = set[int]()
        # Until when rank 0 waits, after the verdict, for each rank to say that its worker has ended
        # or is saving.
        self._obeyed_by = math.inf
        # The ranks whose worker has ended since the verdict, or whose connection has ended.
        self._ended = set[int]()
        # After a run without a failure: until when rank 0 waits for the other supervisors to leave,
        # and whether it has stopped waiting for them, because one of them may be stopped.
        self._leave_by: float | None = None
        self._leaves_alone = False

    # Questions of rank 0's supervisor.

    @property
    def released(self) -> bool:
        # Rank 0's worker hosts torch's store, so it leaves only when all scripts are over.
        return self._table.scripts_are_over

    @property
    def finished(self) -> bool:
        if self._decision.state is DecisionState.ASKING_GPUS:
            return False
        if self._leaves_alone:
            return True
        if not self._open:
            # All other ranks have gone. If one of them has failed and rank 0 has not decided yet,
            # this returns False: the supervisor then calls tick(), which decides.
            return self.root_cause is not None or self._own_state is RankState.LEFT
        return self._decision.is_over

    @property
    def _own_state(self) -> RankState:
        return self._table[self._context.rank]

    def connections(self) -> Iterable[SupervisorConnection]:
        return self._rank_of.keys()

    def next_start(self) -> NextStart:
        return self._replacement.next_start() if self._replacement else NextStart()

    # Events of this rank.

    def done(self, *, waits: bool = False) -> None:
        if self._context.ran_alone():
            self._alone.add(self._context.rank)
        self._note(self._context.rank, RankEvent.SCRIPT_IS_OVER)

    def left(self) -> None:
        self._note(self._context.rank, RankEvent.WORKER_HAS_ENDED)

    def ended(self) -> None:
        self._ended.add(self._context.rank)

    def saves(self) -> None:
        self._saving.add(self._context.rank)

    def fail(self, failure: Failure, now: float) -> None:
        """Note a failure of this rank or another. If ``failure.rank`` is the number of a task of a
        spare node, drop the task instead, because the run goes on without it.
        """
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
        self._act(self._decision.fail(failure, now), now)

    def abandon(self, failure: Failure, now: float) -> bool:
        if not self._replacement or not self._replacement.can_move:
            return False
        is_lost = self._lose(replace(RootCause.of(failure), ending=Ending.LOST), now)
        if is_lost:
            # The launcher of this process is gone, so the process does not take part in the
            # restart.
            self.restart = None
            self.returns = False
        return is_lost

    # Messages of the other ranks, and the ends of their connections.

    def on_readable(self, connection: SupervisorConnection, now: float) -> None:
        rank = self._rank_of[connection]
        messages = connection.read()
        if messages or connection.open:
            self._liveness.note(rank, now)
        if self._silent:
            self._silent.discard(rank)
        for message in messages:
            if self._table[rank] is not RankState.DROPPED:
                self._on_message(rank, message, now)
        if self._table[rank] is RankState.DROPPED:
            connection.open = False
        elif not connection.open:
            self._on_end(rank, now)

    def _on_message(self, rank: int, message: RankMessage, now: float) -> None:
        match message:
            case ScriptIsOver(waits, has_steps, ran_alone):
                self._has_steps = self._has_steps or has_steps
                if ran_alone:
                    self._alone.add(rank)
                self._note(rank, RankEvent.SCRIPT_IS_OVER)
                if waits:
                    self._waiting.add(rank)
            case WorkerHasEnded():
                self._note(rank, RankEvent.WORKER_HAS_ENDED)
            case HasFailed():
                self._has_steps = self._has_steps or message.has_steps
                self._self_reported.add(rank)
                self.fail(message.failure(rank, self._context.nodes[rank]), now)
            case SavesAfterVerdict():
                self._saving.add(rank)
            case EndedAfterVerdict():
                self._ended.add(rank)
            case Ping():
                self._on_ping(rank, message, now)
            case _:
                self._on_note(rank, message)

    def _on_note(self, rank: int, message: RankMessage) -> None:
        """Handle the messages that change neither a rank's state nor the decision's."""
        match message:
            case Stacks(text):
                self._request.add(rank, text)
            case ProbeResult():
                if self._network is not None:
                    self._network.add(rank, message)
            case GpuFaults(faults, is_answer):
                self._note_gpus(rank, faults, is_answer=is_answer)
            case EndRequested(by):
                self.asked(by)
            case UsesMpi():
                self.uses_mpi()
            case LeaseHasEnded() if self._replacement:
                # The rank ends this connection next. Count that as a lost node and not as a killed
                # supervisor.
                self._connections[rank].lost = True
                self._lease_has_ended.add(rank)

    def _on_ping(self, rank: int, ping: Ping, now: float) -> None:
        if self._table[rank] is RankState.WORKING:
            self._stall.note(rank, ping.step, now, paused=ping.paused)
        if self._replacement and self._replacement.can_move:
            self._replacement.answer(rank, ping, self._asked_by)

    def _note(self, rank: int, event: RankEvent) -> None:
        self._table.apply(rank, event)
        self._stall.remove(rank)

    def _on_end(self, rank: int, now: float) -> None:
        """Find out why the connection to a rank has ended: the rank has left, its supervisor was
        killed, or its node is lost.
        """
        connection = self._connections[rank]
        self._open.discard(rank)
        self._asked_about_gpus.discard(rank)
        self._ended.add(rank)
        if self.root_cause or self._table[rank] in (RankState.LEFT, RankState.FAILED):
            return
        # If the launcher has sent a signal that ends the run, that explains why a connection ends,
        # even if nothing had come from the rank for a while before.
        if (
            self._can_move
            and not self._context.asked(now)
            and self._liveness.was_cut_off(rank, now)
        ):
            connection.lost = True
        if rank not in self._table.ranks:
            cause = "no answer" if connection.lost else "srunddp itself was killed"
            self._drop(rank, cause, now)
        elif connection.lost:
            node = self._liveness.lost_node(rank, now, is_cut_off=self._is_cut_off())
            self._lose_node(node, self._cause_of_loss(node, rank), now)
        else:
            self.fail(self._killed(rank, now), now)

    @property
    def _can_move(self) -> bool:
        return self._replacement is not None and self._replacement.can_move

    def _cause_of_loss(self, node: str, rank: int) -> str:
        """Return the cause to report for a lost node, when the connection to a rank is lost."""
        limit = f"{self._context.lost_after:g} s"
        if node == self._context.nodes[rank] and rank in self._lease_has_ended:
            return f"it had no answer for {limit}, and ended its ranks"
        return f"no answer for {limit}"

    def _killed(self, rank: int, now: float) -> Failure:
        """Return the failure of a rank whose supervisor was killed. After a signal from the
        launcher, the failure counts as the launcher's doing.
        """
        failure = of_killed_supervisor(rank, self._context.nodes[rank])
        number = self._context.asked(now)
        if not number:
            return failure
        # The launcher has sent this rank a signal that ends the run. It sends the signal to all
        # ranks, and kills a rank that takes too long to end.
        return replace(
            failure,
            cause=by_launcher(number),
            exit_code=128 + number,
            weight=FailureKind.SIGNALLED,
        )

    def _drop(self, number: int, cause: str, now: float) -> None:
        """Give up a task of a spare node, and say so unless the run is being ended anyway. The
        ranks go on, but none of them can move to that node any more.
        """
        if not self._replacement or self._table[number] is RankState.DROPPED:
            return
        is_news = self._replacement.drop(number)
        if is_news and not self._asked_by and not self._context.asked(now):
            self.has_lost = True
            write_amid_output(
                f"srunddp: spare node {self._context.nodes[number]} is lost: {cause}\n"
            )
        self._note(number, RankEvent.IS_DROPPED)
        self._open.discard(number)

    # Work that is due.

    def tick(self, now: float) -> float:
        if self.root_cause is not None:
            self._obeyed_by = min(self._obeyed_by, now + self._limits.obeyed_within)
            self._move_on(now)
            due = [self._decision.ends_at or now + self._limits.last_word]
            if now < self._obeyed_by:
                due.append(self._obeyed_by)
            return max(0.0, min(due) - now)
        self._look_at_gpus()
        if self._decision.state is not DecisionState.ASKING_GPUS:
            self._look_around(now)
            self._look_at_probe(now)
            self._move_on(now)
        elif event := self._decision.due(now, self._facts(now)):
            # The cause is found, and no other event can change it. Only one event is handled in
            # this call, so that the supervisor can note the verdict and say whether its worker
            # saves before the decision asks which ranks still have something to do.
            self._act(self._decision.apply(event, now), now)
        if self.root_cause is not None:
            # Return to the supervisor and let it call again at once: it may first report something,
            # such as the end of its worker, which may be all that rank 0 still waits for.
            return 0.0
        return max(0.0, self._next_due(now) - now)

    def _move_on(self, now: float) -> None:
        while event := self._decision.due(now, self._facts(now)):
            self._act(self._decision.apply(event, now), now)

    def _look_around(self, now: float) -> None:
        """Act on what no message triggers: release waiting workers, end a run without a failure,
        and find silent or lost ranks.
        """
        while self._waiting and self._table.scripts_are_over:
            self._connections[self._waiting.pop()].send(AllScriptsAreOver())
        # All supervisors leave together, when the workers of all ranks have ended. If a task ended
        # earlier, srun would end the others if it was started with --wait, if the site has set
        # WaitTime, or if the task's node ran out of memory. The tasks of spare nodes leave first,
        # because nothing can be sent over a connection once this side has ended it.
        if self._leave_by is None and self._is_well_over():
            self._leave_by = now + self._limits.killed_within
            if self._alone >= self._table.ranks:
                write_amid_output(_all_alone(len(self._alone)))
            for rank in self._open:
                self._connections[rank].send(RunIsOver())
            self._end_connections()
        # One supervisor may have been stopped after its worker's end. Rank 0 waits for it only
        # until this time.
        self._leaves_alone = self._leave_by is not None and now >= self._leave_by
        if self._is_cut_off():
            cause = f"no answer of half of the tasks for {self._context.lost_after:g} s"
            self._lose_node(self._context.node, cause, now)
        elif now >= self._liveness.next_look:
            self._look_for_the_silent(now)

    def _is_well_over(self) -> bool:
        """Return whether the workers of all ranks have ended with 0, no task of a spare node is
        waiting, and no rank has failed.
        """
        table = self._table
        return table.workers_have_ended and not table.spares_wait and not self._decision.failures

    def _look_for_the_silent(self, now: float) -> None:
        self._liveness.look(now)
        if self._own_state is RankState.WORKING:
            self._stall.note(
                self._context.rank, self._context.step(), now, paused=self._context.paused()
            )
        if self._explains_steps and self._stall.has_no_effect(now):
            self._explains_steps = False
            write_amid_output(_no_steps(self._stall.timeout))
        # If ranks can move, the others send rank 0 pings and it answers each, so it sends none
        # itself.
        if not self._can_move:
            self._liveness.ping(self._open)
        for rank in sorted(self._liveness.silent_supervisors(now)):
            # The supervisor of a rank that has failed or left is not needed any more.
            if self._table[rank] not in (RankState.FAILED, RankState.LEFT):
                node = self._context.nodes[rank]
                self.fail(Failure(rank, node, self._context.starved, LOST), now)
        still_needed = self._table.ranks - set(self._table.ranks_in(RankState.LEFT))
        node_down = self._liveness.node_that_is_down(now, still_needed)
        if node_down is not None:
            self._lose_node(node_down, "Slurm says that the node is down", now)

    def _look_at_probe(self, now: float) -> None:
        """If this node's part in the probe is complete, note which nodes this node has reached."""
        if self._own_probe is None or self._network is None:
            return
        if result := self._own_probe.look(now):
            self._own_probe = None
            self._network.add(self._context.rank, result)

    def _look_at_gpus(self) -> None:
        """Note the faults of this node's GPUs that have been found since the last look, and this
        node's answer if the decision has asked for it.
        """
        if self._gpus is None:
            return
        rank = self._context.rank
        if news := self._gpus.news():
            self._note_gpus(rank, news, is_answer=False)
        if rank in self._asked_about_gpus:
            faults = self._gpus.look()
            if faults is not None:
                self._note_gpus(rank, faults, is_answer=True)

    def _note_gpus(self, rank: int, faults: Iterable[GpuFault], *, is_answer: bool) -> None:
        node = self._context.nodes[rank]
        known = self._gpu_faults.setdefault(node, [])
        for fault in faults:
            # Two ranks of a node may report the same fault.
            named = replace(fault, node=node)
            if named in known:
                continue
            known.append(named)
            if not is_answer and self._found is None:
                # Say it now: the ranks may hang from now on, and no other message would tell why.
                write_amid_output(f"srunddp: {named}\n")
        if is_answer:
            self._asked_about_gpus.discard(rank)

    def _ranks_to_ask(self, root_cause: RootCause) -> set[int]:
        """Return the ranks to ask about faults of GPUs, which may explain a root cause; empty if no
        GPU can be the reason.

        One of them is the first rank of each node in question, because it may watch the node's
        GPUs: of the culprit's node if the cause is sure, otherwise of all nodes. The others are the
        culprits, which may have GPUs that the first rank does not see.
        """
        has_gpus = self._gpus is not None or bool(self._gpu_faults)
        if not has_gpus or not may_be_of_gpu(root_cause):
            return set()
        is_sure = bool(root_cause.ranks) and not root_cause.follows
        is_sure = is_sure and root_cause.exit_code != STALLED
        first = dict[str, int]()
        for rank in sorted(self._table.ranks):
            first.setdefault(self._context.nodes[rank], rank)
        if is_sure:
            first = {node: rank for node, rank in first.items() if node == root_cause.node}
        there = self._open | ({self._context.rank} if self._gpus is not None else set())
        return {*first.values(), *root_cause.ranks} & there

    def _gpu_faults_of(self, root_cause: RootCause) -> list[GpuFault]:
        """Return the GPU faults to report with a root cause: the failed hardware of all nodes, and
        the other faults of the culprit's node, without those of a GPU whose hardware has failed.
        Empty if the ranks stopped in order, or if the cause's category already explains it.
        """
        if root_cause.ending is Ending.STOPPED or root_cause.category is not FailureCategory.OTHER:
            return []
        hardware = GpuFaultKind.HARDWARE.value
        found = list[GpuFault]()
        for node in sorted(self._gpu_faults, key=lambda node: (node != root_cause.node, node)):
            faults = self._gpu_faults[node]
            failed = [fault for fault in faults if fault.kind == hardware]
            are_failed = {fault.uuid or fault.index for fault in failed}
            found += failed
            if node == root_cause.node:
                found += [
                    fault for fault in faults if (fault.uuid or fault.index) not in are_failed
                ]
        return found

    def _facts(self, now: float) -> Facts:
        return Facts(
            steps_are_overdue=self._stall.detected(now),
            someone_may_fail=self._table.someone_may_fail,
            someone_is_silent=self._someone_is_silent(now),
            stacks_are_there=self._request.complete(now),
            stacks_name_a_rank=self._stacks_name_a_rank(now),
            network_can_be_tried=self._network_can_be_tried(now),
            network_is_tried=self._network is not None and self._network.is_complete,
            gpus_are_known=not self._asked_about_gpus,
            all_have_ended=self.root_cause is not None
            and self._all_have_ended(self.root_cause, now),
        )

    def _stacks_name_a_rank(self, now: float) -> bool:
        """Return whether the stacks that ranks were asked for tell the cause. False while an answer
        is missing and the time for it is not over, and in states that ask for no stacks.
        """
        is_over = self._request.complete(now)
        match self._decision.state:
            case DecisionState.ASKING_STALLED if is_over:
                # A rank whose script is over also explains it: the others may wait for that rank.
                return is_someone_elsewhere(self._request.stacks) or bool(self._finished_ranks())
            case DecisionState.ASKING_OTHERS if is_over:
                return self._hanging_rank() is not None
        return False

    def _hanging_rank(self) -> RootCause | None:
        failures = self._decision.failures
        return find_hanging_rank(self._request.stacks, failures, self._context.nodes)

    def _network_can_be_tried(self, now: float) -> bool:
        """Return whether the nodes should now try to reach each other: the other ways to find the
        cause are exhausted, and enough nodes can take part. The nodes are counted last, because
        that takes time, and each of thousands of ranks may report a failure before.
        """
        match self._decision.state:
            case DecisionState.WAITING_FOR_CAUSE:
                is_due = self._decision.time_is_over(now) or not self._table.someone_may_fail
            case DecisionState.ASKING_STALLED | DecisionState.ASKING_OTHERS:
                is_due = self._request.complete(now)
            case _:
                is_due = False
        return is_due and bool(self._context.port) and len(self._probers()) >= FEWEST

    def _probers(self) -> dict[int, str]:
        """Return one task for each node, with the node: the lowest task whose supervisor is
        connected and whose address is known. Spare nodes are included, because their tasks help to
        tell which node does not reach the others.
        """
        probers = dict[str, int]()
        for rank, node in sorted(self._context.nodes.items()):
            is_there = rank == self._context.rank or rank in self._open
            if is_there and is_numeric(self._context.addresses.get(rank, "")):
                probers.setdefault(node, rank)
        return {rank: node for node, rank in probers.items()}

    def _someone_is_silent(self, now: float) -> bool:
        if self._silent is not None:
            return bool(self._silent)
        # Ask this node's kernel which ranks have not acknowledged the ping only once, when they
        # have had the time to: each of thousands of ranks may report a failure meanwhile.
        is_due = self._decision.state in (
            DecisionState.WAITING_FOR_CAUSE,
            DecisionState.PROBING_OTHERS,
        ) and self._decision.time_is_over(now)
        return is_due and bool(self._unreachable_ranks())

    def _unreachable_ranks(self) -> set[int]:
        return self._liveness.unreachable(self._table.ranks_in(RankState.WORKING))

    def _all_have_ended(self, root_cause: RootCause, now: float) -> bool:
        """Return whether all ranks for which rank 0 waits after the decision have ended.

        These are the culprits, the ranks that have agreed to stop or got the launcher's signal, and
        those whose worker handles SIGTERM: they have time to end and may be saving a checkpoint.
        The supervisors of all other ranks end their workers at once. Rank 0 does not wait for a
        culprit whose own supervisor has not reported its failure, because the rank hangs or its
        supervisor was killed.
        """
        culprits = {*root_cause.ranks}
        have_time = (self._decision.ended_in_order | culprits) & self._self_reported
        if not have_time | self._saving <= self._ended:
            return False
        if self.restart is not None or self.fenced or now >= self._obeyed_by:
            return True  # before a restart, rank 0 waits for no rank that may yet say that it saves
        # A rank that has not ended may yet say that it is saving. Compare the counts first: most
        # often they already show that some ranks are missing, and sets of thousands of ranks need
        # not be compared.
        ranks = self._table.ranks
        return len(self._ended) >= len(ranks) - len(culprits) and ranks - culprits <= self._ended

    def _next_due(self, now: float) -> float:
        """Return when rank 0 has to act next if nothing happens before then."""
        if self._decision.state is DecisionState.ASKING_GPUS:
            due = [self._decision.ends_at or now]
            if self._context.rank in self._asked_about_gpus:
                due.append(now + self._limits.gpus_look)
            return min(due)
        due = [self._liveness.next_look, now + self._cut_off_in()]
        if self._leave_by is not None:
            due.append(self._leave_by)
        if self._decision.ends_at is not None:
            due.append(self._decision.ends_at)
        elif self._decision.state is DecisionState.UNDECIDED and self._stall.due is not None:
            due.append(self._stall.due)
        if self._own_probe is not None:
            due.append(now + self._limits.probe_look)
        return min(due)

    def _cut_off_in(self) -> float:
        """Return in how many seconds rank 0 counts as cut off unless more tasks answer; 0 or less
        if it is cut off already, and infinity if it cannot be.
        """
        if self._replacement is None or self._table.scripts_are_over:
            return math.inf
        return self._replacement.cut_off_in(len(self._open))

    def _is_cut_off(self) -> bool:
        return self._cut_off_in() <= 0.0

    # Actions.

    def _act(self, action: RankZeroAction | None, now: float) -> None:
        match action:
            case RankZeroAction.PING_ALL:
                self._liveness.ping(self._open)
            case RankZeroAction.NOTE_SILENT_RANKS:
                self._silent = self._unreachable_ranks()
            case RankZeroAction.ASK_FOR_STACKS:
                self._ask_for_stacks()
            case RankZeroAction.PROBE_NETWORK:
                self._probe_network(now)
            case RankZeroAction.ASK_ABOUT_GPUS:
                self._ask_about_gpus()
            case RankZeroAction.NAME_CAUSE | RankZeroAction.NAME_LOST_NODE:
                self._end_run()
            case RankZeroAction.END_CONNECTIONS:
                self._end_connections()
            case RankZeroAction() if action in FINDINGS:
                self._find(self._cause(action), now)

    def _cause(self, action: RankZeroAction) -> RootCause:
        """Return the root cause that an action of :data:`FINDINGS` asks for. If no hanging rank is
        found, or for FIND_FIRST_FAILURE, that is the likeliest cause among the failures.
        """
        match action:
            case RankZeroAction.FIND_STALLED_RANK:
                return self._stalled_rank()
            case RankZeroAction.FIND_CUT:
                return self._cut()
            case RankZeroAction.FIND_HANGING_RANK if hanging := self._hanging_rank():
                return hanging
        return find_root_cause(self._decision.failures, self._decision.finished_before)

    def _ask_for_stacks(self) -> None:
        """Ask each rank whose script runs for its worker's stack, and add this rank's stack if its
        own script runs.
        """
        working = self._table.ranks_in(RankState.WORKING)
        self._request = StackRequest(working, self._decision.ends_at or 0.0)
        for rank in working:
            if rank == self._context.rank:
                continue
            self._connections[rank].send(StacksWanted())
        if self._own_state is RankState.WORKING:
            self._request.add(self._context.rank, self._context.stacks())

    def _stalled_rank(self) -> RootCause:
        return find_stalled_rank(
            self._request.stacks, self._stall, self._context.nodes, self._finished_ranks()
        )

    def _probe_network(self, now: float) -> None:
        """Ask a task on each node to try to reach the others, and make the first attempts of this
        node.
        """
        self._end_own_probe()
        addresses = self._context.addresses
        number = self._network.number + 1 if self._network else 1
        self._network = NetworkProbe(self._probers(), addresses, self._context.port, number)
        for rank, request in self._network.requests.items():
            if rank == self._context.rank:
                self._own_probe = NodeProbe(request, now, self._limits)
            else:
                self._connections[rank].send(request)

    def _end_own_probe(self) -> None:
        if self._own_probe is not None:
            self._own_probe.close()
            self._own_probe = None

    def _cut(self) -> RootCause:
        """Return the root cause after the nodes have tried to reach each other: the nodes that
        others do not reach; if there are none, the cause as known without the probe, with a note
        that says so.
        """
        failures = self._decision.failures
        if failures:
            known = find_root_cause(failures, self._decision.finished_before)
        else:
            known = self._stalled_rank()
        if self._network is None:
            return known
        nodes = self._context.nodes
        history = self._restarts.history if self._restarts else Starts()
        found = self._network.findings(
            {nodes[rank] for rank in self._table.ranks}, self._context.node, history.node
        )
        if not found.cuts:
            return replace(known, notes=(*known.notes, found.note))
        without_way = [cut.node for cut in found.cuts]
        return of_cut(known, failures, found.nodes, found.text, without_way)

    def _lose_node(self, node: str, cause: str, now: float) -> None:
        ranks = tuple(rank for rank, where in self._others().items() if where == node)
        self._lose(RootCause(ranks, node, cause, LOST, ending=Ending.LOST), now)

    def _lose(self, root_cause: RootCause, now: float) -> bool:
        """End the run because a node is lost, or because this rank's launcher is gone.

        Returns:
            False if a cause had been found before; then nothing is done.
        """
        action = self._decision.apply(DecisionEvent.NODE_IS_LOST, now)
        if action is None:
            return False
        self._found = root_cause
        self._act(action, now)
        return True

    def _find(self, root_cause: RootCause, now: float) -> None:
        """Note the root cause, and go on to ask about GPUs or to name it."""
        self._found = root_cause
        self._asked_about_gpus = self._ranks_to_ask(root_cause)
        if self._asked_about_gpus:
            event = DecisionEvent.GPUS_MAY_TELL
        else:
            event = DecisionEvent.NOBODY_TO_ASK
        self._act(self._decision.apply(event, now), now)

    def _ask_about_gpus(self) -> None:
        for rank in self._asked_about_gpus - {self._context.rank}:
            self._connections[rank].send(GpuFaultsWanted())
        # Ask this rank's own GPUs last, because that may fork, which takes time.
        if self._context.rank in self._asked_about_gpus and self._gpus is not None:
            self._gpus.ask()

    def _end_run(self) -> None:
        """Report the root cause with the GPUs' faults, decide on a restart, tell all ranks, and
        write the file.

        The order matters:

        1. Report. A rank that gets the verdict ends, and when the first rank ends with an error, a
           launcher may kill all processes, including rank 0's.
        2. Decide which nodes are given up and whether the run restarts. From then on rank 0 listens
           for the next rendezvous.
        3. Send the verdict, which says where the ranks meet again. They may connect at once.
        4. Write ``failure.json``. This takes a fork, and the file system may not answer, so no rank
           waits for it.
        """
        assert self._found is not None
        root_cause = self._found.with_gpu_faults(self._gpu_faults_of(self._found))
        self.root_cause = root_cause
        self._end_own_probe()
        report(root_cause, self._others())
        left: Collection[str] = ()  # the nodes to give up
        if self._replacement and self._restarts and not self._asked_by:
            left = self._replacement.nodes_to_leave(root_cause, self._restarts.history)
        obstacle = self._obstacle(root_cause, left)
        is_left = self._context.node in left
        self.cut_off = is_left and root_cause.ending is Ending.LOST
        self.fenced = self.cut_off or (is_left and not obstacle)
        if not self.fenced:
            self._decide_restart(
                root_cause, obstacle, moves=bool(left), steps_seen=self._steps_seen()
            )
        self._tell(root_cause, left)
        write(root_cause, self._others(), self._folder)

    def _obstacle(self, root_cause: RootCause, left: Collection[str]) -> str:
        """Return why no restart is possible; empty if one is."""
        # Ask the policy here, because _decide_restart() is not called if rank 0's node is given up.
        if self._restarts and (why := self._restarts.forbids(root_cause)):
            return why
        if self._replacement and self._replacement.can_move:
            if shortage := self._replacement.shortage(left):
                return shortage
        elif root_cause.ending is Ending.LOST:
            return "a node is lost"
        elif self._has_lost_a_rank():
            if kills_whole_step(os.environ):
                return "srunddp has ended on a rank; srun --oom-kill-step=0 leaves it there"
            return "srunddp has ended on a rank"
        return "all scripts are over" if self._scripts_were_over else ""

    def _steps_seen(self) -> StartSteps:
        stall = self._stall
        if stall.begun is None or stall.first_at is None:
            return StartSteps(any=self._has_steps)
        return StartSteps(any=True, first_after=stall.first_at - stall.begun)

    def _has_lost_a_rank(self) -> bool:
        return not self._table.ranks - {self._context.rank} <= self._open

    def _tell(self, root_cause: RootCause, left: Collection[str]) -> None:
        """Send each rank the verdict. It says where the ranks meet for the restart, if there is
        one; a rank whose node is given up learns that only if its tasks are to come back.

        Args:
            root_cause: The root cause, for all ranks.
            left: The nodes to give up.
        """
        published = self.restart
        if self.fenced and self._context.spare_nodes:
            # Rank 0's node is given up, so the other ranks meet where the first deputy listens.
            published = self._context.spare_nodes.takeover
        returning = set[str]()
        if self._replacement:
            returning = self._replacement.returning(root_cause, left)
        for rank, connection in self._connections.items():
            node = self._context.nodes[rank]
            is_given_up = published is not None and node in left
            restart_at = published
            if is_given_up and node not in returning:
                restart_at = None
            connection.send(
                Verdict(
                    root_cause.ranks,
                    root_cause.exit_code,
                    restart_at=restart_at,
                    node_is_given_up=is_given_up,
                )
            )
        if self._replacement:
            self._replacement.note_end(left, returning, list(self._open))
        if self.fenced and self._context.node in returning:
            self.restart = published
            self.returns = True

    def _end_connections(self) -> None:
        for connection in self._connections.values():
            connection.end()

    def _finished_ranks(self) -> dict[int, str]:
        """Return the node of each rank whose script is over without an error."""
        finished = self._table.ranks_in(RankState.DONE, RankState.LEFT)
        return {rank: self._context.nodes[rank] for rank in finished}

    def _others(self) -> dict[int, str]:
        """Return the node of each rank that ends with the run: rank 0, and each rank that has not
        left before.
        """
        return {
            rank: self._context.nodes[rank]
            for rank in sorted(self._table.ranks)
            if rank == self._context.rank or self._table[rank] is not RankState.LEFT
        }


def _all_alone(ranks: int) -> str:
    """Return the line that warns about a run none of whose ranks has made a process group.

    Args:
        ranks: How many ranks the run had.
    """
    return (
        f"srunddp: none of the {ranks} ranks has made a process group, so each has worked alone ->"
        " if they should work together, call init_process_group(), or srunddp.init(), when"
        " WORLD_SIZE is above 1; LOCAL_RANK is a variable, and --local_rank is not passed\n"
    )


def _no_steps(timeout: float) -> str:
    """Return the line for a run in which ``--stall-timeout`` does not count, because no rank makes
    a step that srunddp knows of.
    """
    return (
        f"srunddp: no step for {timeout:g} s, and --stall-timeout does not count yet: it begins"
        " with the first srunddp.heartbeat(), or step of srunddp.Trainer -> call"
        " srunddp.heartbeat() after each step, on all ranks\n"
    )
