"""The pipeline below a supervisor: fork the worker, meet the other ranks, and watch the worker to its end.

Every step returns a value that the next one takes; the steps do not know each other.
"""

from __future__ import annotations

import os
import resource
import select
import sys
import warnings
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from functools import partial

from srunddp.bootstrap.environment import mpi
from srunddp.bootstrap.environment.detect import Environment
from srunddp.bootstrap.network import interface
from srunddp.bootstrap.rendezvous.abort import CancelToken
from srunddp.bootstrap.rendezvous.meet import RankSetup, rendezvous
from srunddp.bootstrap.rendezvous.protocol import RendezvousInfo, RendezvousResult, raise_open_files_limit
from srunddp.errors import ConfigError, RendezvousError, Scope, SrunddpError
from srunddp.monitor.monitor import NullMonitor
from srunddp.run.options import RunOptions, run_metadata
from srunddp.run.script import Script
from srunddp.run.worker import WorkerContext, run_worker
from srunddp.supervisor import process_tree, signals
from srunddp.supervisor.connection import SupervisorConnection
from srunddp.supervisor.failure import FailureRecorder
from srunddp.supervisor.failure_monitor import FailureMonitor, RankContext, SingleProcess
from srunddp.supervisor.output.redirect import OutputRedirect
from srunddp.supervisor.stacks import StackDump
from srunddp.supervisor.supervisor import RendezvousOutcome, Supervisor
from srunddp.supervisor.worker_process import STOPPED_FOR, WorkerPipe, WorkerProcess, pipe

_SPARE_FILES = 64


def launch(
    setup: RankSetup,
    script: Script,
    options: RunOptions,
    output: OutputRedirect,
    monitor: NullMonitor,
    *,
    on_rendezvous: Callable[[RendezvousInfo], None],
    say: Callable[[str], None] = lambda _: None,
) -> int:
    """Run the script below a supervisor. It returns in the supervisor alone, see :func:`fork_worker`.

    Args:
        setup: by :func:`srunddp.bootstrap.rendezvous.meet.bind`.
        script: the user's; options: how it is to run.
        output: by :func:`srunddp.run.options.open_output`; monitor: by :func:`srunddp.monitor.monitor.open_monitor`.
        on_rendezvous: called when all have met.
        say: takes rank 0's lines while it waits for the others.

    Returns:
        The exit code to leave with.

    Raises:
        SrunddpError: the ranks did not meet.
    """
    ours, theirs = pipe()
    dump, launcher = StackDump(), _launcher(setup.environment)
    process_tree.become_subreaper()
    mask = signals.block()
    monitor.start_sampler(setup.interface.name, _rank_variable(setup.environment), launcher.pid)
    context = WorkerContext(
        setup=setup,
        script=script,
        supervisor=theirs,
        mask=mask,
        output=output,
        dump=dump,
        page=monitor.page,
        fast_exit=options.fast_exit,
        offline=options.offline,
    )
    worker = fork_worker(context, ours, monitor)
    # What is open here ends with this process, and not before: so the others see its end.
    warnings.simplefilter("ignore", ResourceWarning)
    output.start()
    monitor.start()
    if setup.held:
        setup.held.store.close()
        raise_open_files_limit()  # in the supervisor alone: the script keeps its own limit
    environment = setup.environment
    agent = _Agent(
        setup=setup,
        options=options,
        worker=worker,
        pipe=ours,
        recorder=FailureRecorder(environment.rank, environment.node, dump, output.target.file),
        output=output,
        monitor=monitor,
        announce=on_rendezvous,
        say=say,
    )
    code = SrunddpError.exit_code
    try:
        code = agent.supervise(launcher)
    except SrunddpError as error:
        code = error.exit_code
        raise
    finally:
        monitor.finish(code)
    return code


def fork_worker(context: WorkerContext, ours: WorkerPipe, monitor: NullMonitor) -> int:
    """Fork the worker, which does not return from here: it ends as a script does, with the script's exit code.

    Args:
        ours, monitor: what is the supervisor's alone.

    Returns:
        The worker's process id.
    """
    supervisor = os.getpid()
    if worker := os.fork():
        context.supervisor.end.close()
        return worker
    signals.die_with_parent(supervisor)
    ours.end.close()
    monitor.in_worker()
    if is_worker_exec(os.environ):
        from srunddp.run.worker_exec import become  # most runs need none of it

        become(context)
    with context.supervisor.end:
        sys.exit(run_worker(context))  # not os._exit: exit handlers, threads and open files are the script's


@dataclass(frozen=True, kw_only=True)
class _Agent:
    """A :class:`srunddp.supervisor.supervisor.RankAgent`: the rank's rendezvous, its telemetry and its output."""

    setup: RankSetup
    options: RunOptions
    worker: int
    pipe: WorkerPipe
    recorder: FailureRecorder
    output: OutputRedirect
    monitor: NullMonitor
    announce: Callable[[RendezvousInfo], None]
    say: Callable[[str], None]
    _cancel: CancelToken = field(default_factory=CancelToken)

    def supervise(self, launcher: signals.Launcher) -> int:
        """Watch the worker to its end; returns the exit code to leave with."""
        alone = self.setup.environment.world_size == 1
        return Supervisor(
            agent=self,
            recorder=self.recorder,
            # In a world of one nobody waits for a rank that is stopped, or that takes long to end.
            process=WorkerProcess(self.worker, None if alone else STOPPED_FOR),
            pipe=self.pipe,
            grace=None if alone else self.options.grace,
            launcher=launcher,
        ).run()

    def rendezvous(self) -> RendezvousOutcome:
        self.monitor.mark("meeting")
        found = rendezvous(self.setup, self._told_over_mpi, self.say, self._cancel)
        self.monitor.mark("met")
        if self.setup.environment.rank == 0:
            self.monitor.describe(run_metadata(self.setup, found))
        return RendezvousOutcome(asdict(found.meeting), self._failure_monitor(found))

    def abort_rendezvous(self, cause: str, exit_code: int) -> None:
        self._cancel.fail(cause, exit_code)

    def on_rendezvous(self, outcome: RendezvousOutcome) -> None:
        self.announce(RendezvousInfo(**outcome.message))

    def announce_termination(self) -> None:
        self.monitor.page.announce_termination()

    def stop_sampler(self) -> None:
        if trouble := self.monitor.stop_sampler():
            self.say(trouble)

    def finish_output(self, limit: float) -> None:
        self.output.finish(limit)

    def _failure_monitor(self, found: RendezvousResult) -> FailureMonitor:
        environment, file = self.setup.environment, self.output.target.file
        folder = file.parent if file else None
        if not found.lines:
            return SingleProcess(folder)
        context = RankContext(
            rank=environment.rank,
            node=environment.node,
            nodes=found.nodes,
            stall_timeout=self.options.stall_timeout,
            step=self.monitor.page.read,
            stacks=partial(self.recorder.dump.request, self.worker),
            link_is_up=partial(interface.has_carrier, self.setup.interface.name),
            folder=folder,
            lost_after=self.options.lost_after,
            asked=self.recorder.ending_signal,
        )
        lost_after = self.options.lost_after
        connections = {rank: SupervisorConnection(line, lost_after) for rank, line in found.lines.items()}
        if environment.rank:
            from srunddp.supervisor.participant import Participant

            return Participant(context, connections[0])
        from srunddp.supervisor.coordinator import Coordinator

        return Coordinator(context, connections)

    def _told_over_mpi(self, _: object) -> str:
        """MPI is spoken by the worker, which then says what it was told."""
        timeout = self.setup.options.timeout
        if not select.select([self.pipe.end], [], [], timeout)[0]:
            raise RendezvousError(
                f"MPI_Init did not return within {timeout:g} s",
                expected="all ranks to start",
                hint="see whether one did not start or ended before; raise --timeout",
            )
        answer = self.pipe.receive()
        if answer is None:
            raise RendezvousError(
                "the worker ended in MPI_Init",
                expected="MPI to start in every rank",
                hint="see MPI's own message; mpi4py must be built for the launcher's MPI",
            )
        if "no_world" in answer:
            raise mpi.MpiNotLaunchedError(answer["no_world"])
        if "failed" in answer:
            raise RendezvousError(answer["failed"], scope=Scope.JOB)
        return str(answer["told"])


def is_worker_exec(environ: Mapping[str, str]) -> bool:
    """Whether the worker is to be a program of its own, see :mod:`srunddp.run.worker_exec`.

    Raises:
        ConfigError: ``SRUNDDP_WORKER`` says something else.
    """
    value = environ.get("SRUNDDP_WORKER") or "fork"
    if value not in ("fork", "exec"):
        hint = "export SRUNDDP_WORKER=exec for a profiler, else unset it"
        raise ConfigError(f"SRUNDDP_WORKER={value}", expected="fork or exec", hint=hint, scope=Scope.JOB)
    return value == "exec"


def check_open_files(environment: Environment) -> None:
    """Before the ranks meet: may rank 0 open as many files as the connections of all ranks need?

    Raises:
        ConfigError: the hard limit is too low.
    """
    needed = environment.world_size + _SPARE_FILES
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    low = hard != resource.RLIM_INFINITY and hard < needed
    if environment.rank == 0 and environment.world_size > 1 and low:
        raise ConfigError(
            f"rank 0 may open {hard} files",
            expected=f"{needed}, one for each of {environment.world_size} ranks and some more",
            hint="raise the hard limit (ulimit -Hn, or LimitNOFILE of slurmd)",
            scope=Scope.JOB,
        )


def _rank_variable(environment: Environment) -> str:
    return environment.sources["rank"].partition("=")[0] if environment.world_size > 1 else ""


def _launcher(environment: Environment) -> signals.Launcher:
    told = environment.launcher not in ("none", "explicit variables")
    variable = environment.sources["rank"].partition("=")[0] if told else ""
    return signals.find_launcher(variable, slurm=environment.step is not None)
