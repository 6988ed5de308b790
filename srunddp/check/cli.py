"""Provides the command ``srunddp check``: reads the options, reports, and chooses the exit code."""

import os
import sys
from dataclasses import replace
from typing import Any

import click

from srunddp.bootstrap.environment.detect import CHANNELS, detect
from srunddp.bootstrap.environment.types import Environment
from srunddp.bootstrap.network import ifaces_entry
from srunddp.bootstrap.process_group.device import BACKENDS
from srunddp.check import preflight, render
from srunddp.check.finding import FAIL, CheckContext, Finding, context_of
from srunddp.check.session import RankZeroLostError, come_within, join, open_session
from srunddp.errors import ConfigError, SrunddpError, UsageError
from srunddp.stage.paths import StagedPaths, enter
from srunddp.util.click_types import DIR, FILE, ifaces_option, json_option, json_text, module_option
from srunddp.util.console import coloured, write_stderr
from srunddp.util.option_groups import GroupedCommand, after_script

FAILED = 69  # sysexits' EX_UNAVAILABLE
# Where `python -m NAME` finds the code: of a module, then of a package.
_ENDS = (".py", "/__main__.py")


@click.command(cls=GroupedCommand)
@module_option
@ifaces_option
@click.option(
    "--channel",
    type=click.Choice(CHANNELS),
    help="How ranks find rank 0 (default: the first available).",
)
@click.option("--port", metavar="N-M", help="Ports that a firewall leaves open on rank 0.")
@click.option(
    "--backend",
    type=click.Choice(BACKENDS),
    default="auto",
    help="For --collective (default: auto).",
)
@come_within
@click.option(
    "--path", "paths", type=FILE, multiple=True, help="A file or folder that all nodes must see."
)
@click.option(
    "--package",
    "packages",
    metavar="NAME",
    multiple=True,
    help="A Python package that all ranks need.",
)
@click.option(
    "--spare-nodes",
    type=click.IntRange(0),
    default=0,
    metavar="K",
    help="For a run with K spare nodes.",
)
@click.option(
    "--min-nodes",
    type=click.IntRange(0),
    default=0,
    metavar="N",
    help="For a run that may go on with N nodes.",
)
@click.option(
    "--staged",
    is_flag=True,
    help="Look at the copies of `srunddp stage push`, where a node has them.",
)
@click.option(
    "--collective",
    is_flag=True,
    help="Measure TCP between the nodes, and an all-reduce over all ranks.",
)
@click.option(
    "--output-dir", type=DIR, help="For preflight.JOB.txt and .json (default: .; with --json none)."
)
@json_option
@click.argument("script", type=FILE, required=False)
@click.argument("arguments", nargs=-1, type=FILE, metavar="[ARGUMENTS]...")
def check(**given: Any) -> None:
    """Check before the job what SCRIPT needs on all ranks, and name what is wrong. Only
    --collective uses GPUs.

    \b
    srun --ntasks-per-node=8 srunddp check train.py
    mpirun -n 2 srunddp check train.py

    Exit code 0, or 69 when something is wrong that would stop the job.
    """
    try:
        staged = enter() if given["staged"] else None
        environment = detect(os.environ, channel=given["channel"])
        if given["port"]:
            ports = ifaces_entry.port_range(given["port"], where="--port")
        else:
            ports = None
    except SrunddpError as error:
        write_stderr(f"srunddp: error: {error}\n")
        # A wrong command line ends with 2, as for any command. All other errors end with 69, so
        # that a job script has only one code to look for.
        sys.exit(error.exit_code if isinstance(error, UsageError) else FAILED)
    # All ranks have the same command line, so rank 0's note is enough.
    if not environment.rank:
        for note in after_script(click.get_current_context(), given["arguments"]):
            write_stderr(f"srunddp: note: {note}\n")
    own = preflight.Responder(_context(given, environment, staged), given["backend"])
    try:
        if environment.rank:
            code = _follow(given, own, ports)
        else:
            code = _lead(given, own, ports)
    except RankZeroLostError as error:
        # A rank that never found rank 0 ends with 0, because another code could make the launcher
        # end rank 0 before it reports. Here rank 0 is gone, so no report will come any more.
        write_stderr(f"srunddp: check on {environment.node}: error: {error}\n")
        code = FAILED
    if code and not environment.rank and any(each.starts_mpi for each in environment.discoveries):
        sys.stdout.flush()
        os._exit(code)  # MPI's own exit would wait for ranks that may be missing
    sys.exit(code)


def _context(
    given: dict[str, Any], environment: Environment, staged: StagedPaths | None
) -> CheckContext:
    # The command line names shared paths. This node may have only staged copies of them.
    here = staged.here if staged else str
    named = here(given["ifaces"]) if given["ifaces"] else given["ifaces"]
    script = here(given["script"]) if given["script"] else given["script"]
    if script and given["module"]:
        script = _file_of_module(script)
    return replace(
        context_of(environment, named, os.environ),
        script=script,
        paths=tuple(map(here, given["paths"])),
        packages=given["packages"],
        spare_nodes=given["spare_nodes"],
        min_nodes=given["min_nodes"],
        staged=staged,
    )


def _file_of_module(name: str) -> str:
    """Return the path of the module's file, or the path where the working directory would have it.
    Nothing is imported.
    """
    path = name.replace(".", "/")
    # The working directory comes first, because the job's command puts it before Python's own path.
    places = [path + end for end in _ENDS]
    places += [os.path.join(folder, path + end) for folder in sys.path for end in _ENDS]
    return next(filter(os.path.exists, places), places[0])


def _lead(given: dict[str, Any], own: preflight.Responder, ports: range | None) -> int:
    """Check and report on rank 0. Return the exit code, which all other ranks get as well."""
    environment = own.context.environment
    try:
        session = open_session(own.context, own.handle, given["timeout"], ports)
    except SrunddpError as error:
        apart = Finding(
            FAIL, error.found, error.expected, error.hint, nodes=(environment.node,), ranks=(0,)
        )
        return _tell(preflight.alone(own.context, apart), given, environment)
    # Begin with the code of a failure: if anything below raises, the other ranks exit with it.
    code = FAILED
    try:
        report = preflight.examine(
            session, own, given["timeout"], with_collective=given["collective"]
        )
        code = _tell(report, given, environment)
    finally:
        session.shutdown(code)
    return code


def _tell(report: render.Report, given: dict[str, Any], environment: Environment) -> int:
    """Print the report and write its files; return 69 if it has a failure or cannot be written,
    else 0.
    """
    code = FAILED if report.failed else 0
    job = os.environ.get("SLURM_JOB_ID", "")
    text = [render.verdict(report, environment.world_size, job), *render.lines(report)]
    as_json = given["as_json"]
    shown = coloured("\n".join(text), sys.stdout)
    click.echo(json_text(render.as_json(report, job, code)) if as_json else shown)
    folder = given["output_dir"] or ("" if as_json else ".")
    try:
        if folder:
            written = render.write(report, text, folder, job, code)
        else:
            written = []
    except ConfigError as error:
        write_stderr(f"srunddp: error: {error}\n")
        return FAILED
    if not as_json:
        click.echo(f"written: {', '.join(written)}")
    return code


def _follow(given: dict[str, Any], own: preflight.Responder, ports: range | None) -> int:
    """Answer rank 0's questions on another rank, and return the exit code. If rank 0 is not found,
    local rank 0 of each node prints what it finds by itself.
    """
    environment = own.context.environment
    code, found = join("check", own.context, own.handle, given["timeout"], ports)
    if not found and environment.local_rank == 0:
        for finding in preflight.alone(own.context).findings:
            write_stderr(f"srunddp: check on {environment.node}: {render.said(finding)}\n")
    return code
