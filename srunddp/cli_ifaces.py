"""The commands ``srunddp ifaces scan`` and ``srunddp ifaces check``: for whoever writes ifaces.conf."""

from __future__ import annotations

import datetime
import os
import sys
from pathlib import Path
from typing import Any

import click

from srunddp.bootstrap.environment import CHANNELS, Environment, detect
from srunddp.bootstrap.ifaces import DEFAULT, load, port_range
from srunddp.errors import ConfigError, SrunddpError
from srunddp.run.verdict import say
from srunddp.site import joining
from srunddp.site.draft import draft
from srunddp.site.finding import Subject
from srunddp.site.scan import Scanner, survey

_INCOMPLETE = 69
_TIMEOUT = 30.0


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
def ifaces() -> None:
    """Write ifaces.conf, or judge one."""


@ifaces.command()
@click.option("-o", "--output", metavar="FILE", help="Write the draft there instead of standard output.")
@click.option("--channel", type=click.Choice(CHANNELS), help="Force the way in which the ranks learn of rank 0.")
@click.option("--port", metavar="N-M", help="Ports that a firewall leaves open on rank 0.")
@click.option(
    "--timeout",
    type=click.FloatRange(min=0, min_open=True, max=1e6),
    default=_TIMEOUT,
    show_default=True,
    metavar="SECONDS",
    help="How long rank 0 waits for the others.",
)
def scan(**given: Any) -> None:
    """Find out which interfaces of the nodes reach each other, and draft an ifaces.conf from it.

    \b
    srun --nodes=64 --ntasks-per-node=1 --mpi=pmi2 srunddp ifaces scan -o ifaces.conf
    mpirun --map-by node srunddp ifaces scan -o ifaces.conf

    With PMI or MPI no name has to lead to rank 0 yet. Exit code 69 when a node has no interface that reaches others.
    """
    try:
        sys.exit(_scan(given))
    except SrunddpError as error:
        say(f"srunddp: error: {error}\n")
        sys.exit(error.exit_code)


def _scan(given: dict[str, Any]) -> int:
    environment = detect(os.environ, channel=given["channel"])
    ports = port_range(given["port"], where="--port") if given["port"] else None
    subject, act = _unconfigured(environment), Scanner(environment.node).act
    if environment.rank:
        return joining.follow(subject, act, given["timeout"], ports)
    hub, code = joining.lead(subject, act, given["timeout"], ports), _INCOMPLETE
    try:
        nodes, absent = set(hub.nodes.values()), environment.world_size - len(hub.here)
        _refuse(given["output"], nodes, absent)
        found = draft(survey(hub), datetime.date.today())
        _write(found.text, given["output"])
        code = _INCOMPLETE if found.missing or absent else 0
        say(f"srunddp: {_verdict(nodes, found.missing, absent)}\n")
    finally:
        hub.dismiss(code)
    return code


def _unconfigured(environment: Environment) -> Subject:
    """A rank whose interface is still to be chosen; an ifaces.conf that is there may lead it to rank 0."""
    try:
        entries = load(None, os.environ)
    except SrunddpError:
        entries = (DEFAULT,)
    return Subject(environment, entries, None, (), None, (), (), os.environ)


def _refuse(output: str | None, nodes: set[str], absent: int) -> None:
    if len(nodes) < 2:
        lost = f", {absent} did not come" if absent else ""
        raise ConfigError(
            f"all ranks that came are on {', '.join(nodes)}{lost}",
            expected="ranks on two nodes or more",
            cure="srun --mpi=pmi2 --nodes=N --ntasks-per-node=1 srunddp ifaces scan",
        )
    if output and os.path.lexists(output):
        raise ConfigError(f"{output} is there", expected="a new file", cure="remove it, or name another with -o")


def _write(text: str, output: str | None) -> None:
    if not output:
        click.echo(text, nl=False)
        return
    try:
        Path(output).write_text(text)
    except OSError as error:
        cause = os.strerror(error.errno or 0)
        raise ConfigError(
            f"{output} cannot be written: {cause}", expected="a file that rank 0 may write", cure="name another with -o"
        ) from None


def _verdict(nodes: set[str], missing: tuple[str, ...], absent: int) -> str:
    wrong = [
        *([f"{absent} ranks did not come"] if absent else []),
        *([f"{', '.join(missing)} without an interface that reaches the others"] if missing else []),
    ]
    return f"scan of {len(nodes)} nodes: {'; '.join(wrong) or 'an entry for each'}"
