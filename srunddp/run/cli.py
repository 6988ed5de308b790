"""The command ``srunddp run``, from its options to the exit code. An error of the command is
printed, and this process ended, from here.
"""

from typing import Any

import click

from srunddp.errors import SrunddpError
from srunddp.run.command import RunCommand
from srunddp.run.last_error import leave
from srunddp.run.options import GROUPS, with_options
from srunddp.run.plan import find_environment, make_plan
from srunddp.run.restart import inherited_start
from srunddp.run.start import start
from srunddp.run.worker import exit_without_teardown
from srunddp.util.click_types import FILE, MonitoredCommand


@click.command(cls=MonitoredCommand, groups=GROUPS)
@with_options
@click.argument("script", type=FILE, required=False, metavar="SCRIPT")
@click.argument("arguments", nargs=-1, type=FILE, metavar="[ARGUMENTS]...")
def run(**given: Any) -> None:
    """Run SCRIPT as one rank of the world that srun or mpirun started, one process per GPU.

    \b
    srun --ntasks-per-node=8 srunddp train.py
    mpirun -n 2 srunddp train.py

    Python's own options are given as variables: PYTHONUNBUFFERED=1, PYTHONOPTIMIZE=1.
    """
    command = RunCommand.from_click(given)
    inherited = inherited_start()  # called before anything in this process changes
    environment = None
    try:
        if command.explain:
            from srunddp.explain.cli import explained

            explained(given)
        environment = find_environment(command, inherited.rejoin)
        plan = make_plan(command, environment, inherited.rejoin)
        ended = start(plan, inherited)
    except SrunddpError as error:
        leave(error, environment, inherited.rejoin)
    # Only the supervisor gets here: in start() the worker becomes the script, and ends.
    exit_without_teardown(ended.exit_code, by=ended.ends_by)
