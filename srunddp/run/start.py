"""One start of a run on one rank: all that may fail before the rendezvous, then the rendezvous and
the script.
"""

from __future__ import annotations

import os
from dataclasses import replace

import click

from srunddp.bootstrap.environment.rank_process import RANK_PROCESS
from srunddp.bootstrap.environment.types import Environment
from srunddp.bootstrap.process_group.device import idle_gpus
from srunddp.bootstrap.rendezvous.messages import RendezvousInfo
from srunddp.bootstrap.rendezvous.rank_setup import (
    RankSetup,
    RendezvousOptions,
    bind,
    listen_as_deputy,
    listen_for_next_start,
    prepare,
)
from srunddp.errors import ConfigError, Scope, SrunddpError
from srunddp.monitor.monitor import Monitor
from srunddp.run.last_error import leave_before_meeting
from srunddp.run.launch import (
    check_open_files,
    check_own_files,
    check_worker_variable,
    launch,
)
from srunddp.run.plan import RunPlan, in_staged_copies, output_outside_copies
from srunddp.run.read_once import check_readable_again, keep_stdin, position_of_stdin
from srunddp.run.restart import EndedStart, InheritedStart
from srunddp.run.run_files import clear_result
from srunddp.run.script import check
from srunddp.stage.offline import contradictions
from srunddp.supervisor.failure_files import rotate_previous
from srunddp.supervisor.limits import DEFAULT_LIMITS, Limits
from srunddp.supervisor.output.redirect import OutputRedirect
from srunddp.util.cgroup import kills_whole_step
from srunddp.util.console import say, write_stderr
from srunddp.util.option_groups import after_script


def start(plan: RunPlan, inherited: InheritedStart) -> EndedStart:
    """Open what this rank needs, and run the script under a supervisor.

    Args:
        plan: What this rank is to do.
        inherited: What the previous start has handed over.

    Returns:
        In the supervisor, how the run has ended. In the worker this function does not return.

    Raises:
        SrunddpError: The rendezvous failed. An error before the rendezvous is not raised: it ends
            this process here, after the other ranks were told of it.
    """
    # A test may pass shorter limits by main(arguments, obj=Limits(...)), so that it need not wait a
    # minute.
    limits = click.get_current_context().find_object(Limits) or DEFAULT_LIMITS
    environment = plan.environment
    interface = None
    try:
        check_own_files()
        # Check early that the processes of the previous start have ended, because they may still
        # hold memory, also on a GPU.
        inherited.check()
        check_restarts_without_mpi(plan.rendezvous, environment)
        if plan.command.staged:
            plan = in_staged_copies(plan)
            plan = output_outside_copies(plan)
        check_worker_variable(os.environ)
        check(plan.script)
        if plan.command.restarts:
            check_readable_again(plan.script)
            if inherited.stdin is None and not environment.is_single:
                keep_stdin()
                inherited = replace(inherited, stdin=position_of_stdin())
        output, monitor = _open_files(plan, limits)
        setup = _prepare(plan, limits)
        interface = setup.interface
        check_open_files(environment)
        setup = listen_for_next_start(listen_as_deputy(bind(setup)))
    except SrunddpError as error:
        leave_before_meeting(error, environment, plan.rendezvous, interface)
    # Set the affinity mask before the fork, because the worker inherits it.
    if plan.command.bind == "auto":
        _bind_near_gpu(plan)
    if environment.rank == 0:
        _say_notes(plan, setup)

    def on_rendezvous(info: RendezvousInfo) -> None:
        if environment.rank == 0 and not plan.command.quiet:
            say(_summary(setup, info) + _folder_of_files(plan))
        if plan.command.verbose:
            write_stderr(f"[RANK {environment.rank}] WORLD_SIZE={environment.world_size}\n")

    return launch(
        plan,
        setup,
        output,
        monitor,
        inherited,
        on_rendezvous=on_rendezvous,
        say=say,
        limits=limits,
    )


def _prepare(plan: RunPlan, limits: Limits) -> RankSetup:
    """Choose this rank's interface. After a restart that may have moved ranks to other nodes, wait
    for the link on every rank but rank 0, because a node that was cut off may have no link yet.

    Raises:
        ConfigError: ifaces.conf or the interface is wrong.
    """
    options = plan.rendezvous
    rejoin = options.rejoin
    try:
        return prepare(options, plan.environment)
    except ConfigError:
        if rejoin is None or rejoin.spare_nodes is None or plan.environment.rank == 0:
            raise
    # Imported here because in most runs the nodes do not change.
    from srunddp.spare_nodes.returning import wait_for_link

    return wait_for_link(
        lambda: prepare(options, plan.environment), plan.environment.node, limits.returns_within
    )


def check_restarts_without_mpi(options: RendezvousOptions, environment: Environment) -> None:
    """Reject ``--restarts`` if the ranks find rank 0 over MPI, because a process cannot start MPI
    twice.

    Raises:
        ConfigError: Restarts are allowed and rank 0 is to be found over MPI.
    """
    if not options.max_restarts or environment.world_size == 1:
        return
    if environment.discovery.starts_mpi:
        raise ConfigError(
            "--restarts over MPI",
            expected="a way to rank 0 without MPI",
            hint="start with srun --mpi=pmi2, or add --channel=slurm or env",
            scope=Scope.JOB,
        )


def _open_files(plan: RunPlan, limits: Limits) -> tuple[OutputRedirect, Monitor]:
    """Open the files of this rank's output and readings. On rank 0, also empty the ``--result``
    file and rename the failure files of an earlier run.

    Call this before any socket is opened: if standard output is closed, a socket could get
    descriptor 1, and the script's output would go to this socket.

    Raises:
        ConfigError: One of the files cannot be written.
    """
    is_rank_zero = plan.environment.rank == 0
    is_first_start = plan.rendezvous.generation == 0
    # Do this only in the first start: a restart belongs to the same run, so there is no result of
    # an earlier run any more.
    if plan.command.result and is_rank_zero and is_first_start:
        clear_result(plan.command.result)
    if plan.output.file and is_rank_zero:
        rotate_previous(plan.output.file.parent)
    return OutputRedirect.open(plan.output, limits), Monitor(plan.monitor)


def _bind_near_gpu(plan: RunPlan) -> None:
    # Imported here because the module needs NVML, which is not used without --bind=auto.
    from srunddp.bootstrap.process_group.numa import bind_near_gpu

    environment = plan.environment
    binding = bind_near_gpu(environment, os.environ)
    if plan.command.verbose or environment.rank == 0:
        say(f"rank {environment.rank}: --bind=auto: {binding.value}: {binding.why}")


def _say_notes(plan: RunPlan, setup: RankSetup) -> None:
    """Print remarks on the run that are not errors. Called on rank 0."""
    notes = [*setup.environment.notes, *_note_on_exported(setup), *plan.notes]
    notes += _note_on_gpus(setup)
    if plan.command.offline:
        notes += contradictions(os.environ)
    if plan.command.restarts and kills_whole_step(os.environ):
        notes.append(
            "--restarts does not help when memory runs out, as OOMKillStep is on: srun"
            " --oom-kill-step=0"
        )
    notes += after_script(click.get_current_context(), plan.command.arguments)
    for note in notes:
        say(note)


def _note_on_gpus(setup: RankSetup) -> list[str]:
    """Return a note if GPUs of this node stay idle, else an empty list. There is no note after a
    restart, which would repeat it.
    """
    # In a run that a rank of another run has started, the idle GPUs may be used by that rank.
    if setup.options.generation or RANK_PROCESS in os.environ:
        return []
    note = idle_gpus(setup.environment, os.environ)
    return [note] if note else []


def _note_on_exported(setup: RankSetup) -> list[str]:
    """Return a note if exported variables override ifaces.conf on every node, else an empty
    list.
    """
    chosen = setup.interface
    if not chosen.kept or setup.environment.world_size == 1:
        return []
    kept = " and ".join(f"{name}={chosen.exports[name]}" for name in chosen.kept)
    return [f"{kept} exported, which overrides ifaces.conf on every node"]


def _folder_of_files(plan: RunPlan) -> str:
    """Return the end of the summary line, which says where the run's files are; empty if it writes
    none. Users are told because under mpirun they could not guess the folder's name.
    """
    if plan.output.file:
        return f", logs in {plan.output.file.parent}"
    if plan.monitor:
        return f", readings in {plan.monitor.folder.parent}"
    return ""


def _summary(setup: RankSetup, info: RendezvousInfo) -> str:
    """Return the summary line that rank 0 prints after the rendezvous: how many ranks and nodes
    there are, and which launcher, channel, address, interface and backend are used.
    """
    environment = setup.environment
    if environment.world_size == 1:
        ranks = "1 rank"
    else:
        ranks = f"{environment.world_size} ranks"
    if info.nnodes == 1:
        nodes = "1 node"
    else:
        nodes = f"{info.nnodes} nodes"
    return (
        f"{ranks} on {nodes}, launcher {environment.launcher}, channel {info.channel}, "
        f"master {info.master_addr} port {info.master_port}, interface {setup.interface.name} "
        f"({setup.interface.source}), backend {setup.options.backend}"
    )
