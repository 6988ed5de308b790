"""The pipeline under a supervisor: fork the worker, which becomes the script, and supervise it to
its end.

The order of :func:`launch` is its design; if two steps are exchanged, something breaks:

1. **The launcher is found**, of which the sampler is told in step 3. **This process becomes a
   subreaper**: orphans of its descendants are handed to it. If it did so after the fork, an orphan
   could be handed to init in between, and would hold its GPU after the run.
2. **Signals are blocked**: from now on they wait until the supervisor reads them. After the fork,
   one that came in between would end the supervisor alone, and the worker would go on unwatched.
   The mask from before is kept for the script.
3. **The sampler is forked**, where this rank has its node's. The signals are blocked by then, which
   Slurm sends to every process of a step; and there are no threads yet, see step 7. The worker,
   which is forked later, inherits the supervisor's end of the sampler's socket and closes it: that
   end is the sampler's sign to stop. **The folder of the samples is exported**, which the script
   gets by the fork.
4. **The garbage collector's objects are frozen**: it does not write to them any more, and the two
   processes go on sharing their pages. That is worth something before the fork alone.
5. **The worker is forked.** Each process has all descriptors now, and closes what is the other's:
   an end of their pipe that stays open on the wrong side hides that the right side has gone. The
   pipe itself may be made at any time before.
6. **Signals that wait already are noted**, without taking them. They came before the worker was
   there, and a fork inherits none, so that the supervisor has to pass them on. The later this is,
   the more of those that the launcher has sent to both would be passed on as well.
7. **Threads are started**, for output and samples. Before a fork, one of them could hold a lock of
   malloc's or Python's, which nobody would release in the child.
8. **Rank 0's supervisor closes its copy of the store's socket**: with it open, who connects to the
   store of a worker that has gone would wait instead of being refused. **It raises its limit of
   open files** for the connections of all ranks; before the fork the script would inherit that.
9. **The supervisor's modules are imported**, while the worker goes on: it needs none of them.
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

from srunddp.bootstrap.environment.detect import USER
from srunddp.bootstrap.environment.types import NO_LAUNCHER, Environment
from srunddp.bootstrap.rendezvous.messages import RendezvousInfo
from srunddp.bootstrap.rendezvous.rank_setup import RankSetup
from srunddp.errors import ConfigError, Scope, SrunddpError
from srunddp.monitor.monitor import Monitor
from srunddp.run.plan import RunPlan
from srunddp.run.restart import EndedStart, InheritedStart
from srunddp.run.run_files import write_result
from srunddp.run.worker import WorkerContext, run_worker
from srunddp.supervisor import signals
from srunddp.supervisor.limits import DEFAULT_LIMITS, Limits
from srunddp.supervisor.output.redirect import OutputRedirect
from srunddp.supervisor.signals import Launcher
from srunddp.supervisor.stacks import StackDump
from srunddp.supervisor.worker_process import WorkerPipe, pipe
from srunddp.util.kernel_file import raise_open_files_limit

_OTHER_FILES = 64  # besides the connections: output, pipes, sockets, samples


def launch(
    plan: RunPlan,
    setup: RankSetup,
    output: OutputRedirect,
    monitor: Monitor,
    inherited: InheritedStart,
    *,
    on_rendezvous: Callable[[RendezvousInfo], None],
    say: Callable[[str], None] = lambda _: None,
    limits: Limits = DEFAULT_LIMITS,
) -> int:
    """Fork the worker, which becomes the script and never returns from here, and supervise it.

    Args:
        plan: what this rank is to do.
        setup: this rank's interface and sockets.
        output: where the script's output goes, open.
        monitor: for the samples, with open files.
        inherited: what the start before has handed over; after a failure this process may become
            the next one.
        on_rendezvous: called after the rendezvous.
        say: takes rank 0's lines while it waits for the others.
        limits: the supervisor's times.

    Returns:
        The exit code to leave with, in the supervisor.

    Raises:
        SrunddpError: the ranks did not meet.
    """
    # The numbers are those of the module's docstring.
    ours, theirs = pipe()
    launcher = _find_launcher(setup.environment)  # 1
    signals.become_subreaper()
    mask_before = signals.block()  # 2
    context = WorkerContext(
        setup=setup,
        script=plan.script,
        command=plan.command,
        supervisor=theirs,
        mask=mask_before if inherited.mask is None else {*map(signal.Signals, inherited.mask)},
        output=output,
        dump=StackDump(limits=limits),
        page=monitor.page,
    )
    _start_sampler(monitor, setup, launcher)  # 3
    monitor.export()  # the folder of the samples
    gc.freeze()  # 4
    worker = fork_worker(context, ours, monitor)  # 5
    early = {number for number in signal.sigpending() if number in signals.FORWARDED}  # 6
    # What is open here ends with this process, and not before: so the others see its end.
    warnings.simplefilter("ignore", ResourceWarning)
    output.start()  # 7
    monitor.start()
    _give_back_what_is_the_workers(setup)  # 8
    from srunddp.run.supervise import Agent  # 9

    agent = Agent(
        context=context,
        worker=worker,
        pipe=ours,
        monitor=monitor,
        report_rendezvous=on_rendezvous,
        say=say,
        limits=limits,
        history=inherited.history,
        early=early,
    )
    ended = EndedStart(exit_code=SrunddpError.exit_code)  # unless the supervisor says otherwise
    try:
        ended = agent.supervise(launcher)
    except SrunddpError as error:
        ended = EndedStart(exit_code=error.exit_code)
        raise
    finally:
        monitor.finish(ended.exit_code)
        if setup.environment.rank == 0 and not ended.rejoin and not ended.is_fenced:
            _conclude(plan, setup, inherited, ended, say)
    if ended.rejoin:
        inherited.execute_next(ended, ended.rejoin, context.mask)
    return ended.exit_code


def _find_launcher(environment: Environment) -> Launcher:
    if environment.launcher in (NO_LAUNCHER, USER.name):
        # Variables that nobody's process sets tell nothing about the parents.
        rank_variable = ""
    else:
        rank_variable = environment.rank_variable
    return signals.find_launcher(rank_variable, slurm=environment.step is not None)


def _start_sampler(monitor: Monitor, setup: RankSetup, launcher: Launcher) -> None:
    if setup.environment.world_size > 1:
        rank_variable = setup.environment.rank_variable
    else:
        rank_variable = ""
    monitor.start_sampler(setup.interface.name, rank_variable, launcher.pid)


def _give_back_what_is_the_workers(setup: RankSetup) -> None:
    """On rank 0's supervisor: close the store's socket, and make room for the connections."""
    if setup.held:
        setup.held.store.close()
        raise_open_files_limit()


def _conclude(
    plan: RunPlan,
    setup: RankSetup,
    inherited: InheritedStart,
    ended: EndedStart,
    say: Callable[[str], None],
) -> None:
    """On rank 0, when the run is over: say what its restarts have come to, and write the result."""
    restarts = setup.options.generation
    if restarts or ended.has_lost_nodes:
        plural = "" if restarts == 1 else "s"
        line = f"ended with {ended.exit_code} after {restarts} restart{plural}"
        hit_limit = setup.environment.step and inherited.history.out_of_memory
        if hit_limit and ended.exit_code == 0:
            line += "; srun's own exit code is another, as Slurm's memory limit was hit"
        if ended.has_lost_nodes:
            line += "; srun may wait until Slurm has set the lost node down"
        say(line)
    if plan.command.result:
        with suppress(ConfigError):  # it could be written when the run began
            write_result(plan.command.result, exit_code=ended.exit_code, restarts=restarts)


def fork_worker(context: WorkerContext, ours: WorkerPipe, monitor: Monitor) -> int:
    """Fork the worker, and return its process id.

    The worker does not return from here: it ends as a script does, with the script's exit code.

    Args:
        context: the worker's.
        ours: the supervisor's end of the pipe between the two, which the worker closes.
        monitor: of this rank; the worker keeps the files that are its own.
    """
    supervisor = os.getpid()
    if worker := os.fork():
        # With the worker's end of the pipe open here as well, this process would not notice that
        # the worker has gone.
        context.supervisor.end.close()
        return worker
    # First: a supervisor that is killed from here on takes this process with it.
    signals.die_with_parent(supervisor)
    ours.end.close()
    monitor.in_worker()
    if is_worker_exec(os.environ):
        from srunddp.run.worker_exec import become

        become(context)
    with context.supervisor.end:
        # Not os._exit: exit handlers, threads and open files are the script's.
        sys.exit(run_worker(context))


def is_worker_exec(environ: Mapping[str, str]) -> bool:
    """Tell whether the worker is to be a program of its own, see :mod:`srunddp.run.worker_exec`."""
    return environ.get("SRUNDDP_WORKER") == "exec"


def check_worker_variable(environ: Mapping[str, str]) -> None:
    """Refuse what ``SRUNDDP_WORKER`` does not mean.

    Raises:
        ConfigError: it is neither ``fork`` nor ``exec``.
    """
    value = environ.get("SRUNDDP_WORKER")
    if value and value not in ("fork", "exec"):
        raise ConfigError(
            f"SRUNDDP_WORKER={value}",
            expected="fork or exec",
            hint="export SRUNDDP_WORKER=exec for a profiler, else unset it",
            scope=Scope.JOB,
        )


def check_open_files(environment: Environment) -> None:
    """Refuse, before the ranks meet, a limit of open files that rank 0's connections exceed.

    Raises:
        ConfigError: The hard limit is too low.
    """
    needed = environment.world_size + environment.spares + _OTHER_FILES
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    low = hard != resource.RLIM_INFINITY and hard < needed
    if environment.rank == 0 and environment.world_size > 1 and low:
        raise ConfigError(
            f"rank 0 may open {hard} files",
            expected=f"{needed}, one for each of {environment.world_size} ranks and some more",
            hint="raise the hard limit (ulimit -Hn, or LimitNOFILE of slurmd)",
            scope=Scope.JOB,
        )
