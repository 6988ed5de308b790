"""What the supervisor does while its worker runs; imported after the fork, so that the worker starts before."""

import select
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from signal import Signals
from typing import Any

from srunddp.bootstrap.environment import mpi
from srunddp.bootstrap.network import interface
from srunddp.bootstrap.rendezvous.meet import Rejoin, listen_again, rendezvous
from srunddp.bootstrap.rendezvous.protocol import CancelToken, RendezvousInfo, RendezvousResult
from srunddp.errors import RendezvousError, Scope
from srunddp.monitor.monitor import Monitor
from srunddp.run.options import run_metadata
from srunddp.run.worker import WorkerContext
from srunddp.supervisor.connection import SupervisorConnection
from srunddp.supervisor.failure import FailureRecorder
from srunddp.supervisor.failure_monitor import FailureMonitor, RankContext
from srunddp.supervisor.restart import RestartPolicy, Starts
from srunddp.supervisor.signals import Launcher
from srunddp.supervisor.supervisor import RankAgent, RendezvousOutcome, Supervisor
from srunddp.supervisor.worker_process import STOPPED_FOR, WorkerPipe, WorkerProcess


@dataclass(kw_only=True)
class Agent(RankAgent):
    """The rank's rendezvous and its telemetry.

    Attributes:
        context: the worker's; worker: its process id; pipe: to it.
        early: signals that came before the worker was there; standby: as in the supervisor.
        history: on rank 0, of the starts before; policy: decides there on restarts.
        rejoin: where the ranks meet again, None where the run is over; remaining, asked: as in the supervisor.
        monitor, say: as for :func:`srunddp.run.launch.launch`; report_rendezvous: its ``on_rendezvous``.
    """

    context: WorkerContext
    worker: int
    pipe: WorkerPipe
    monitor: Monitor
    report_rendezvous: Callable[[RendezvousInfo], None]
    say: Callable[[str], None]
    early: set[Signals] = field(default_factory=set)
    standby: Sequence[int] = ()
    history: Starts = field(default_factory=Starts)
    policy: RestartPolicy | None = None
    rejoin: Rejoin | None = None
    remaining: set[int] = field(default_factory=set)
    asked: set[int] = field(default_factory=set)
    _meeting: RendezvousInfo | None = None
    _descriptor: int | None = None
    _cancel: CancelToken = field(default_factory=CancelToken)

    def __post_init__(self) -> None:
        environment, log = self.context.setup.environment, self.context.output.target.file
        self._recorder = FailureRecorder(environment.rank, environment.node, self.context.dump, log)

    def supervise(self, launcher: Launcher) -> int:
        """Meet the other ranks, and watch the worker to its end; returns the exit code to leave with.

        Raises:
            SrunddpError: the ranks did not meet.
        """
        alone = self.context.setup.environment.world_size == 1
        supervisor = Supervisor(
            agent=self,
            recorder=self._recorder,
            # In a single process nobody waits for a rank that is stopped, or that takes long to end.
            process=WorkerProcess(self.worker, None if alone else STOPPED_FOR),
            pipe=self.pipe,
            output=self.context.output,
            grace=None if alone else self.context.options.grace,
            restart_grace=self.context.options.restart_grace,
            launcher=launcher,
            early=self.early,
            standby=self.standby,
        )
        code = supervisor.run()
        if supervisor.restart is not None and self._meeting:
            options, meeting = self.context.setup.options, self._meeting
            where: dict[str, Any] = {"published": supervisor.restart, "channel": meeting.channel, "run": meeting.run}
            self.rejoin = Rejoin(generation=options.generation + 1, descriptor=self._descriptor, **where)
            self.remaining, self.asked = supervisor.remaining, supervisor.asked
        return code

    def _publish(self) -> str:
        if self.context.setup.environment.world_size == 1:
            return ""
        self._descriptor, published = listen_again(self.context.setup)
        return published

    def rendezvous(self) -> RendezvousOutcome:
        setup = self.context.setup
        self.monitor.mark("meeting")
        found = rendezvous(setup, self._receive_over_mpi, self.say, self._cancel)
        if rejoin := setup.options.rejoin:  # which is one run for the script
            found = replace(found, meeting=replace(found.meeting, run=rejoin.run))
        self.monitor.mark("met")
        if setup.environment.rank == 0:
            self.monitor.describe(run_metadata(setup, found))
        self._meeting = found.meeting
        return asdict(found.meeting), self._failure_monitor(found)

    def abort_rendezvous(self, cause: str, exit_code: int) -> None:
        self._cancel.fail(cause, exit_code)

    def on_rendezvous(self, message: dict[str, Any]) -> None:
        self.report_rendezvous(RendezvousInfo(**message))

    def announce_termination(self) -> None:
        self.monitor.page.announce_termination()

    def stop_sampler(self) -> None:
        if trouble := self.monitor.stop_sampler():
            self.say(trouble)

    def _failure_monitor(self, found: RendezvousResult) -> FailureMonitor:
        environment, options = self.context.setup.environment, self.context.options
        folder = self._recorder.log.parent if self._recorder.log else None
        name = self.context.setup.interface.name
        most = self.context.setup.options.max_restarts
        if most and environment.rank == 0:
            self.policy = RestartPolicy(most, self.history, self._publish, self.monitor.page.has_steps)
        if not found.connections:
            return FailureMonitor(folder, self.policy)
        context = RankContext(
            rank=environment.rank,
            node=environment.node,
            nodes=found.nodes,
            stall_timeout=options.stall_timeout,
            step=self.monitor.page.read,
            stacks=partial(self._recorder.dump.request, self.worker),
            link_is_up=lambda: any(link.name == name and link.up for link in interface.list_interfaces()),
            folder=folder,
            lost_after=options.lost_after,
            restarts=self.policy,
            asked=self._recorder.ending_signal,
        )
        connections = {
            rank: SupervisorConnection(connection, options.lost_after) for rank, connection in found.connections.items()
        }
        if environment.rank:
            from srunddp.supervisor.participant import Participant

            return Participant(context, connections[0])
        from srunddp.supervisor.coordinator import Coordinator

        return Coordinator(context, connections)

    def _receive_over_mpi(self, _: object) -> str:
        """MPI is spoken by the worker, which then sends what it received."""
        timeout = self.context.setup.options.timeout
        if not select.select([self.pipe.end], [], [], timeout)[0]:
            found = f"MPI_Init did not return within {timeout:g} s"
            hint = "see whether one did not start or ended before; raise --timeout"
            raise RendezvousError(found, expected="all ranks to start", hint=hint)
        answer = self.pipe.receive()
        if answer is None:
            hint = "see MPI's own message; mpi4py must be built for the launcher's MPI"
            raise RendezvousError("the worker ended in MPI_Init", expected="MPI to start in every rank", hint=hint)
        if "no_world" in answer:
            raise mpi.MpiNotLaunchedError(answer["no_world"])
        if "failed" in answer:
            raise RendezvousError(answer["failed"], scope=Scope.JOB)
        return str(answer["told"])
