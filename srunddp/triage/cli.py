"""The command ``srunddp triage``: a diagnosis of logs, for a login node."""

import json

import click

from srunddp.errors import ConfigError
from srunddp.triage import render
from srunddp.triage.collect import collect
from srunddp.triage.diagnose import diagnose
from srunddp.triage.logs import find
from srunddp.util.click_types import FILE, answering


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.argument("paths", nargs=-1, type=FILE, metavar="DIR|FILE...")
def triage(paths: tuple[str, ...], as_json: bool) -> None:
    """Say from its logs what failed first in a run, and which ranks have no output.

    \b
    srunddp triage slurm-4711.out
    srunddp triage logs/4711.0

    Any launcher's logs: Slurm's output, torchrun's, mpirun's, a file for each rank. Exit code 0 whatever is found, 78
    when there is nothing to read.
    """
    with answering():
        if not paths:
            raise ConfigError("no file and no folder", expected="logs", hint="srunddp triage slurm-4711.out")
        evidence = collect(find(paths))
        found = diagnose(evidence)
        lines = [json.dumps(render.record(found, evidence), indent=2)] if as_json else render.lines(found, evidence)
        click.echo("\n".join(lines))
