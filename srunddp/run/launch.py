"""The pipeline: who am I, which interface, where is rank 0, store and process group, the script, its end.

Every step returns a value that the next one takes; the steps do not know each other. :func:`launch` is the
way below a supervisor; ``inside`` goes the same way within a process that something else started.
"""

from __future__ import annotations

import os
import resource
import select
import warnings
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
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
from srunddp.supervisor.failure import FailureRecorder
from srunddp.supervisor.output import redirect
from srunddp.supervisor.stacks import StackDump
from srunddp.supervisor.supervisor import FailureMonitor, RendezvousOutcome, Supervisor
from srunddp.supervisor.worker_process import STOPPED_FOR, WorkerPipe, WorkerProcess, pipe

_SPARE_FILES = 64


def launch(
    prepared: RankSetup,
    script: Script,
    wishes: RunOptions,
    output: redirect.OutputRedirect,
    monitor: NullMonitor,
    told: Callable[[RendezvousInfo], None],
    say: Callable[[str], None] = lambda _: None,
) -> int:
    """Run the script below a supervisor.

    Args:
        prepared: by :func:`srunddp.bootstrap.rendezvous.meet.bind`.
        script: the user's; wishes: how it is to run.
        output: by :func:`srunddp.run.options.open_output`; monitor: by :func:`srunddp.monitor.monitor.open_monitor`.
        told: called in the supervisor when all have met.
        say: takes rank 0's lines while it waits for the others.

    Returns:
        The exit code: in the worker the script's own, in the supervisor the one to leave with.

    Raises:
        SrunddpError: the ranks did not meet.
    """
    ours, theirs = pipe()
    dump, launcher = StackDump(), _launcher(prepared.environment)
    process_tree.become_subreaper()
    supervisor, mask = os.getpid(), signals.block()
    monitor.start_sampler(prepared.interface.name, _rank_variable(prepared.environment), launcher.pid)
    worker = os.fork()
    if worker == 0:
        signals.die_with_parent(supervisor)
        ours.end.close()
        monitor.in_worker()
        bench = WorkerContext(theirs, mask, output, dump, monitor.marks, wishes.fast_exit, wishes.offline)
        if is_worker_exec(os.environ):
            from srunddp.run.worker_exec import become  # most runs need none of it

            become(prepared, script, bench)
        with theirs.end:
            return run_worker(prepared, script, bench)
    # What is open here ends with this process, and not before: so the others see its end.
    warnings.simplefilter("ignore", ResourceWarning)
    theirs.end.close()
    output.start()
    monitor.start()
    if prepared.held:
        prepared.held.store.close()
        raise_open_files_limit()  # in the supervisor alone: the script keeps its own limit
    code = SrunddpError.exit_code
    try:
        code = _supervise(prepared, wishes, told, say, _Worker(worker, ours, output, dump, monitor, launcher))
    except SrunddpError as error:
        code = error.exit_code
        raise
    finally:
        monitor.finish(code)
    return code


@dataclass(frozen=True)
class _Worker:
    """What the supervisor has of its worker."""

    pid: int
    pipe: WorkerPipe
    output: redirect.OutputRedirect
    dump: StackDump
    monitor: NullMonitor
    launcher: signals.Launcher


def _supervise(
    prepared: RankSetup,
    wishes: RunOptions,
    told: Callable[[RendezvousInfo], None],
    say: Callable[[str], None],
    worker: _Worker,
) -> int:
    environment, interrupt, monitor = prepared.environment, CancelToken(), worker.monitor

    report = FailureRecorder(environment.rank, environment.node, worker.dump, worker.output.destination.file)

    def meet_others() -> RendezvousOutcome:
        monitor.mark("meeting")
        company = rendezvous(prepared, lambda _: _told_by_worker(worker.pipe, prepared.options.timeout), say, interrupt)
        monitor.mark("met")
        if environment.rank == 0:
            monitor.describe(run_metadata(prepared, company))
        return RendezvousOutcome(asdict(company.meeting), _guard(prepared, wishes, company, worker, report))

    def stop_sampler() -> None:
        if trouble := monitor.stop_sampler():
            say(trouble)

    return Supervisor(
        report=report,
        # In a world of one nobody waits for a rank that is stopped.
        process=WorkerProcess(worker.pid, STOPPED_FOR if environment.world_size > 1 else None),
        pipe=worker.pipe,
        meet=meet_others,
        interrupt=interrupt.fail,
        told=lambda met: told(RendezvousInfo(**met.message)),
        condemn=monitor.marks.condemn,
        ended=stop_sampler,
        finish=worker.output.finish,
        # Nobody waits for a single process.
        grace=wishes.grace if environment.world_size > 1 else None,
        launcher=worker.launcher,
    ).run()


def _guard(
    prepared: RankSetup, wishes: RunOptions, company: RendezvousResult, worker: _Worker, report: FailureRecorder
) -> FailureMonitor:
    file = worker.output.destination.file
    folder = file.parent if file else None
    if not company.lines:
        from srunddp.supervisor.single_process import SingleProcess

        return SingleProcess(folder)
    from srunddp.supervisor.participant import Participant, RankContext

    post = RankContext(
        rank=prepared.environment.rank,
        node=prepared.environment.node,
        nodes=company.nodes,
        stall_timeout=wishes.stall_timeout,
        step=worker.monitor.marks.read,
        stacks=partial(worker.dump.ask, worker.pid),
        link_is_up=partial(interface.has_carrier, prepared.interface.name),
        folder=folder,
        lost_after=wishes.lost_after,
        asked=report.asked,
    )
    if prepared.environment.rank:
        return Participant(post, company.lines[0])
    from srunddp.supervisor.coordinator import Coordinator as OfAll

    return OfAll(post, company.lines)


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


def check_lines(environment: Environment) -> None:
    """Before the ranks meet: may rank 0 open as many files as the lines of all ranks need?

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
    variable = environment.sources["rank"].partition("=")[0] if environment.has_launcher else ""
    return signals.find_launcher(variable, slurm=environment.step is not None)


def _told_by_worker(worker: WorkerPipe, timeout: float) -> str:
    """In the supervisor: MPI is spoken by the worker, which then says what it was told."""
    if not select.select([worker.end], [], [], timeout)[0]:
        raise RendezvousError(
            f"MPI_Init did not return within {timeout:g} s",
            expected="all ranks to start",
            hint="see whether one did not start or ended before; raise --timeout",
        )
    answer = worker.receive()
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
