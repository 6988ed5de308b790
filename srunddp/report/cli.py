"""Provides the command ``srunddp report``. Only this module of the report prints and exits."""

import contextlib
import shutil
import sys
import time
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from typing import Any

import click

from srunddp.errors import ConfigError, file_errors, one_line
from srunddp.report import locate, slurm, text
from srunddp.report.advice import notes
from srunddp.report.html import page
from srunddp.report.overview import failure
from srunddp.report.panels import sections
from srunddp.report.run import RunData, read
from srunddp.report.summarize import summary_of, with_baseline
from srunddp.report.summary import Summary
from srunddp.util.atomic_file import replace_file
from srunddp.util.click_types import DIR, json_option, json_text, logs_option
from srunddp.util.console import coloured, say

# Seconds for which --follow waits before it reads the files again; if reading them takes long, it
# waits ten times as long as that.
_REFRESH = 2.0
_AGAIN = 60.0  # seconds between two summaries of --follow if it does not print to a terminal
_INDENT = 4  # columns before continuation lines, if the terminal is too narrow for a line
# Move the cursor to the upper left corner, and erase everything after it.
_CLEAR = "\x1b[H\x1b[J"
# The version of --json. Raise it when a key is removed or changes its meaning, not when one is
# added.
JSON_VERSION = 1


@click.command()
@logs_option("--monitor-dir", help="Where the job's readings are.")
@click.option(
    "--restart",
    type=click.IntRange(0),
    metavar="N",
    help="Which start of the run (default: the last).",
)
@click.option(
    "--baseline",
    type=DIR,
    metavar="DIR|JOBID",
    help="A run on fewer ranks, for the scaling efficiency.",
)
@click.option("--output", type=DIR, help="For report.html (default: the run's folder).")
@click.option("--text", "text_only", is_flag=True, help="Print the summary, and write nothing.")
@click.option(
    "--follow", is_flag=True, help="Print the summary again and again until the run has ended."
)
@json_option
@click.argument("what", type=DIR, metavar="DIR|JOBID")
def report(**given: Any) -> None:
    """Sum up a run that was started with --monitor: what it did, and what to change next.

    \b
    srunddp report logs/4711.0
    srunddp report 4711
    srunddp report --baseline 4710 4711

    Also for a run that crashed, or that still runs.
    """
    folder, chosen = locate.find(given["what"], given["monitor_dir"], given["restart"])
    for note in chosen:
        say(f"note: {note}")
    baseline = _baseline(given)
    as_json = given["as_json"]
    # JSON is read by programs, so write no page with it unless a folder was named.
    output = given["output"] or (None if as_json else folder.parent)
    if given["follow"] and not as_json and not _follow(folder, baseline):
        return
    run, summary = _summed(folder, baseline)
    # Ask Slurm only once, and not in _follow(): otherwise each user who follows a run would query
    # slurmctld every few seconds.
    summary = slurm.completed(summary)
    if as_json:
        lines = [json_text(record(summary))]
    else:
        lines = text.lines(summary, notes(summary))
    click.echo(coloured("\n".join(lines), sys.stdout))
    if output and not given["text_only"]:
        # Flush, so that an error about the page on standard error comes after the text.
        sys.stdout.flush()
        written = _write(output, run, summary)
        if not as_json:
            click.echo("\n" + one_line(f"written: {written}"))


def _baseline(given: dict[str, Any]) -> Summary | None:
    if given["baseline"] is None:
        return None
    folder, _ = locate.find(given["baseline"], given["monitor_dir"], None)
    found = summary_of(read(folder))
    if found.throughput.per_s is None:
        raise ConfigError(
            f"--baseline {given['baseline']}: its throughput is not known",
            expected="a run of srunddp.Trainer with a few readings",
            hint="name another, or leave --baseline out",
        )
    return found


def _summed(folder: Path, baseline: Summary | None) -> tuple[RunData, Summary]:
    run = read(folder)
    if not run.nodes:
        raise ConfigError(
            f"nothing was written to {folder}",
            expected="run.json or files of readings",
            hint="see whether the run began",
        )
    summary = summary_of(run)
    return run, with_baseline(summary, baseline) if baseline else summary


def record(summary: Summary) -> dict[str, Any]:
    """Collect the figures, notes and remarks that ``--json`` prints."""
    computed = ("step_s", "data_share", "slowest_rank", "energy_j")
    found = {"version": JSON_VERSION, **asdict(summary)}
    found |= {name: getattr(summary, name) for name in computed}
    found["launches"] = [
        {"rank": rank, "phase": phase, "begin_s": begin, "end_s": end}
        for rank, phases in summary.launches.items()
        for phase, (begin, end) in phases.items()
    ]
    if failed := failure(summary):
        found["failure"] = asdict(failed)
    else:
        found["failure"] = None
    found["notes"] = [asdict(note) for note in notes(summary)]
    found["remarks"] = text.remarks(summary)
    return found


def _follow(folder: Path, baseline: Summary | None) -> bool:
    """Print the summary again and again until the run has ended. In a terminal each summary
    replaces the one before; elsewhere one is printed each minute.

    Returns:
        False if the user pressed Ctrl-C before the run ended.
    """
    in_place = sys.stdout.isatty()
    printed = -_AGAIN
    with contextlib.suppress(KeyboardInterrupt):
        while True:
            begun = time.monotonic()
            _, summary = _summed(folder, baseline)
            if not summary.ending.running:
                click.echo(_CLEAR if in_place else "", nl=False)
                return True
            if in_place or begun - printed >= _AGAIN:
                shown = text.lines(summary, notes(summary))
                if in_place:  # print only as many rows as fit
                    # Leave room for the empty lines at the end, or the terminal would scroll the
                    # first lines away. Ask for the size each time, because the window may be
                    # resized.
                    columns, rows = shutil.get_terminal_size()
                    fitting = (
                        part
                        for line in shown
                        for part in [*text.wrapped(line, _INDENT, columns)] or [""]
                    )
                    shown = [_CLEAR, *islice(fitting, max(0, rows - 4))]
                click.echo(coloured("\n".join([*shown, "\n"]), sys.stdout))
                sys.stdout.flush()
                printed = begun
            time.sleep(max(_REFRESH, 10 * (time.monotonic() - begun)))
    click.echo()
    return False


def _write(output: str | Path, run: RunData, summary: Summary) -> Path:
    """Write the page to report.html in a folder, which is created if missing; return its path."""
    html = page(summary, notes(summary), sections(run, summary))
    file = Path(output) / "report.html"
    found = f"the report cannot be written to {file.parent}"
    hint = "name another with --output, or print the text alone with --text"
    with file_errors(found, expected="a folder that you may write to", hint=hint):
        file.parent.mkdir(parents=True, exist_ok=True)
        # Words of a command line that was not UTF-8 contain surrogates, which UTF-8 cannot encode.
        replace_file(file, html.encode(errors="backslashreplace"))
    return file
