"""The command ``srunddp report``: what may print, and what may exit, when a run is summed up."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import click

from srunddp.errors import ConfigError, SrunddpError, one_line
from srunddp.observe.report import places, text
from srunddp.observe.report.notes import notes
from srunddp.observe.report.run import read
from srunddp.observe.report.summary import Summary
from srunddp.observe.report.summing import against, summary_of
from srunddp.run.verdict import say


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "--monitor-dir", metavar="DIR", default="logs", show_default=True, help="Where a job's folder is looked for."
)
@click.option("--restart", type=click.IntRange(0), metavar="N", help="Which start of the run; the last unless given.")
@click.option("--baseline", metavar="DIR|JOBID", help="A run on fewer ranks, for the scaling efficiency.")
@click.option("--output", metavar="DIR", help="For report.html and the pictures; the run's folder unless given.")
@click.option("--text", "text_only", is_flag=True, help="Print the summary, and write nothing.")
@click.option(
    "--live", is_flag=True, help="In a terminal: print the summary anew every few seconds until the run ends."
)
@click.argument("what", metavar="DIR|JOBID")
def report(**given: Any) -> None:
    """Sum up a run that was started with --monitor: what it did, and what to change next.

    \b
    srunddp report logs/4711.0
    srunddp report 4711
    srunddp report --baseline 4710 4711

    Written also of a run that crashed, or that still runs.
    """
    try:
        _report(given)
    except SrunddpError as error:
        say(f"srunddp: error: {error}\n")
        sys.exit(error.exit_code)


def _report(given: dict[str, Any]) -> None:
    place = places.find(given["what"], given["monitor_dir"], given["restart"], lambda _: None)
    for note in place.notes:
        say(f"srunddp: note: {one_line(note)}\n")
    run = read(place.folder)
    summary = summary_of(run)
    click.echo("\n".join(text.lines(summary, notes(summary))))
