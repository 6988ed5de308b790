"""The command ``srunddp run``, from its options to the exit code. This module may print and
exit.
"""

from typing import Any

import click

from srunddp.bootstrap.environment.detect import CHANNELS
from srunddp.bootstrap.process_group.device import BACKENDS
from srunddp.bootstrap.rendezvous.rank_setup import DEFAULT_TIMEOUT
from srunddp.errors import SrunddpError
from srunddp.run.command import LOST_AFTER_HELP, RunCommand
from srunddp.run.last_error import leave
from srunddp.run.plan import find_environment, make_plan
from srunddp.run.restart import inherited_start
from srunddp.run.start import start
from srunddp.run.worker import exit_without_teardown
from srunddp.supervisor.limits import GRACE, RESTART_GRACE, SIGNAL_GRACE, STALL_TIMEOUT
from srunddp.util.click_types import (
    DIR,
    FILE,
    LOST_LEAST,
    Run,
    ifaces_option,
    limit,
    module_option,
    monitor_option,
)


@click.command(
    cls=Run,
    groups={
        "Network and rendezvous": "ifaces backend channel port timeout",
        "Failures": (
            "restarts restart_grace spare_nodes stall_timeout lost_after grace signal_grace"
            " fast_exit"
        ),
        "Output and monitoring": (
            "result log_dir show_ranks prefix quiet verbose monitor monitor_dir"
        ),
        "Environment": "module offline staged bind",
    },
)
@click.option("--backend", type=click.Choice(BACKENDS), help="For srunddp.init() (default: auto).")
@ifaces_option
@limit("--timeout", DEFAULT_TIMEOUT, "How long the ranks wait for each other.", "SRUNDDP_TIMEOUT")
@click.option(
    "--channel",
    type=click.Choice(CHANNELS),
    help="How ranks find rank 0 (default: the first available).",
)
@click.option("--port", metavar="N-M", help="Ports that a firewall leaves open on rank 0.")
@click.option(
    "--restarts",
    type=click.IntRange(0),
    default=0,
    metavar="N",
    help="How often all ranks may start anew.",
)
@limit(
    "--restart-grace",
    RESTART_GRACE,
    "How long all ranks may take to end before it.",
    positive=False,
)
@limit(
    "--stall-timeout",
    STALL_TIMEOUT,
    "Stop the run when no rank makes a step for this long; 0 for no limit. See"
    " srunddp.heartbeat().",
    "SRUNDDP_STALL_TIMEOUT",
    positive=False,
)
@click.option(
    "--spare-nodes",
    type=click.IntRange(0),
    default=0,
    metavar="K",
    help="The last K nodes wait, to replace others.",
)
@limit(
    "--lost-after",
    None,
    f"A node that is silent for so long is lost. {LOST_AFTER_HELP}",
    least=LOST_LEAST,
)
@limit(
    "--grace",
    GRACE,
    "How long a script that has failed, stopped or handles SIGTERM may take to end.",
    positive=False,
)
@limit(
    "--signal-grace",
    SIGNAL_GRACE,
    "How long ranks may save after the launcher's signal, once one has ended by it.",
    positive=False,
)
@click.option(
    "--result",
    # Make the path absolute now, because with --staged the process changes its working directory.
    type=click.Path(resolve_path=True),
    metavar="FILE",
    help="Write exit code and restarts there.",
)
@click.option(
    "--log-dir",
    type=DIR,
    envvar="SRUNDDP_LOG_DIR",
    show_envvar=True,
    help="Write each rank's output to a file.",
)
@click.option(
    "--show-ranks",
    metavar="RANKS",
    help="With --log-dir: the ranks on the terminal too (default: 0).",
)
@click.option("--prefix", is_flag=True, help="Put node and rank before each line on the terminal.")
@monitor_option
@click.option(
    "--monitor-dir", type=DIR, help="Where the samples go (default: --log-dir's folder, else logs)."
)
@click.option(
    "--offline",
    is_flag=True,
    help="Set HF_*_OFFLINE, cache folders and thread counts for Hugging Face.",
)
@click.option(
    "--bind",
    type=click.Choice(("none", "auto")),
    default="none",
    help="auto: on the CPUs next to the GPU.",
)
@click.option(
    "--staged",
    is_flag=True,
    help="Run in the copies of `srunddp stage push`, where a node has them.",
)
@click.option("--fast-exit", is_flag=True, help="Skip Python's teardown at the end of the script.")
@click.option("--explain", is_flag=True, help="Print what decided each value, per rank, and exit.")
@click.option("--quiet", is_flag=True, help="Do not print the summary line.")
@click.option("--verbose", is_flag=True, help="Print one line per rank: [RANK r] WORLD_SIZE=w.")
@module_option
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
    inherited = inherited_start()  # before anything of this process is changed
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
    # The supervisor; its worker has become the script in start(), and ends there.
    exit_without_teardown(ended.exit_code, by=ended.ends_by)
