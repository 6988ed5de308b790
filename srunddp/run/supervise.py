"""What the supervisor does while its worker runs. This module is imported after the fork, so that
the worker need not wait for the import.
"""

from __future__ import annotations

import os
import select
from collections.abc import Callable, Mapping
from dataclasses import field, replace
from functools import partial
from pathlib import Path
from signal import SIGINT, Signals
from typing import TYPE_CHECKING, Any

from srunddp.bootstrap.environment import mpi
from srunddp.bootstrap.network import interface
from srunddp.bootstrap.network.ifaces_entry import entry_for
from srunddp.bootstrap.rendezvous.messages import RendezvousInfo
from srunddp.bootstrap.rendezvous.protocol import CancelToken, RendezvousResult
from srunddp.bootstrap.rendezvous.rank_setup import Rejoin, listen_again
from srunddp.bootstrap.rendezvous.roles import rendezvous
from srunddp.errors import ReassignedError, RendezvousError, Scope, SrunddpError
from srunddp.monitor.monitor import Monitor
from srunddp.run.command import is_chosen
from srunddp.run.restart import EndedStart
from srunddp.run.run_files import run_metadata
from srunddp.run.worker import WorkerContext
from srunddp.supervisor.agent_store import AgentStore
from srunddp.supervisor.clock import ActiveClock
from srunddp.supervisor.connection import SupervisorConnection
from srunddp.supervisor.deputies import Deputies
from srunddp.supervisor.descendants import Descendants
from srunddp.supervisor.failure_monitor import FailureMonitor, RankContext
from srunddp.supervisor.launcher import Launcher
from srunddp.supervisor.limits import DEFAULT_LIMITS, Limits
from srunddp.supervisor.recorder import FailureRecorder
from srunddp.supervisor.restart import RestartPolicy, Starts
from srunddp.supervisor.sentinel import Sentinel
from srunddp.supervisor.supervisor import RankAgent, RendezvousOutcome, Supervisor
from srunddp.supervisor.worker_messages import MpiHasFailed, MpiHasNoWorld, ReceivedOverMpi
from srunddp.supervisor.worker_process import WorkerPipe, WorkerProcess
from srunddp.util.console import say_amid_output
from srunddp.util.cuda_visible import may_have_gpus
from srunddp.util.quick_dataclass import dataclass

if TYPE_CHECKING:
    from srunddp.monitor.metrics_file import MetricsFile
    from srunddp.spare_nodes.spare_nodes import SpareNodes
    from srunddp.supervisor.gpu_watch import NodeGpus


@dataclass(kw_only=True)
class Agent(RankAgent):
    """What a :class:`Supervisor` needs from the rest of srunddp: it meets the other ranks, and
    records readings and metrics.

    Attributes:
        context: What the supervisor has prepared for the worker.
        worker: The worker's pid.
        pipe: The supervisor's end of the pipe to the worker.
        monitor, say, limits: As for :func:`srunddp.run.launch.launch`.
        report_rendezvous: The ``on_rendezvous`` of :func:`srunddp.run.launch.launch`.
        early: The signals that came before the worker existed, and are to be passed on to it.
        sentinel: Shows which signals reach the worker; None if there is none.
        history: On rank 0, how the previous starts have ended.
        descendants: Ends the processes that the worker leaves behind.
        stalls: How many of the previous starts have ended with a stall.
        checkpointed: Unix time of the last checkpoint that this process wrote in a previous start;
            None for none.
        gpus: The watch over this node's GPUs; None if there is none.
    """

    context: WorkerContext
    worker: int
    pipe: WorkerPipe
    monitor: Monitor
    report_rendezvous: Callable[[RendezvousInfo], None]
    say: Callable[[str], None]
    limits: Limits = DEFAULT_LIMITS
    early: set[Signals] = field(default_factory=set)
    sentinel: Sentinel | None = None
    history: Starts = field(default_factory=Starts)
    descendants: Descendants = field(default_factory=Descendants)
    stalls: int = 0
    checkpointed: float | None = None
    gpus: NodeGpus | None = None
    _policy: RestartPolicy | None = None  # on rank 0, with --restarts
    _meeting: RendezvousInfo | None = None  # rank 0's answer at the rendezvous
    _descriptor: int | None = None  # of the socket on which rank 0 listens for the next start
    _agent_store: AgentStore | None = None  # on rank 0
    _metrics: MetricsFile | None = None  # on the first rank of a node, if the site has asked for it
    _cancel: CancelToken = field(default_factory=CancelToken)

    def __post_init__(self) -> None:
        environment = self.context.setup.environment
        log = self.context.output.target.file
        self._recorder = FailureRecorder(
            environment.rank,
            environment.node,
            self.context.dump,
            log,
            self.limits,
            self.context.command.signal_grace,
        )
        self._folder = log.parent if log else None
        # Call is_chosen() here and not when the value is needed: the rendezvous runs in another
        # thread, in which click does not know the command.
        self._asks_for_stall_timeout = is_chosen("stall_timeout")
        self._spare_nodes = self._make_spare_nodes() if environment.nodes_may_change else None
        if self.gpus is None and may_have_gpus(os.environ):
            # Import the module before it is needed: at a failure nothing may be imported, because
            # the file system may have failed.
            from srunddp.supervisor.gpu_watch import NodeGpus

            self.gpus = NodeGpus(own=self.descendants.own, limits=self.limits)

    def _make_spare_nodes(self) -> SpareNodes:
        # Imported here because in most runs the nodes do not change.
        from srunddp.spare_nodes.spare_nodes import SpareNodes

        return SpareNodes(
            setup=self.context.setup,
            lost_after=self.context.command.lost_after,
            restart_grace=self.context.command.restart_grace,
            folder=self._folder,
            say=say_amid_output,
            limits=self.limits,
        )

    def supervise(self, launcher: Launcher) -> EndedStart:
        """Meet the other ranks, and watch the worker until it ends.

        Args:
            launcher: The launcher of this rank, which may send signals to this process.

        Returns:
            How this start has ended.

        Raises:
            SrunddpError: The rendezvous failed.
        """
        alone = self.context.setup.environment.world_size == 1
        supervisor = Supervisor(
            agent=self,
            recorder=self._recorder,
            # A run of one rank has no limit for a worker that is stopped or ends slowly, because no
            # other rank waits for it.
            process=WorkerProcess(
                self.worker, None if alone else self.limits.stopped_for, limits=self.limits
            ),
            pipe=self.pipe,
            output=self.context.output,
            grace=None if alone else self.context.command.grace,
            restart_grace=self.context.command.restart_grace,
            launcher=launcher,
            sentinel=self.sentinel,
            early=self.early,
            descendants=self.descendants,
            limits=self.limits,
            clock=ActiveClock(limits=self.limits),
        )
        code = 0
        is_cut_off = False
        rejoin = None
        history = None
        try:
            code = supervisor.run()
        except ReassignedError as error:
            assert self._spare_nodes
            rejoin = self._spare_nodes.rejoin_as(error)
            history = self.history
        except SrunddpError as error:
            if self._spare_nodes and not supervisor.asked:
                rejoin = self._spare_nodes.rejoin_after(error)
            if rejoin is None:
                raise
            code = error.exit_code
            is_cut_off = True
        failure_monitor = supervisor.monitor
        if supervisor.restart is not None and failure_monitor and self._meeting:
            rejoin = self._next_rejoin(supervisor.restart, failure_monitor, self._meeting)
        elif failure_monitor and failure_monitor.cut_off and self._spare_nodes:
            self._spare_nodes.await_srun()
        is_fenced = failure_monitor is not None and failure_monitor.fenced
        # A fenced rank 0 must not dismiss the tasks that wait to come back, because the run may go
        # on without this node, and then needs them.
        if self._spare_nodes and rejoin is None and not is_fenced:
            self._spare_nodes.dismiss_returning()
        return EndedStart(
            exit_code=code,
            rejoin=rejoin,
            history=self._policy.history if self._policy else history,
            remaining=tuple(supervisor.remaining),
            end_requests=tuple(supervisor.asked),
            ends_by=self._ends_by(launcher, supervisor),
            has_lost_nodes=self._has_lost_nodes(failure_monitor),
            is_fenced=is_fenced,
            is_cut_off=is_cut_off,
            checkpointed=self.monitor.page.checkpointed_at(),
        )

    @staticmethod
    def _ends_by(launcher: Launcher, supervisor: Supervisor) -> int:
        """Return the signal by which this process is to end; 0 to end with the exit code.

        After Ctrl-C without a launcher it is SIGINT, as for Python itself: a shell stops its script
        or loop only if the command has ended by SIGINT.
        """
        has_ended_by_it = supervisor.is_interrupted or supervisor.process.status == -SIGINT
        if launcher.pid is None and SIGINT in supervisor.asked and has_ended_by_it:
            return SIGINT
        return 0

    def _has_lost_nodes(self, failure_monitor: FailureMonitor | None) -> bool:
        """Return whether any node, spare or not, was lost since the run began."""
        if self._meeting and self._meeting.vacant:  # a node was lost in a previous start
            return True
        return failure_monitor is not None and failure_monitor.has_lost

    def _next_rejoin(
        self, published: str, failure_monitor: FailureMonitor, meeting: RendezvousInfo
    ) -> Rejoin:
        """Return the data with which this process joins the rendezvous of the next start.

        Args:
            published: The text, with rank 0's address and secret, that rank 0 would otherwise have
                to publish in the next start.
            failure_monitor: The failure monitor of the start that is over.
            meeting: Rank 0's answer at the rendezvous of the start that is over.
        """
        rejoin = Rejoin(
            generation=self.context.setup.options.generation + 1,
            published=published,
            channel=meeting.channel,
            run=meeting.run,
            descriptor=self._descriptor,
        )
        if self._spare_nodes:
            return self._spare_nodes.rejoin(rejoin, failure_monitor, meeting)
        return rejoin

    def _publish(self) -> str:
        if self.context.setup.environment.world_size == 1:
            return ""
        setup = self.context.setup
        if setup.standing:
            # With nodes that may change, this process listens for the next start already. The text
            # to publish was made then, and has the secret that is valid for the whole run.
            self._descriptor = os.dup(setup.standing.fileno())
            return setup.returns_at
        # Listen before the verdict is sent, because the other ranks receive the new address with
        # the root cause. The socket stays open when this process becomes the next start.
        try:
            self._descriptor, published = listen_again(self.context.setup)
        except RendezvousError:
            if not self._agent_store:
                raise
            # No port may be free, because a firewall leaves only few open. Then use the port of the
            # agent store, which is not needed any more.
            self._agent_store.close()
            self._descriptor, published = listen_again(self.context.setup)
        return published

    def rendezvous(self) -> RendezvousOutcome:
        setup = self.context.setup
        self.monitor.mark("meeting")
        found = rendezvous(
            setup,
            self._receive_over_mpi,
            self.say,
            self._cancel,
            self._spare_nodes.server if self._spare_nodes else None,
            return_to_run=self._spare_nodes.return_to_run if self._spare_nodes else None,
            agent_store=True,
        )
        if found.agent_store:
            host, port = found.agent_store.getsockname()[:2]
            self._agent_store = AgentStore(found.agent_store, host, port, self.limits)
        # Outside a job step, each start makes a random run id. Keep the id of the first start,
        # because for the script all starts are one run.
        if rejoin := setup.options.rejoin:
            found = replace(found, meeting=replace(found.meeting, run=rejoin.run))
        self.monitor.mark("met")
        if setup.environment.rank == 0:
            self.monitor.describe(run_metadata(setup, found), self._find_provenance)
        self._meeting = found.meeting
        self._start_metrics(found.meeting)
        return found.meeting, self._failure_monitor(found)

    def _find_provenance(self) -> Mapping[str, Any]:
        # Imported here because only --monitor needs the module. This runs in a thread for which
        # nobody waits.
        from srunddp.run.provenance import provenance

        return provenance(self.context.command, self.context.script)

    def _start_metrics(self, meeting: RendezvousInfo) -> None:
        """Begin to write this node's metrics, if this is the first rank of its node and the node's
        entry in ifaces.conf has ``metrics:``.
        """
        setup = self.context.setup
        environment = setup.environment
        entry = entry_for(setup.entries, environment.node, or_default=True)
        if not entry.metrics or environment.local_rank or environment.is_spare:
            return
        # Imported here because few sites ask for metrics.
        from srunddp.run.metrics import metrics_file

        self._metrics = metrics_file(
            Path(entry.metrics),
            setup,
            meeting,
            self.monitor.page,
            stalls=self.stalls,
            checkpointed=self.checkpointed,
            limits=self.limits,
        )
        self._metrics.start()

    def finish_metrics(self, *, goes_on: bool) -> None:
        """Stop writing this node's metrics when the start is over, and remove their file.

        Args:
            goes_on: Whether this process becomes the next start, which writes the same file. Then
                the file is not removed.
        """
        if self._metrics:
            self._metrics.finish(stays=goes_on)

    def abort_rendezvous(self, cause: str, exit_code: int) -> None:
        self._cancel.fail(cause, exit_code)

    def on_rendezvous(self) -> None:
        assert self._meeting
        self.report_rendezvous(self._meeting)

    def announce_termination(self) -> None:
        self.monitor.page.announce_termination()

    def answered_probes(self) -> int:
        return self.monitor.page.answered_probes()

    def agent_store(self) -> AgentStore | None:
        return self._agent_store

    def stop_sampler(self) -> None:
        if trouble := self.monitor.stop_sampler():
            say_amid_output(trouble)
        if self.gpus:
            self.gpus.stop()

    def _failure_monitor(self, found: RendezvousResult) -> FailureMonitor:
        environment = self.context.setup.environment
        command = self.context.command
        name = self.context.setup.interface.name
        most = self.context.setup.options.max_restarts
        if most and environment.rank == 0:
            has_steps = self.monitor.page.has_steps
            self._policy = RestartPolicy(
                most, self.history, self._publish, has_steps, limits=self.limits
            )
        if not found.connections:
            return FailureMonitor(self._folder, self._policy, self.limits, self.gpus)
        meeting = found.meeting
        spare_nodes = None
        if self._spare_nodes:
            spare_nodes = self._spare_nodes.of_start(found.nodes, meeting)
        context = RankContext(
            rank=environment.rank,
            node=environment.node,
            nodes=found.nodes,
            stall_timeout=command.stall_timeout,
            asks_for_stall_timeout=self._asks_for_stall_timeout,
            step=self.monitor.page.read,
            paused=self.monitor.page.is_paused,
            has_steps=self.monitor.page.has_steps,
            ran_alone=self._ran_alone,
            stacks=partial(self._recorder.dump.request, self.worker),
            link_is_up=lambda: any(
                link.name == name and link.up for link in interface.list_interfaces()
            ),
            addresses=found.addresses,
            port=found.port,
            folder=self._folder,
            lost_after=command.lost_after,
            signal_grace=command.signal_grace,
            ends_within=max(command.grace, command.restart_grace),
            restarts=self._policy,
            asked=self._recorder.ending_signal,
            deputies=Deputies(
                meeting.deputies,
                environment.rank,
                meeting.master_addr,
                self.limits,
                self.context.setup.deputy,
            ),
            spare_nodes=spare_nodes,
            limits=self.limits,
            gpus=self.gpus,
        )
        connections = {
            rank: SupervisorConnection(connection, command.lost_after)
            for rank, connection in found.connections.items()
        }
        if environment.rank:
            from srunddp.supervisor.participant import Participant

            return Participant(context, connections[0])
        from srunddp.supervisor.coordinator import Coordinator

        return Coordinator(context, connections)

    def _ran_alone(self) -> bool:
        # The agent store's process was started by the first connection to it. So this rank works
        # with another process, such as one that the script has started.
        if self._agent_store and self._agent_store.process is not None:
            return False
        return self.monitor.page.ran_alone()

    def _receive_over_mpi(self, _: object) -> str:
        """Return what rank 0 has published, which the worker has received over MPI.

        Raises:
            MpiNotLaunchedError: MPI has no world.
            RendezvousError: MPI failed, or did not start in time.
        """
        timeout = self.context.setup.options.timeout
        # Only the worker calls MPI, because MPI_Init can neither be interrupted nor given a
        # timeout. The supervisor waits for the worker's answer, with a timeout.
        if not select.select([self.pipe.end], [], [], timeout)[0]:
            raise RendezvousError(
                f"MPI_Init did not return within {timeout:g} s",
                expected="all ranks to start",
                hint="check whether a rank has not started or has ended; or raise --timeout",
            )
        answer = self.pipe.receive()
        if answer is None:
            raise RendezvousError(
                "the worker ended in MPI_Init",
                expected="MPI to start in every rank",
                hint="see MPI's own message; mpi4py must be built for the launcher's MPI",
            )
        match answer:
            case ReceivedOverMpi(text):
                return text
            case MpiHasNoWorld(reason):
                raise mpi.MpiNotLaunchedError(reason)
            case MpiHasFailed(reason):
                raise RendezvousError(reason, scope=Scope.JOB)
        raise AssertionError(answer)
