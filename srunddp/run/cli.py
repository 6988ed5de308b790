"""The command ``srunddp run``: errors are one message on the rank that sees them first. It may
print and exit.
"""

import os
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

import click

from srunddp.bootstrap.environment.detect import CHANNELS, detect, likely_ranks
from srunddp.bootstrap.environment.spare_nodes import set_spare_nodes
from srunddp.bootstrap.environment.types import Environment
from srunddp.bootstrap.network import ifaces_entry
from srunddp.bootstrap.process_group.device import BACKENDS
from srunddp.bootstrap.rendezvous import meet
from srunddp.bootstrap.rendezvous.meet import DEFAULT_TIMEOUT, RankSetup, RendezvousOptions
from srunddp.bootstrap.rendezvous.messages import RendezvousInfo
from srunddp.errors import ConfigError, RendezvousError, Scope, SrunddpError, UsageError
from srunddp.monitor.config import MonitorConfig
from srunddp.monitor.monitor import Monitor
from srunddp.run.launch import check_open_files, is_worker_exec, launch
from srunddp.run.options import RunOptions, plan_monitor, run_name, write_result
from srunddp.run.restart import Start, current_start
from srunddp.run.script import Script, check
from srunddp.run.worker import exit_without_teardown
from srunddp.stage.paths import StagedPaths, contradictions
from srunddp.supervisor.failure_files import rotate_previous
from srunddp.supervisor.limits import DEFAULT_LIMITS, Limits
from srunddp.supervisor.output.redirect import OutputRedirect, OutputTarget, output_target
from srunddp.util.click_types import (
    DIR,
    FILE,
    LOST_LEAST,
    Run,
    ifaces_option,
    limit,
    module_option,
    monitor_option,
)
from srunddp.util.console import say, write_stderr
from srunddp.util.option_groups import after_script

_LAST_WORD = 1.0
_SPARED_LOST_AFTER = 15.0  # with spare nodes a loss costs little more than that time
_LOST_AFTER = (
    f"[default: {RunOptions.lost_after:.0f}s; with --spare-nodes {_SPARED_LOST_AFTER:.0f}s]"
)


@click.command(
    cls=Run,
    groups={
        "Network and rendezvous": "ifaces backend channel port timeout",
        "Failures": ("restarts restart_grace spare_nodes stall_timeout lost_after grace fast_exit"),
        "Output and monitoring": (
            "result log_dir show_ranks prefix quiet verbose monitor monitor_dir"
        ),
        "Environment": "module offline staged bind",
    },
)
@click.option("--backend", type=click.Choice(BACKENDS), help="For srunddp.init() (default: auto).")
@ifaces_option
@limit("--timeout", DEFAULT_TIMEOUT, "How long the ranks wait for each other.", "SRUNDDP_TIMEOUT")
@click.option(
    "--channel",
    type=click.Choice(CHANNELS),
    help="How ranks find rank 0 (default: the first available).",
)
@click.option("--port", metavar="N-M", help="Ports that a firewall leaves open on rank 0.")
@click.option(
    "--restarts",
    type=click.IntRange(0),
    default=0,
    metavar="N",
    help="How often all ranks may start anew.",
)
@limit(
    "--restart-grace",
    RunOptions.restart_grace,
    "How long all ranks may take to end before it.",
    positive=False,
)
@limit(
    "--stall-timeout",
    RunOptions.stall_timeout,
    "Stop the run when no rank makes a step for this long; 0 for no limit. See"
    " srunddp.heartbeat().",
    "SRUNDDP_STALL_TIMEOUT",
    positive=False,
)
@click.option(
    "--spare-nodes",
    type=click.IntRange(0),
    default=0,
    metavar="K",
    help="The last K nodes wait, to replace others.",
)
@limit(
    "--lost-after",
    None,
    f"A node that is silent for so long is lost. {_LOST_AFTER}",
    least=LOST_LEAST,
)
@limit(
    "--grace",
    RunOptions.grace,
    "How long a failed or stopped script may take to end.",
    positive=False,
)
@click.option(
    "--result",
    type=click.Path(resolve_path=True),
    metavar="FILE",
    help="Write exit code and restarts there.",
)
@click.option(
    "--log-dir",
    type=DIR,
    envvar="SRUNDDP_LOG_DIR",
    show_envvar=True,
    help="Write each rank's output to a file.",
)
@click.option(
    "--show-ranks",
    metavar="RANKS",
    help="With --log-dir: the ranks on the terminal too (default: 0).",
)
@click.option("--prefix", is_flag=True, help="Put node and rank before each line on the terminal.")
@monitor_option
@click.option(
    "--monitor-dir", type=DIR, help="Where the samples go (default: --log-dir's folder, else logs)."
)
@click.option(
    "--offline",
    is_flag=True,
    help="Set HF_*_OFFLINE, cache folders and thread counts for Hugging Face.",
)
@click.option(
    "--bind",
    type=click.Choice(("none", "auto")),
    default="none",
    help="auto: on the CPUs next to the GPU.",
)
@click.option(
    "--staged",
    is_flag=True,
    help="Run in the copies of `srunddp stage push`, where a node has them.",
)
@click.option("--fast-exit", is_flag=True, help="Skip Python's teardown at the end of the script.")
@click.option("--explain", is_flag=True, help="Print what decided each value, per rank, and exit.")
@click.option("--quiet", is_flag=True, help="Do not print the summary line.")
@click.option("--verbose", is_flag=True, help="Print one line per rank: [RANK r] WORLD_SIZE=w.")
@module_option
@click.argument("script", type=FILE, required=False, metavar="SCRIPT")
@click.argument("arguments", nargs=-1, type=FILE, metavar="[ARGUMENTS]...")
def run(**given: Any) -> None:
    """Run SCRIPT as one rank of the world that srun or mpirun started, one process per GPU.

    \b
    srun --ntasks-per-node=8 srunddp train.py
    mpirun -n 2 srunddp train.py

    Python's own options are given as variables: PYTHONUNBUFFERED=1, PYTHONOPTIMIZE=1.
    """
    environment = None
    start = current_start()
    try:
        if given["explain"]:
            from srunddp.explain.cli import explained

            explained(given)
        environment = _environment(given, start)
        # The supervisor; a worker exits in _run.
        exit_without_teardown(_run(given, environment, start))
    except SrunddpError as error:
        may_be_cut_off = start.rejoin is not None and start.rejoin.lost_after is not None
        if may_be_cut_off and environment and environment.rank and error.scope is not Scope.JOB:
            error = RendezvousError(
                f"{environment.node} has not met the others again: {error.found}", scope=Scope.NODE
            )
        if _prints(error, environment):
            write_stderr(f"srunddp: error: {error}\n")
        elif not error.said:
            # Launchers kill the others at the first bad end: the rank that prints is to be heard.
            time.sleep(_LAST_WORD)
        if may_be_cut_off and error.scope is not Scope.JOB:
            from srunddp.run.srun import await_srun  # most runs need none of it

            await_srun()
        sys.exit(error.exit_code)


def _environment(given: dict[str, Any], start: Start) -> Environment:
    if given["spare_nodes"] and not given["restarts"]:
        raise UsageError(
            "--spare-nodes without --restarts",
            expected="both",
            hint="add --restarts=3",
            scope=Scope.JOB,
        )
    environment = set_spare_nodes(
        detect(os.environ, channel=given["channel"]), given["spare_nodes"]
    )
    given["lost_after"] = given["lost_after"] or (
        _SPARED_LOST_AFTER if given["spare_nodes"] else RunOptions.lost_after
    )
    if start.rejoin and start.rejoin.rank is not None:
        environment = replace(environment, rank=start.rejoin.rank)
    return environment


def _run(given: Mapping[str, Any], environment: Environment, origin: Start) -> int:
    options = RunOptions(**{field.name: given[field.name] for field in fields(RunOptions)})
    target = output_target(  # all ranks see the same error here, and nobody has to be told
        options.log_dir,
        options.prefix,
        options.show_ranks,
        rank=environment.rank,
        world_size=environment.world_size,
        node=environment.node,
        run=run_name(environment),
    )
    names = ("backend", "ifaces", "timeout")
    if given["port"]:
        ports = ifaces_entry.port_range(given["port"], where="--port")
    else:
        ports = None
    more = {"ports": ports, "max_restarts": given["restarts"], "rejoin": origin.rejoin}
    rendezvous = RendezvousOptions(
        **{name: given[name] for name in names if given[name] is not None}, **more
    )
    if given["script"] is None:
        raise UsageError(
            "no SCRIPT",
            expected="srunddp [OPTIONS] SCRIPT [ARGUMENTS]...",
            hint="see srunddp run --help",
            scope=Scope.JOB,
        )
    script = Script(given["script"], given["arguments"], given["module"])
    plan = plan_monitor(options, environment, script, rendezvous.generation)
    # A caller of main() may hand others in, by main(arguments, obj=Limits(…)): a test does not wait
    # a minute.
    limits = click.get_current_context().find_object(Limits) or DEFAULT_LIMITS
    start = _Start(origin, script, rendezvous, target, plan, limits)
    setup, output, monitor = _open(start, options, environment)
    if given["bind"] == "auto":
        # With NVML, which no other start needs.
        from srunddp.bootstrap.process_group.numa import bind_near_gpu

        binding = bind_near_gpu(environment, os.environ)
        if given["verbose"] or environment.rank == 0:
            say(f"rank {environment.rank}: --bind=auto: {binding.value}: {binding.why}")
    if environment.rank == 0:
        stray = after_script(click.get_current_context(), given["arguments"])
        for note in [
            *_notes(setup),
            *start.notes,
            *(contradictions(os.environ) if options.offline else ()),
            *stray,
        ]:
            say(note)

    def on_rendezvous(info: RendezvousInfo) -> None:
        if environment.rank == 0 and not given["quiet"]:
            say(_placement(setup, info))
        if given["verbose"]:
            write_stderr(f"[RANK {environment.rank}] WORLD_SIZE={environment.world_size}\n")

    return launch(
        setup,
        start.script,
        options,
        output,
        monitor,
        origin,
        on_rendezvous=on_rendezvous,
        say=say,
        limits=limits,
    )


@dataclass
class _Start:
    """What the command line says of a start, as it is on this node; ``origin`` is what the start
    before says.
    """

    origin: Start
    script: Script
    rendezvous: RendezvousOptions
    target: OutputTarget
    plan: MonitorConfig | None
    limits: Limits
    notes: tuple[str, ...] = ()  # that rank 0 is to say


def _open(
    start: _Start, options: RunOptions, environment: Environment
) -> tuple[RankSetup, OutputRedirect, Monitor]:
    """All that can fail before the ranks meet; whoever fails there lets the others know."""
    setup: RankSetup | None = None
    try:
        start.origin.check()
        if (
            start.rendezvous.max_restarts
            and environment.world_size > 1
            and environment.discovery.starts_mpi
        ):
            raise ConfigError(
                "--restarts over MPI",
                expected="a way to rank 0 without MPI",
                hint="start with srun --mpi=pmi2, or add --channel=slurm or env",
                scope=Scope.JOB,
            )
        if options.staged:
            _use_staged_copies(start)
        is_worker_exec(os.environ)
        check(start.script)
        if options.result and environment.rank == 0 and not start.rendezvous.generation:
            write_result(options.result)
        # Before any socket: where standard output is closed, that would get its number.
        if start.target.file and environment.rank == 0:
            rotate_previous(start.target.file.parent)
        output = OutputRedirect.open(start.target, start.limits)
        monitor = Monitor(start.plan)
        setup = meet.prepare(start.rendezvous, environment)
        check_open_files(environment)
        return meet.listen_as_deputy(meet.bind(setup)), output, monitor
    except SrunddpError as error:
        if environment.rank == 0:
            write_stderr(f"srunddp: error: {error}\n")
            error.said = True
            meet.report_early_failure(
                environment, start.rendezvous, error, setup.interface if setup else None
            )
        elif error.scope is not Scope.JOB and meet.report_early_failure(
            environment, start.rendezvous, error
        ):
            error.scope = Scope.JOB  # rank 0 prints it
        raise


def _use_staged_copies(start: _Start) -> None:
    """Change the start to what it is where this node has copies."""
    from srunddp.stage.paths import activate, lock, read, refuse_inside_copy

    staged = read(os.environ)
    lock(staged.folder)  # open until this process has ended, and all that it forks
    folder = activate(staged)
    if start.rendezvous.ifaces:
        start.rendezvous = replace(start.rendezvous, ifaces=staged.here(start.rendezvous.ifaces))
    if start.target.file:
        file = refuse_inside_copy(staged, folder, start.target.file, "--log-dir")
        start.target = replace(start.target, file=file)
    if start.plan:
        start.plan = replace(
            start.plan,
            folder=refuse_inside_copy(staged, folder, start.plan.folder, "--monitor-dir"),
        )
    start.script = _staged_script(staged, start.script)
    if staged.note:
        start.notes = (staged.note,)
    else:
        start.notes = ()


def _staged_script(staged: StagedPaths, script: Script) -> Script:
    """The script and its arguments as they are on this node."""
    name = script.name if script.module else staged.here(script.name)
    return replace(script, name=name, arguments=tuple(map(staged.argument, script.arguments)))


def _prints(error: SrunddpError, environment: Environment | None) -> bool:
    """Whether this rank is the one to print an error that others see as well."""
    if error.said:
        return False
    if environment:
        rank = environment.rank
        local_rank = environment.local_rank
    else:
        rank, local_rank = likely_ranks(os.environ)
    return {Scope.JOB: rank == 0, Scope.NODE: local_rank == 0, Scope.RANK: True}[error.scope]


def _notes(setup: RankSetup) -> list[str]:
    chosen = setup.interface
    kept = [f"{name}={chosen.exports[name]}" for name in chosen.kept]
    note = f"{' and '.join(kept)} exported, which wins over ifaces.conf on every node"
    return [
        *setup.environment.notes,
        *([note] if kept and setup.environment.world_size > 1 else []),
    ]


def _placement(setup: RankSetup, info: RendezvousInfo) -> str:
    environment = setup.environment
    if environment.world_size == 1:
        ranks = "1 rank"
    else:
        ranks = f"{environment.world_size} ranks"
    nodes = "1 node" if info.nnodes == 1 else f"{info.nnodes} nodes"
    return (
        f"{ranks} on {nodes}, launcher {environment.launcher}, channel {info.channel}, "
        f"master {info.master_addr} port {info.master_port}, interface {setup.interface.name} "
        f"({setup.interface.source}), backend {setup.options.backend}"
    )
