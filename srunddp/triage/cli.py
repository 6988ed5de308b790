"""Provides ``srunddp triage``, which diagnoses a job from its logs, for example on a login node."""

import click

from srunddp.triage import jobs, render
from srunddp.triage.collect import collect
from srunddp.triage.diagnose import diagnose
from srunddp.util.click_types import FILE, json_option, json_text, logs_option


@click.command()
@logs_option("--log-dir", help="The folder that is searched for the logs of JOB.")
@json_option
@click.argument("what", nargs=-1, type=FILE, metavar="[JOBID|DIR|FILE]...")
def triage(what: tuple[str, ...], log_dir: str, as_json: bool) -> None:
    """Show from its logs what failed first in a job, and which ranks have no output.

    \b
    srunddp triage
    srunddp triage 4711
    srunddp triage slurm-4711.out

    Without an argument, the newest job in logs is diagnosed. The logs may be of any launcher:
    Slurm's output, torchrun's, mpirun's, or a file for each rank. If there are logs of several
    jobs, the newest is diagnosed, and the others are named. Exit code 0 whatever is found, 78 if
    there is nothing to read.
    """
    job = jobs.find(what, log_dir)
    evidence = collect(job.logs)
    job.add_to(evidence)
    found = diagnose(evidence)
    lines = [*render.lines(found, evidence), *(job.lines() if job.others or not what else ())]
    click.echo(
        json_text(render.record(found, evidence) | job.record()) if as_json else "\n".join(lines)
    )
