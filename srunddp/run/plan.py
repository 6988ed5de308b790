"""What this rank will do. A plan is derived from the command line and the environment, before any
file or socket is opened.
"""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from srunddp.bootstrap.environment.detect import detect
from srunddp.bootstrap.environment.types import Environment
from srunddp.bootstrap.network.ifaces_entry import port_range
from srunddp.bootstrap.rendezvous.rank_setup import Rejoin, RendezvousOptions
from srunddp.errors import Scope, UsageError
from srunddp.monitor.config import MonitorConfig
from srunddp.run.command import RunCommand
from srunddp.run.run_files import requeues, run_name
from srunddp.run.script import Script
from srunddp.supervisor.output.redirect import OutputTarget, output_target
from srunddp.util.atomic_file import plain
from srunddp.util.quick_dataclass import dataclass

if TYPE_CHECKING:
    from srunddp.stage.paths import StagedPaths


class StagedCopies(NamedTuple):
    """The copies that ``--staged`` finds on this node.

    Attributes:
        paths: Tells the path of the copy on this node for each path that was copied.
        folder: The shared path of the working directory, in which the job step was meant to start.
    """

    paths: StagedPaths
    folder: str


@dataclass(frozen=True, kw_only=True, eq=False)
class RunPlan:
    """One rank's part in one start of a run.

    Attributes:
        command: The options of the command line.
        environment: Rank, node and launcher of this process.
        script: The script to run.
        output: Where the script's output goes.
        monitor: Where the files of ``--monitor`` go; None without the option.
        rendezvous: The options of the rendezvous.
        notes: Remarks that rank 0 prints before the rendezvous.
        copies: The copies of ``--staged``; None without the option.
    """

    command: RunCommand
    environment: Environment
    script: Script
    output: OutputTarget
    monitor: MonitorConfig | None
    rendezvous: RendezvousOptions
    notes: tuple[str, ...] = ()
    copies: StagedCopies | None = None


def find_environment(command: RunCommand, rejoin: Rejoin | None) -> Environment:
    """Determine rank, node and launcher of this process.

    Args:
        command: The options of the command line.
        rejoin: What the previous start has handed over; None in the first start.

    Raises:
        UsageError: ``--spare-nodes`` or ``--min-nodes`` is given without ``--restarts``.
        ConfigError: The environment is wrong, or has too few nodes for these options.
    """
    needs_restarts = {"--spare-nodes": command.spare_nodes, "--min-nodes": command.min_nodes}
    given = [option for option, number in needs_restarts.items() if number]
    if given and not command.restarts:
        raise UsageError(
            f"{given[0]} without --restarts",
            expected="both",
            hint="add --restarts=3",
            scope=Scope.JOB,
        )
    environment = detect(os.environ, channel=command.channel)
    if not given:
        return environment
    # Imported here because in most runs the nodes do not change.
    from srunddp.spare_nodes.layout import in_next_start, set_spare_nodes

    environment = set_spare_nodes(environment, command.spare_nodes, command.min_nodes)
    if rejoin and rejoin.spare_nodes:
        return in_next_start(environment, rejoin.spare_nodes)
    return environment


def make_plan(command: RunCommand, environment: Environment, rejoin: Rejoin | None) -> RunPlan:
    """Derive from the command line what this rank will do.

    An error need not be reported to other ranks, because all ranks have the same command line and
    so find the same error.

    Args:
        command: The options of the command line.
        environment: This rank's environment, from :func:`find_environment`.
        rejoin: What the previous start has handed over; None in the first start.

    Raises:
        UsageError: Options contradict each other, or there is no script.
    """
    log_dir = command.log_dir
    show_ranks = command.show_ranks
    if environment.is_returning:  # a task that comes back runs no script, and has no rank yet
        log_dir = None
        show_ranks = None
    output = output_target(
        log_dir,
        command.prefix,
        show_ranks,
        rank=environment.rank,
        # Compare --show-ranks with the ranks of the first start: if a restart with --min-nodes has
        # left out some of them, this is no error of the user.
        world_size=environment.first_world_size or environment.world_size,
        node=environment.node,
        run=run_name(environment),
    )
    ports = port_range(command.port, where="--port") if command.port else None
    if command.script is None:
        raise UsageError(
            "no SCRIPT",
            expected="srunddp [OPTIONS] SCRIPT [ARGUMENTS]...",
            hint="see srunddp run --help",
            scope=Scope.JOB,
        )
    script = Script(command.script, command.arguments, command.module)
    rendezvous = RendezvousOptions(
        backend=command.backend or RendezvousOptions.backend,
        ifaces=command.ifaces,
        timeout=command.timeout,
        ports=ports,
        max_restarts=command.restarts,
        rejoin=rejoin,
    )
    return RunPlan(
        command=command,
        environment=environment,
        script=script,
        output=output,
        monitor=_plan_monitor(command, environment, script, rendezvous.generation),
        rendezvous=rendezvous,
    )


def _plan_monitor(
    command: RunCommand, environment: Environment, script: Script, generation: int
) -> MonitorConfig | None:
    """Return where this rank's ``--monitor`` files go; None without the option, and for a task that
    comes back.

    Each start writes to another folder in the run's folder. The run's folder is in that of
    ``--monitor-dir`` if this option is given, else in that of ``--log-dir``, else in ``logs``.

    Raises:
        UsageError: ``--monitor-dir`` is given without ``--monitor``.
    """
    if environment.is_returning:
        return None
    if command.monitor is None:
        if command.monitor_dir is not None:
            raise UsageError(
                "--monitor-dir without --monitor", hint="add --monitor", scope=Scope.JOB
            )
        return None
    above = Path(command.monitor_dir or command.log_dir or "logs", plain(run_name(environment)))
    start = f"monitor.{requeues()}"
    if generation:
        start = f"{start}.{generation}"
    return MonitorConfig(
        folder=above / start,
        node=plain(environment.node),
        rank=environment.rank,
        samples=environment.local_rank == 0,
        seconds=command.monitor,
        script=script.words,
    )


def in_staged_copies(plan: RunPlan) -> RunPlan:
    """For ``--staged``, return the plan with the paths of this node's copies.

    This process, and every process that it forks, holds the lock of the copies from now on. The
    output paths are left to :func:`output_outside_copies`: it may find an error in them, and
    reporting this error to the other ranks needs the plan's ifaces.conf, which this function sets.

    Raises:
        ConfigError: There are no copies.
    """
    from srunddp.stage.paths import activate, lock, read

    staged = read(os.environ)
    # Lock the copies before this process uses them, because nobody removes locked copies.
    lock(staged.folder)
    folder = activate(staged)
    rendezvous = plan.rendezvous
    if rendezvous.ifaces:
        rendezvous = replace(rendezvous, ifaces=staged.here(rendezvous.ifaces))
    script = plan.script
    if not script.module:
        # The name of a module needs no change: Python finds the module by sys.path, which
        # activate() has changed to the copies.
        script = replace(script, name=staged.here(script.name))
    script = replace(script, arguments=tuple(map(staged.argument, script.arguments)))
    notes = plan.notes
    if staged.note:
        notes = (*notes, staged.note)
    return replace(
        plan,
        rendezvous=rendezvous,
        script=script,
        notes=notes,
        copies=StagedCopies(staged, folder),
    )


def output_outside_copies(plan: RunPlan) -> RunPlan:
    """Return the plan with paths of output and readings that are not in this node's copies.

    Args:
        plan: A plan that :func:`in_staged_copies` has returned. A plan without copies is returned
            unchanged.

    Raises:
        ConfigError: One of the folders is in a copy, which is deleted when the job ends.
    """
    if plan.copies is None:
        return plan
    from srunddp.stage.paths import refuse_inside_copy

    staged = plan.copies.paths
    folder = plan.copies.folder
    output = plan.output
    if output.file:
        output = replace(output, file=refuse_inside_copy(staged, folder, output.file, "--log-dir"))
    monitor = plan.monitor
    if monitor:
        monitor = replace(
            monitor, folder=refuse_inside_copy(staged, folder, monitor.folder, "--monitor-dir")
        )
    return replace(plan, output=output, monitor=monitor)
