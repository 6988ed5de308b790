"""Provides the commands ``srunddp ifaces scan``, ``srunddp ifaces check`` and ``srunddp ifaces
show``, for administrators who write ifaces.conf.
"""

import datetime
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

import click

from srunddp.bootstrap.environment.detect import CHANNELS, detect
from srunddp.bootstrap.environment.types import Environment
from srunddp.bootstrap.network.ifaces_conf import parse
from srunddp.bootstrap.network.ifaces_entry import IfacesEntry, port_range
from srunddp.bootstrap.network.probe import Prober
from srunddp.check import preflight, render
from srunddp.check.checks import interface, launch
from srunddp.check.finding import ROWS, context_of
from srunddp.check.session import CheckSession, come_within, join, open_session
from srunddp.errors import ConfigError, file_errors
from srunddp.ifaces.draft import draft
from srunddp.ifaces.lint import NAME, EntryNodes, LintReport, check_file, slurm_nodes
from srunddp.ifaces.scan import handle, survey
from srunddp.ifaces.show import show as show_node
from srunddp.util.click_types import FILE, ifaces_option, json_option, json_text
from srunddp.util.console import write_stderr

_INCOMPLETE = 69  # exit code if a node or an interface is missing, as of UnavailableError
_WRONG = 78  # exit code if the file is wrong, as of ConfigError

_UNTRIED = (
    "no interface was looked at, as this is a single process: start the command as ranks,"
    " `srun --ntasks-per-node=1 srunddp ifaces check`"
)


@dataclass(frozen=True)
class _ScanOptions:
    """The options of ``srunddp ifaces scan``.

    Attributes:
        output: The file to write. If it is None, the entries go into the file ``merge``, or to
            standard output without ``merge``.
        merge: The file to which entries for further nodes are added; None for a complete draft.
        channel: The channel by which ranks find rank 0; None for the first that is available.
        port: The ports, as ``N-M``, on which rank 0 may listen; None for any port.
        timeout: Seconds that rank 0 waits for all ranks.
    """

    output: str | None
    merge: str | None
    channel: str | None
    port: str | None
    timeout: float


@click.group()
def ifaces() -> None:
    """Write ifaces.conf, validate it, or show what it gives a node."""


@ifaces.command(short_help="Draft ifaces.conf from what the nodes reach.")
@click.option("-o", "--output", type=FILE, help="Write the draft there instead of standard output.")
@click.option("--merge", type=FILE, help="Add entries to FILE for the nodes that have none there.")
@click.option(
    "--channel",
    type=click.Choice(CHANNELS),
    help="How ranks find rank 0 (default: the first available).",
)
@click.option("--port", metavar="N-M", help="Ports that a firewall leaves open on rank 0.")
@come_within
def scan(
    output: str | None, merge: str | None, channel: str | None, port: str | None, timeout: float
) -> None:
    """Find out which interfaces of the nodes reach each other, and draft an ifaces.conf from it.

    \b
    srun --nodes=64 --ntasks-per-node=1 --mpi=pmi2 srunddp ifaces scan -o ifaces.conf
    mpirun --map-by node srunddp ifaces scan -o ifaces.conf
    srun -N8 -w rack[9-10] --ntasks-per-node=1 --mpi=pmi2 srunddp ifaces scan --merge ifaces.conf

    With PMI or MPI, rank 0's name need not resolve yet. Exit code 69 when a node has no interface
    that reaches others.
    """
    sys.exit(_scan(_ScanOptions(output, merge, channel, port, timeout)))


def _scan(options: _ScanOptions) -> int:
    """Run one rank's side of the scan, and return its exit code."""
    environment = detect(os.environ, channel=options.channel)
    ports = None
    if options.port:
        ports = port_range(options.port, where="--port")
    # For a scan no interface is chosen. An existing ifaces.conf is read all the same, because it
    # may help to find rank 0.
    context = replace(context_of(environment, None, os.environ), interface=None)
    answer = partial(handle, environment.node, Prober())
    if environment.rank:
        code, *_ = join("scan", context, answer, options.timeout, ports)
        return code
    session = open_session(context, answer, options.timeout, ports)
    # With this exit code the other ranks end if an error ends rank 0 before the result is known.
    code = _INCOMPLETE
    try:
        code = _write_draft(session, options, environment.world_size)
    finally:
        # Do this after an error too, because the other ranks wait for the next question of rank 0.
        session.shutdown(code)
    return code


def _write_draft(session: CheckSession, options: _ScanOptions, world_size: int) -> int:
    """Have the nodes try to reach each other, write the draft, and print a line about the result.

    Returns:
        The exit code: 0 if all ranks answered, and each node has an interface that reaches others.

    Raises:
        ConfigError: All ranks are on one node, or the file cannot be written.
    """
    nodes = set(session.nodes.values())
    absent = world_size - len(session.here)
    # Refuse before the nodes try to reach each other, because that takes a while.
    _refuse(options.output, options.merge, nodes, absent)
    entries: Sequence[IfacesEntry] = ()
    if options.merge:
        entries = parse(Path(options.merge).read_bytes(), options.merge)
    text, missing = draft(survey(session), datetime.date.today(), entries)
    if options.merge and not options.output:
        add_entries(text, options.merge)
    else:
        _write(text, options.output)
    wrong = []
    if absent:
        wrong.append(f"{absent} ranks did not come")
    for rank, why in session.errors.items():
        wrong.append(f"rank {rank} on {session.nodes[rank]}: {why}")
    if missing:
        wrong.append(f"{', '.join(missing)} without an interface that reaches the others")
    done = ""
    if not text:
        done = f", none new to {options.merge}"
    write_stderr(
        f"srunddp: scan of {len(nodes)} nodes: {'; '.join(wrong) or 'an entry for each'}{done}\n"
    )
    if wrong:
        return _INCOMPLETE
    return 0


def _refuse(output: str | None, merged: str | None, nodes: set[str], absent: int) -> None:
    """Check that ranks on two nodes have connected, and that the result can be written.

    Args:
        output: The new file; None for none.
        merged: The file to which entries are added; None for none.
        nodes: The nodes of the ranks that have connected.
        absent: How many ranks have not connected.

    Raises:
        ConfigError: All ranks are on one node, ``output`` exists, or ``merged`` cannot be read or
            written.
    """
    if merged and not (os.path.isfile(merged) and os.access(merged, os.R_OK | os.W_OK)):
        raise ConfigError(
            f"--merge {merged}",
            expected="a file that rank 0 may read and write",
            hint="correct the path",
        )
    if len(nodes) < 2:
        if absent:
            lost = f", {absent} did not come"
        else:
            lost = ""
        raise ConfigError(
            f"all ranks that came are on {', '.join(nodes)}{lost}",
            expected="ranks on two nodes or more",
            hint="srun --mpi=pmi2 --nodes=N --ntasks-per-node=1 srunddp ifaces scan",
        )
    # Do not overwrite an existing file, because all jobs of the cluster may depend on it. lexists()
    # also finds a broken link.
    if output and os.path.lexists(output):
        raise ConfigError(
            f"{output} exists", expected="a new file", hint="remove it, or name another with -o"
        )


def add_entries(text: str, merged: str) -> None:
    """Append entries to an ifaces.conf. What the file contains, comments included, stays as it is.

    Args:
        text: The entries; empty if there are none to add.
        merged: The file's path.

    Raises:
        ConfigError: The file has its entries in brackets.
    """
    before = Path(merged).read_text()
    added = text
    if text:
        # Put an empty line before the new entries, after a newline if the file's last line has
        # none.
        added = f"\n{text}" if before.endswith("\n") else f"\n\n{text}"
    # Parse the file's future text before writing it, because a file that YAML cannot read would
    # stop every job: no line `- nodes:` may follow on entries such as `[{nodes: a}, {nodes: b}]`.
    try:
        parse(f"{before}{added}".encode(), merged)
    except ConfigError:
        raise ConfigError(
            f"{merged} has its entries in brackets",
            expected="a line `- nodes: …` for each entry",
            hint="rewrite the file so, or name another one with -o",
        ) from None
    _write(added, merged, "a")


def _write(text: str, output: str | None, mode: str = "w") -> None:
    found = f"{output or 'standard output'} cannot be written"
    hint = "name another with -o"
    failing = file_errors(found, expected="a file that rank 0 may write", hint=hint)
    with failing, click.open_file(output or "-", mode) as file:
        click.echo(text, nl=False, file=file)


@ifaces.command(short_help="Validate ifaces.conf.")
@click.argument("file", type=FILE, required=False)
@json_option
@come_within
def check(file: str | None, *, as_json: bool, timeout: float) -> None:
    """Validate FILE, or the ifaces.conf in effect. On a login node this checks the file itself, and
    under srun also what the file gives each node.

    \b
    srunddp ifaces check etc/ifaces.conf
    srun --ntasks-per-node=1 srunddp ifaces check etc/ifaces.conf

    Exit code 0, 78 when the file is wrong, or 69 when rank 0 is lost meanwhile.
    """
    environment = detect(os.environ)
    if environment.world_size == 1:
        judged = check_file(file, os.environ)
        if judged.entries:
            judged = replace(judged, notes=(*judged.notes, _UNTRIED))
        sys.exit(_print_report(render.Report({}), judged, as_json=as_json))
    sys.exit(_on_every_node(file, environment, timeout, as_json=as_json))


@ifaces.command(short_help="What ifaces.conf gives a node, and why.")
@click.argument("node")
@ifaces_option
@json_option
def show(node: str, ifaces: str | None, *, as_json: bool) -> None:
    """Print which entry of ifaces.conf applies to NODE, what its ranks get from it in a job of
    several nodes, and what was not chosen. Nothing runs on NODE.

    \b
    srunddp ifaces show gpu130
    srunddp ifaces show --ifaces draft.conf gpu130

    Variables that are exported here count as the job's, because srun and sbatch pass them on. Exit
    code 78 if no entry matches NODE, or the file is wrong.
    """
    report = show_node(node, ifaces, os.environ, slurm_nodes(os.environ))
    if as_json:
        click.echo(json_text(asdict(report)))
    else:
        click.echo(report.text)


def _on_every_node(
    file: str | None, environment: Environment, timeout: float, *, as_json: bool
) -> int:
    own = preflight.Responder(context_of(environment, file, os.environ, "FILE"))
    if environment.rank:
        code, *_ = join("ifaces check", own.context, own.handle, timeout)
        return code
    session = open_session(own.context, own.handle, timeout)
    code = _WRONG
    try:
        report = preflight.look(session, environment, timeout, [interface.CHECK])
        preflight.reached(session, report)
        report.add(launch.NAME, preflight.lost(session))
        # Rank 0's node may have no file although other nodes have one. Then the findings of the
        # other nodes say so, and there is no file to check here.
        judged = None
        if own.context.loaded.path:
            judged = check_file(file, os.environ)
        code = _print_report(report, judged, as_json=as_json)
    finally:
        session.shutdown(code)
    return code


def _print_report(report: render.Report, judged: LintReport | None, *, as_json: bool) -> int:
    """Print the results of a check, as text or as JSON.

    Args:
        report: What the ranks have found. The findings about the file are added to it.
        judged: The findings about the file; None if this node has no file.
        as_json: Whether to print JSON.

    Returns:
        The exit code, which says whether a check has failed.
    """
    notes: Sequence[str] = ()
    entries: Sequence[EntryNodes] = ()
    if judged:
        report.add(NAME, judged.findings, judged.summary)
        notes = judged.notes
        entries = judged.entries
    # Notes and warnings are about what may be intended, so the check does not fail because of them.
    code = _WRONG if report.failed else 0
    record = {
        **render.as_json(report, os.environ.get("SLURM_JOB_ID", ""), code),
        "notes": notes,
        "entries": [
            {"where": one.where, "rule": one.rule, "count": len(one.nodes), "nodes": one.nodes}
            for one in entries
        ],
    }
    counts = list(map(str, entries[:ROWS]))
    if entries[ROWS:]:
        counts.append(f"… and {len(entries) - ROWS} more entries")
    lines = [*render.lines(report), *counts, *(f"note: {note}" for note in notes)]
    click.echo(json_text(record) if as_json else "\n".join(lines))
    return code
