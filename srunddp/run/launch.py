"""Turn this process into a supervisor: fork the worker, which becomes the script, and supervise it.

The order of the steps in :func:`launch` matters; swapping two of them breaks something:

1. **Find the launcher**, which the sampler of step 3 has to know. **Become a subreaper**: the
   kernel then hands orphaned descendants to this process. If that came after the fork, an orphan
   could go to init in between, and would hold its GPU after the run.
2. **Block signals**, so that they wait until the supervisor reads them. If that came after the
   fork, a signal in between would end only the supervisor, and the worker would go on unwatched.
   The previous mask is kept for the script.
3. **Note the children** that a wrapper has started, before the first fork of the first start: all
   later ones are the worker's or our own. **Fork the sentinel** before the worker: signals that it
   gets before the worker exists are among the pending signals of step 6. **Fork the sampler**, if
   this rank samples its node, and the process that **watches its GPUs**. Signals are already
   blocked, because Slurm sends them to every process of a step, and there are no threads yet (see
   step 7). The worker, forked later, inherits the supervisor's ends of the sockets to these
   processes and closes them, because each process stops when its socket is closed. **Export the
   folder of the samples**, which the script inherits with the environment.
4. **Freeze the objects of the garbage collector**: it does not write to them any more, so the two
   processes go on sharing their memory pages. That only helps before the fork.
5. **Fork the worker.** Each process now has all descriptors and closes those of the other. If an
   end of their pipe stayed open on the wrong side, the death of the other side would go unnoticed.
   The pipe itself may be created at any time before. **Fork the process that notes the GPUs'
   figures**, if none watches them: the worker need not wait for it, and there are still no threads.
6. **Note pending signals** without taking them. They came before the worker existed, and a forked
   process inherits none, so the supervisor has to pass them on. If this came later, signals that
   the launcher has sent to both processes would be passed on as well.
7. **Start threads** for output and samples. Before the fork, a thread could hold a lock of malloc
   or Python that nobody would release in the child.
8. **Close rank 0's copy of the store's socket** in the supervisor. While it is open, a connection
   to the store of a worker that has gone would wait instead of being refused. **Raise the limit of
   open files** for the connections of all ranks; before the fork the script would inherit it.
9. **Import the supervisor's modules** while the worker, which needs none of them, goes on.
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
from srunddp.bootstrap.rendezvous.messages import RendezvousInfo
from srunddp.bootstrap.rendezvous.rank_setup import RankSetup
from srunddp.errors import ConfigError, Scope, SrunddpError
from srunddp.monitor.monitor import Monitor
from srunddp.run.plan import RunPlan
from srunddp.run.restart import EndedStart, InheritedStart
from srunddp.run.run_files import write_result
from srunddp.run.worker import WorkerContext, run_worker
from srunddp.supervisor import signals
from srunddp.supervisor.descendants import Descendants, Earlier
from srunddp.supervisor.launcher import Launcher, find_launcher
from srunddp.supervisor.limits import DEFAULT_LIMITS, Limits
from srunddp.supervisor.output.redirect import OutputRedirect
from srunddp.supervisor.sentinel import Sentinel
from srunddp.supervisor.stacks import StackDump
from srunddp.supervisor.worker_process import WorkerPipe, pipe
from srunddp.util.console import say_amid_output
from srunddp.util.cuda_visible import may_have_gpus
from srunddp.util.kernel_file import raise_open_files_limit

if TYPE_CHECKING:
    from srunddp.supervisor.gpu_watch import NodeGpus

_OWN_FILES = 32  # descriptors that srunddp itself needs in the supervisor or worker of any rank
_OTHER_FILES = 64  # file descriptors that are not rank connections: output, pipes, sockets, samples


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
) -> EndedStart:
    """Fork the worker, which becomes the script and never returns from here, and supervise it.

    Args:
        plan: What this rank will do.
        setup: This rank's interface and sockets.
        output: Where the script's output goes; already open.
        monitor: Records the samples; its files are already open.
        inherited: What the previous start has handed over. For a restart, this process becomes the
            next start.
        on_rendezvous: Called after the rendezvous, with rank 0's answer.
        say: Prints a line for the user while rank 0 waits for the others.
        limits: The supervisor's time limits.

    Returns:
        In the supervisor, how the last start of the run has ended. If a restart follows, this
        function does not return, because the process becomes the next start.

    Raises:
        SrunddpError: The rendezvous failed.
    """
    # The module's docstring explains the numbered steps.
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
    earlier = inherited.earlier or Earlier.note()  # 3
    sentinel = Sentinel.start()
    own = {sentinel.pid, *_start_sampler(monitor, setup, launcher)}
    gpus = _watch_gpus(monitor, setup, own, limits)
    monitor.export()  # the folder of the samples
    gc.freeze()  # 4
    worker = fork_worker(context, ours, monitor, sentinel, gpus)  # 5
    if gpus is None:
        gpus = _note_gpus(setup, own, limits)
    earlier = earlier.with_first_fork((*own, worker))
    early = {number for number in signal.sigpending() if number in signals.FORWARDED}  # 6
    # The sockets stay open until this process ends, so that other processes notice its end. Python
    # must not warn about that.
    warnings.simplefilter("ignore", ResourceWarning)
    output.start()  # 7
    monitor.start()
    _prepare_rank_zero(setup)  # 8
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
        sentinel=sentinel,
        descendants=Descendants(earlier, own, limits),
        stalls=inherited.stalls,
        checkpointed=inherited.checkpointed,
        gpus=gpus,
    )
    ended = EndedStart(exit_code=SrunddpError.exit_code)  # for an unexpected exception
    try:
        ended = agent.supervise(launcher)
    except SrunddpError as error:
        ended = EndedStart(exit_code=error.exit_code)
        raise
    finally:
        monitor.finish(ended.exit_code)
        agent.finish_metrics(goes_on=ended.rejoin is not None)
        is_over = ended.rejoin is None or ended.is_cut_off
        if setup.environment.rank == 0 and is_over and not ended.is_fenced:
            _conclude(plan, setup, inherited, ended)
    if ended.rejoin:
        inherited.execute_next(ended, ended.rejoin, context.mask, earlier)
    return ended


def _find_launcher(environment: Environment) -> Launcher:
    if environment.launcher in (NO_LAUNCHER, USER.name):
        # No launcher has set the rank variables, so they do not show which parent process is the
        # launcher.
        rank_variable = ""
    else:
        rank_variable = environment.rank_variable
    return find_launcher(rank_variable, slurm=environment.step is not None)


def _start_sampler(monitor: Monitor, setup: RankSetup, launcher: Launcher) -> set[int]:
    """Start this node's sampler if this rank is the one that samples the node. Return the sampler's
    pid in a set; an empty set if none was started.
    """
    if setup.environment.world_size > 1:
        rank_variable = setup.environment.rank_variable
    else:
        rank_variable = ""
    sampler = monitor.start_sampler(setup.interface.name, rank_variable, launcher.pid)
    return set() if sampler is None else {sampler}


def _watch_gpus(
    monitor: Monitor, setup: RankSetup, own: set[int], limits: Limits
) -> NodeGpus | None:
    """Start the process that watches this node's GPUs, if this rank is to have it.

    Args:
        monitor: Says whether faults of GPUs are recorded.
        setup: Says which rank of its node this is, and whether restarts are allowed.
        own: The pids of the supervisor's own children; the pid of the new process is added.
        limits: How long an answer may take.

    Returns:
        The supervisor's side of the watch; None if no process was started.
    """
    record = monitor.gpu_faults
    is_asked_for = record is not None or setup.options.max_restarts > 0
    if not is_asked_for or not _asks_for_gpus(setup):
        return None
    # Only one rank of a node needs the module, and none without GPUs.
    from srunddp.supervisor.gpu_watch import NodeGpus

    gpus = NodeGpus(own=own, limits=limits)
    gpus.watch(record)
    return gpus


def _note_gpus(setup: RankSetup, own: set[int], limits: Limits) -> NodeGpus | None:
    """Start the process that notes the figures of this node's GPUs, if this rank is to have it.

    Args:
        setup: This rank.
        own: The pids of the supervisor's own children; the pid of the new process is added.
        limits: How long an answer may take.

    Returns:
        The supervisor's side, which knows the figures at a failure; None if no process was started.
    """
    if not _asks_for_gpus(setup):
        return None
    from srunddp.supervisor.gpu_watch import NodeGpus

    gpus = NodeGpus(own=own, limits=limits)
    gpus.note_start()
    return gpus


def _asks_for_gpus(setup: RankSetup) -> bool:
    """Tell whether this rank asks about its node's GPUs before there is a failure."""
    environment = setup.environment
    is_first = environment.local_rank == 0 and not environment.is_spare
    return is_first and may_have_gpus(os.environ)


def _prepare_rank_zero(setup: RankSetup) -> None:
    """On rank 0, close the store's socket in the supervisor and raise its limit of open files."""
    if setup.held:
        setup.held.store.close()
        raise_open_files_limit()


def _conclude(
    plan: RunPlan,
    setup: RankSetup,
    inherited: InheritedStart,
    ended: EndedStart,
) -> None:
    """On rank 0, when the run is over, write the ``--result`` file. If the run was restarted or has
    lost nodes, also print a line with its exit code and the number of restarts.
    """
    restarts = setup.options.generation
    if restarts or ended.has_lost_nodes:
        plural = "" if restarts == 1 else "s"
        line = f"ended with {ended.exit_code} after {restarts} restart{plural}"
        hit_limit = setup.environment.step and inherited.history.out_of_memory
        if hit_limit and ended.exit_code == 0:
            line += "; srun's own exit code differs, as Slurm's memory limit was hit"
        if ended.has_lost_nodes:
            line += (
                "; srun may wait until Slurm has marked the lost node down, and since Slurm 23.02"
                " its own exit code is then 1"
            )
        say_amid_output(line)
    if plan.command.result:
        # Ignore an error here: rank 0 checked at the start of the run that the file can be written,
        # and an error now must not change the exit code.
        with suppress(ConfigError):
            write_result(plan.command.result, exit_code=ended.exit_code, restarts=restarts)


def fork_worker(
    context: WorkerContext,
    ours: WorkerPipe,
    monitor: Monitor,
    sentinel: Sentinel,
    gpus: NodeGpus | None = None,
) -> int:
    """Fork the worker and return its pid to the supervisor.

    In the worker this function does not return: it raises SystemExit with the script's exit code,
    or the process becomes another program.

    Args:
        context: What the supervisor has prepared for the worker.
        ours: The supervisor's end of the pipe, which the worker closes.
        monitor: This rank's monitor; the worker closes those of its files that it does not need.
        sentinel: The sentinel, whose socket the worker closes.
        gpus: The watch over the GPUs, whose socket the worker closes; None if there is none.
    """
    supervisor = os.getpid()
    if worker := os.fork():
        # Close the worker's end here: while it is open in the supervisor, reading the pipe does not
        # show that the worker has gone.
        context.supervisor.end.close()
        return worker
    # Ask the kernel first of all to kill the worker when the supervisor is killed.
    signals.die_with_parent(supervisor)
    ours.end.close()
    sentinel.close()
    monitor.in_worker()
    if gpus:
        gpus.in_worker()
    if is_worker_exec(os.environ):
        from srunddp.run.worker_exec import become

        become(context)
    try:
        # Do not use os._exit(): only Python's normal exit runs the script's exit handlers, waits
        # for its threads and flushes its files.
        sys.exit(run_worker(context))
    finally:
        context.supervisor.close()


def is_worker_exec(environ: Mapping[str, str]) -> bool:
    """Tell whether ``SRUNDDP_WORKER=exec`` asks for a worker that is executed as a new program."""
    return environ.get("SRUNDDP_WORKER") == "exec"


def check_worker_variable(environ: Mapping[str, str]) -> None:
    """Reject an unknown value of ``SRUNDDP_WORKER``.

    Raises:
        ConfigError: The value is neither ``fork`` nor ``exec``.
    """
    value = environ.get("SRUNDDP_WORKER")
    if value and value not in ("fork", "exec"):
        raise ConfigError(
            f"SRUNDDP_WORKER={value}",
            expected="fork or exec",
            hint="export SRUNDDP_WORKER=exec for a profiler, else unset it",
            scope=Scope.JOB,
        )


def check_own_files() -> None:
    """Check, before this process opens anything, that the limit of open files is enough for the
    files that srunddp itself opens in any rank.

    Raises:
        ConfigError: The limit is too low.
    """
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < _OWN_FILES:
        raise ConfigError(
            f"a limit of {soft} open files",
            expected=f"at least {_OWN_FILES}",
            hint="raise it (ulimit -n)",
            scope=Scope.NODE,
        )


def check_open_files(environment: Environment) -> None:
    """On rank 0, check before the rendezvous that one connection per rank fits the limit of open
    files.

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
