"""Provides the command ``srunddp stage``, which copies folders to nodes: reads the options, runs
the staging and prints the result.
"""

import os
import platform
import signal
import sys
from pathlib import Path
from typing import Any

import click

from srunddp.stage import push as pushing
from srunddp.stage.build import build
from srunddp.stage.slurm import Job
from srunddp.util.click_types import DIR, limit
from srunddp.util.console import say

_PATH = click.Path(path_type=Path)


@click.group()
def stage() -> None:
    """Bring an environment, the project and data to nodes without internet or without a shared file
    system.
    """


@stage.command("build", short_help="Make an environment that can be copied.")
@click.option(
    "-r",
    "--requirement",
    type=_PATH,
    required=True,
    metavar="FILE",
    help="A requirements file as for pip, or a lock file.",
)
@click.option(
    "-o",
    "--output",
    type=_PATH,
    default="staged-env",
    show_default=True,
    metavar="ENV",
    help="A new folder.",
)
@click.option(
    "--wheels",
    type=_PATH,
    metavar="DIR",
    help="A folder with wheels, to take instead of uv's cache.",
)
@click.option("--online", is_flag=True, help="Ask an index too, by your settings for uv.")
def build_command(requirement: Path, output: Path, **given: Any) -> None:
    """Build an environment that contains srunddp and runs wherever it is copied to. This needs uv,
    from srunddp[stage].

    \b
    srunddp stage build -r requirements.txt --online  # with internet; uv's cache keeps the files
    srunddp stage build -r requirements.txt           # without internet: from uv's cache
    srunddp stage build -r staged-env/srunddp-lock.txt --wheels=DIR -o again

    The file srunddp-lock.txt in the environment names each version and its hash.
    """
    packages = build(requirement, output, say=say, **given)
    if "torch" not in packages:
        say(f"note: {requirement} does not ask for torch; expected torch for a training")
    if "torch" in packages:
        torch = f"torch {packages['torch']}, "
    else:
        torch = ""
    click.echo(
        f"{output.absolute()}: {len(packages)} packages, {torch}Python {platform.python_version()}"
    )


_base = click.option(
    "--dir",
    "base",
    type=DIR,
    default="/tmp",
    show_default=True,
    help="A folder that each node has for itself.",
)
_timeout = limit("--timeout", 600.0, "How long the nodes may take for each step.")


@stage.command(short_help="Copy folders to the nodes of this job.")
@click.option(
    "--env",
    type=DIR,
    metavar="ENV",
    help="An environment with srunddp, as srunddp stage build makes it.",
)
@click.option("--project", type=DIR, help="The folder with the script.")
@click.option(
    "--data", type=DIR, multiple=True, help="A folder that the script reads, such as a cache."
)
@click.option(
    "--exclude",
    metavar="PATTERN",
    multiple=True,
    help="Not packed with the project: a name, or /NAME.",
)
@click.option(
    "--all-nodes", is_flag=True, help="Stage environment and data even to nodes that see them."
)
@_base
@_timeout
def push(**given: Any) -> None:
    """In a job: copy folders to the nodes that do not see them, and print the path of the program
    that srun has to start.

    \b
    srunddp=$(srunddp stage push --env ENV --project "$PWD")
    srun --chdir=/ "$srunddp" run --staged train.py
    srunddp stage clean
    """
    # On SIGTERM, end this process by an exception, because otherwise the archive that it has packed
    # would stay on this node.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    job = Job.of(os.environ, given["base"])
    wanted = pushing.collect(given["env"], given["project"], given["data"], given["exclude"])
    # Only the path goes to standard output, so that a script can take it with $(...). All other
    # lines go to standard error.
    click.echo(
        pushing.push(job, wanted, sys.argv[0], given["timeout"], say, everywhere=given["all_nodes"])
    )


@stage.command(short_help="Remove the copies.")
@_base
@_timeout
def clean(base: str, timeout: float) -> None:
    """In a job: remove what was staged for it. Without this command, that happens when the job
    ends.
    """
    pushing.clean(Job.of(os.environ, base), timeout, say)
