"""The pipeline under a supervisor: fork the worker, which becomes the script, and supervise it to
its end.
"""

from __future__ import annotations

import gc
import os
import resource
import signal
import sys
import warnings
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING

from srunddp.bootstrap.environment.detect import USER
from srunddp.bootstrap.environment.types import NO_LAUNCHER, Environment
from srunddp.bootstrap.rendezvous.meet import RankSetup
from srunddp.bootstrap.rendezvous.messages import RendezvousInfo
from srunddp.errors import ConfigError, Scope, SrunddpError
from srunddp.monitor.monitor import Monitor
from srunddp.run.options import RunOptions, write_result
from srunddp.run.restart import Start
from srunddp.run.script import Script
from srunddp.run.worker import WorkerContext, run_worker
from srunddp.supervisor import signals
from srunddp.supervisor.limits import DEFAULT_LIMITS, Limits
from srunddp.supervisor.output.redirect import OutputRedirect
from srunddp.supervisor.stacks import StackDump
from srunddp.supervisor.worker_process import WorkerPipe, pipe
from srunddp.util.kernel_file import raise_open_files_limit

if TYPE_CHECKING:
    from srunddp.run.supervise import Agent

_SPARE_FILES = 64


def launch(
    setup: RankSetup,
    script: Script,
    options: RunOptions,
    output: OutputRedirect,
    monitor: Monitor,
    start: Start,
    *,
    on_rendezvous: Callable[[RendezvousInfo], None],
    say: Callable[[str], None] = lambda _: None,
    limits: Limits = DEFAULT_LIMITS,
) -> int:
    """Run the script under a supervisor. It returns in the supervisor alone, see
    :func:`fork_worker`.

    Args:
        setup, script, options, output: as for :class:`srunddp.run.worker.WorkerContext`; monitor:
            its files are open.
        start: of the run; after a failure the process may become the next one.
        on_rendezvous: called after the rendezvous; say: takes rank 0's lines while it waits for the
            others.
        limits: the supervisor's times.

    Returns:
        The exit code to leave with.

    Raises:
        SrunddpError: the ranks did not meet.
    """
    ours, theirs = pipe()
    environment = setup.environment
    if environment.launcher in (NO_LAUNCHER, USER.name):
        rank_variable = ""
    else:
        rank_variable = environment.rank_variable
    launcher = signals.find_launcher(rank_variable, slurm=environment.step is not None)
    signals.become_subreaper()
    mask = signals.block()
    context = WorkerContext(
        setup=setup,
        script=script,
        options=options,
        supervisor=theirs,
        mask=mask if start.mask is None else {*map(signal.Signals, start.mask)},
        output=output,
        dump=StackDump(limits=limits),
        page=monitor.page,
    )
    if environment.world_size > 1:
        variable = environment.rank_variable
    else:
        variable = ""
    monitor.start_sampler(setup.interface.name, variable, launcher.pid)
    monitor.export()
    gc.freeze()  # what both processes share stays shared
    worker = fork_worker(context, ours, monitor)
    early = {number for number in signal.sigpending() if number in signals.FORWARDED}
    # What is open here ends with this process, and not before: so the others see its end.
    warnings.simplefilter("ignore", ResourceWarning)
    output.start()
    monitor.start()
    if setup.held:
        setup.held.store.close()
        raise_open_files_limit()  # in the supervisor alone: the script keeps its own limit
    from srunddp.run.supervise import Agent  # the worker goes on meanwhile, and needs none of it

    agent = Agent(
        context=context,
        worker=worker,
        pipe=ours,
        monitor=monitor,
        report_rendezvous=on_rendezvous,
        say=say,
        limits=limits,
        history=start.history,
        early=early,
    )
    code = SrunddpError.exit_code
    try:
        code = agent.supervise(launcher)
    except SrunddpError as error:
        code = error.exit_code
        raise
    finally:
        monitor.finish(code)
        if environment.rank == 0 and not agent.rejoin and not agent.fenced:
            _conclude(code, agent, start, setup, options.result, say)
    if agent.rejoin:
        start.execute_next(agent, context.mask)
    return code


def _conclude(
    code: int,
    agent: Agent,
    start: Start,
    setup: RankSetup,
    result: str | None,
    say: Callable[[str], None],
) -> None:
    """On rank 0, when the run is over."""
    count = setup.options.generation
    if count or agent.has_lost_nodes:
        memory = setup.environment.step and start.history.out_of_memory and code == 0
        if memory:
            note = "; srun's own exit code is another, as Slurm's memory limit was hit"
        else:
            note = ""
        if agent.has_lost_nodes:
            note += "; srun may wait until Slurm has set the lost node down"
        say(f"ended with {code} after {count} restart{'s' if count != 1 else ''}{note}")
    if result:
        with suppress(ConfigError):  # it could be written when the run began
            write_result(result, exit_code=code, restarts=count)


def fork_worker(context: WorkerContext, ours: WorkerPipe, monitor: Monitor) -> int:
    """Fork the worker, and return its process id.

    The worker does not return from here: it ends as a script does, with the script's exit code.

    Args:
        context: The worker's.
        ours: The supervisor's end of the pipe between the two, which the worker closes.
        monitor: Of this rank; the worker keeps the files that are its own.
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
        # Not os._exit: exit handlers, threads and open files are the script's.
        sys.exit(run_worker(context))


def is_worker_exec(environ: Mapping[str, str]) -> bool:
    """Whether the worker is to be a program of its own, see :mod:`srunddp.run.worker_exec`.

    Raises:
        ConfigError: ``SRUNDDP_WORKER`` says something else.
    """
    value = environ.get("SRUNDDP_WORKER") or "fork"
    if value not in ("fork", "exec"):
        raise ConfigError(
            f"SRUNDDP_WORKER={value}",
            expected="fork or exec",
            hint="export SRUNDDP_WORKER=exec for a profiler, else unset it",
            scope=Scope.JOB,
        )
    return value == "exec"


def check_open_files(environment: Environment) -> None:
    """Before the ranks meet: may rank 0 open as many files as the connections of all ranks need?

    Raises:
        ConfigError: the hard limit is too low.
    """
    needed = environment.world_size + environment.spares + _SPARE_FILES
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    low = hard != resource.RLIM_INFINITY and hard < needed
    if environment.rank == 0 and environment.world_size > 1 and low:
        raise ConfigError(
            f"rank 0 may open {hard} files",
            expected=f"{needed}, one for each of {environment.world_size} ranks and some more",
            hint="raise the hard limit (ulimit -Hn, or LimitNOFILE of slurmd)",
            scope=Scope.JOB,
        )
