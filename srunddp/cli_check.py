"""The command ``srunddp check``: what may print, and what may exit, before a job."""

from __future__ import annotations

import os
import sys
from typing import Any, NoReturn

import click

from srunddp.bootstrap import ifaces
from srunddp.bootstrap.device import BACKENDS
from srunddp.bootstrap.environment import CHANNELS, Environment, detect
from srunddp.errors import ConfigError, SrunddpError
from srunddp.run.verdict import say
from srunddp.site import check as checking
from srunddp.site import joining, table
from srunddp.site.finding import Subject, subject_of
from srunddp.site.hub import Hub
from srunddp.site.rank import Rank

FAILED = 69  # sysexits' EX_UNAVAILABLE
_TIMEOUT = 30.0


@click.command(context_settings={"allow_interspersed_args": False, "help_option_names": ["-h", "--help"]})
@click.option("--ifaces", metavar="FILE", help="Which interface each node uses; see etc/ifaces.conf.")
@click.option("--channel", type=click.Choice(CHANNELS), help="Force the way in which the ranks learn of rank 0.")
@click.option("--port", metavar="N-M", help="Ports that a firewall leaves open on rank 0.")
@click.option("--backend", type=click.Choice(BACKENDS), default="auto", help="For --collective; auto unless given.")
@click.option(
    "--timeout",
    type=click.FloatRange(min=0, min_open=True, max=1e6),
    default=_TIMEOUT,
    show_default=True,
    metavar="SECONDS",
    help="How long rank 0 waits for the others.",
)
@click.option("--path", "paths", metavar="P", multiple=True, help="A file or folder that all nodes must see.")
@click.option("--package", "packages", metavar="NAME", multiple=True, help="A Python package that all ranks need.")
@click.option("--collective", is_flag=True, help="Measure TCP between the nodes, and an all-reduce over all ranks.")
@click.option("--output-dir", metavar="DIR", default=".", show_default=True, help="For preflight.JOB.txt and .json.")
@click.argument("script", required=False)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED, metavar="[ARGUMENTS]...")
def check(**given: Any) -> None:
    """See on all ranks whether SCRIPT could be trained, and name what is wrong: before the job, without a GPU's time.

    \b
    srun --ntasks-per-node=8 srunddp check train.py
    mpirun -n 2 srunddp check train.py

    Exit code 0, or 69 when something is wrong that would stop the job.
    """
    try:
        environment = detect(os.environ, channel=given["channel"])
        ports = ifaces.port_range(given["port"], where="--port") if given["port"] else None
    except SrunddpError as error:
        say(f"srunddp: error: {error}\n")
        sys.exit(FAILED)
    own = Rank(_subject(given, environment), given["backend"])
    try:
        if environment.rank:
            sys.exit(joining.follow(own.subject, own.act, given["timeout"], ports))
        sys.exit(_led(given, own, joining.lead(own.subject, own.act, given["timeout"], ports)))
    except SrunddpError as error:
        _leave(own.subject, error)


def _subject(given: dict[str, Any], environment: Environment) -> Subject:
    wanted = (given["script"], given["paths"], given["packages"])
    return subject_of(environment, given["ifaces"], os.environ, *wanted)


def _led(given: dict[str, Any], own: Rank, hub: Hub) -> int:
    """On rank 0: the check, its report, and the exit code, which all others are told."""
    code, job = FAILED, os.environ.get("SLURM_JOB_ID", "")
    try:
        report = checking.examine(hub, own, given["timeout"], with_collective=given["collective"])
        title = table.verdict(report, own.subject.environment.world_size, job)
        text = [title, *table.lines(table.merged(report.findings), report.summaries, report.skipped)]
        click.echo("\n".join(text))
        code = FAILED if report.failed else 0
        click.echo("written: " + ", ".join(table.write(report, text, given["output_dir"], job, code)))
    except ConfigError as error:  # the report cannot be written; it has been printed
        say(f"srunddp: error: {error}\n")
        code = FAILED
    finally:
        hub.dismiss(code)
    return code


def _leave(subject: Subject, error: SrunddpError) -> NoReturn:
    """Without the others: say what this rank sees by itself, once on each node."""
    environment = subject.environment
    if environment.local_rank == 0:
        for line in [f"error: {error}", *map(table.said, checking.alone(subject))]:
            say(f"srunddp: check on {environment.node}: {line}\n")
    if "mpi" in environment.channels:
        os._exit(FAILED)  # MPI's own end would wait for those that are not there
    sys.exit(FAILED)
