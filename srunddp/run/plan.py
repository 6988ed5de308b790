"""What this rank is going to do: worked out from the command line and the environment, before
anything is opened.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
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

if TYPE_CHECKING:
    from srunddp.stage.paths import StagedPaths


class StagedCopies(NamedTuple):
    """The copies that ``--staged`` has found on this node.

    Attributes:
        paths: what was copied, and where to.
        folder: the working directory that the step was to have.
    """

    paths: StagedPaths
    folder: str


@dataclass(frozen=True, kw_only=True, eq=False)
class RunPlan:
    """One rank's part in a run, or in one start of it.

    Attributes:
        command: what the command line says.
        environment: who this rank is.
        script: what it runs.
        output: where the script's output goes.
        monitor: where the files of ``--monitor`` go; None without it.
        rendezvous: how the ranks meet.
        notes: lines that rank 0 is to say.
        copies: of ``--staged``; None without it.
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
    """Find out who this rank is.

    Args:
        command: what the command line says.
        rejoin: what the start before has handed over; None in the first.

    Raises:
        ConfigError: the environment is wrong, or has no spare nodes as asked for.
    """
    if command.spare_nodes and not command.restarts:
        raise UsageError(
            "--spare-nodes without --restarts",
            expected="both",
            hint="add --restarts=3",
            scope=Scope.JOB,
        )
    environment = detect(os.environ, channel=command.channel)
    if command.spare_nodes:
        # Most runs have no spare nodes, and import nothing of them.
        from srunddp.spare_nodes.layout import set_spare_nodes

        environment = set_spare_nodes(environment, command.spare_nodes)
    if rejoin and rejoin.spare_nodes:
        return replace(environment, rank=rejoin.spare_nodes.rank)
    return environment


def make_plan(command: RunCommand, environment: Environment, rejoin: Rejoin | None) -> RunPlan:
    """Work out what the command line means for this rank.

    Nobody has to be told of an error here: the command line is that of all ranks.

    Args:
        command: what the command line says.
        environment: of this rank, by :func:`find_environment`.
        rejoin: what the start before has handed over; None in the first.

    Raises:
        UsageError: options contradict each other, or there is no script.
    """
    output = output_target(
        command.log_dir,
        command.prefix,
        command.show_ranks,
        rank=environment.rank,
        world_size=environment.world_size,
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
    """Where this rank's files of ``--monitor`` go; None without it.

    Their folder is below that of the logs unless ``--monitor-dir`` names another; each start and
    generation has one.

    Raises:
        UsageError: ``--monitor-dir`` has no ``--monitor``.
    """
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
    """Return the plan as it is where this node has copies, with ``--staged``.

    From now on this process holds the copies' lock, and so does all that it forks. Where output
    goes is left to :func:`output_outside_copies`: that may be an error, of which the other ranks
    are told by what this plan says of ifaces.conf.

    Raises:
        ConfigError: there are no copies.
    """
    from srunddp.stage.paths import activate, lock, read

    staged = read(os.environ)
    # Before this process works in the copies: from here on nobody removes them.
    lock(staged.folder)
    folder = activate(staged)
    rendezvous = plan.rendezvous
    if rendezvous.ifaces:
        rendezvous = replace(rendezvous, ifaces=staged.here(rendezvous.ifaces))
    script = plan.script
    if not script.module:
        # A module is found by sys.path, which leads to the copies already.
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
    """Return the plan with the folders of output and samples as this node has them.

    Args:
        plan: of :func:`in_staged_copies`, or one without copies.

    Raises:
        ConfigError: one of the folders is in a copy, which is deleted with the job.
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
