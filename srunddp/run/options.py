"""The options of ``srunddp run``. ``srunddp sbatch`` builds its own options from the same table, so
that an option means the same in both commands.
"""

import os
from collections.abc import Callable
from typing import Any

import click

from srunddp.bootstrap.environment.detect import CHANNELS
from srunddp.bootstrap.process_group.device import BACKENDS
from srunddp.bootstrap.rendezvous.rank_setup import DEFAULT_TIMEOUT
from srunddp.run.command import LOST_AFTER_HELP
from srunddp.supervisor.limits import GRACE, RESTART_GRACE, SIGNAL_GRACE, STALL_TIMEOUT
from srunddp.util.click_types import (
    DIR,
    LOST_LEAST,
    ifaces_option,
    limit,
    module_option,
    monitor_option,
)

_Declaration = Callable[[Any], Any]


class _AbsolutePath(click.Path):
    """A path that is made absolute while options are read, because with --staged the process later
    changes its working directory.

    click's resolve_path is not used, because it would replace /dev/stdout by the target of this
    link, which may be a pipe without a name.
    """

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Check the path as click does, and make it absolute."""
        return os.path.abspath(super().convert(value, param, ctx))


# By each heading of --help, the options under it, in the order in which --help lists them.
_DECLARED: dict[str, tuple[_Declaration, ...]] = {
    "Network and rendezvous": (
        ifaces_option,
        click.option(
            "--backend",
            type=click.Choice(BACKENDS),
            help="Backend of srunddp.init() (default: auto).",
        ),
        click.option(
            "--channel",
            type=click.Choice(CHANNELS),
            help="How ranks find rank 0 (default: the first available).",
        ),
        click.option("--port", metavar="N-M", help="Ports that a firewall leaves open on rank 0."),
        limit(
            "--timeout",
            DEFAULT_TIMEOUT,
            "How long the ranks wait for each other.",
            "SRUNDDP_TIMEOUT",
        ),
    ),
    "Failures": (
        click.option(
            "--restarts",
            type=click.IntRange(0),
            default=0,
            metavar="N",
            help="How often all ranks may be restarted.",
        ),
        limit(
            "--restart-grace",
            RESTART_GRACE,
            "How long all ranks may take to end before a restart.",
            positive=False,
        ),
        click.option(
            "--spare-nodes",
            type=click.IntRange(0),
            default=0,
            metavar="K",
            help="Let the last K nodes wait, to replace others.",
        ),
        click.option(
            "--min-nodes",
            type=click.IntRange(0),
            default=0,
            metavar="N",
            help="With no spare node left, go on with fewer nodes, at least N.",
        ),
        limit(
            "--stall-timeout",
            STALL_TIMEOUT,
            "Stop the run when no rank makes a step for this long; 0 for no limit. See"
            " srunddp.heartbeat().",
            "SRUNDDP_STALL_TIMEOUT",
            positive=False,
        ),
        limit(
            "--lost-after",
            None,
            f"A node that is silent for this long is lost. {LOST_AFTER_HELP}",
            least=LOST_LEAST,
        ),
        limit(
            "--grace",
            GRACE,
            "How long a script may take to end if it has failed or stopped, or handles SIGTERM.",
            positive=False,
        ),
        limit(
            "--signal-grace",
            SIGNAL_GRACE,
            "How long ranks may still save after the launcher's signal, once one has ended by it.",
            positive=False,
        ),
        click.option(
            "--fast-exit", is_flag=True, help="Skip Python's teardown at the end of the script."
        ),
    ),
    "Output and monitoring": (
        click.option(
            "--result",
            type=_AbsolutePath(),
            metavar="FILE",
            help="Write the exit code and the number of restarts to FILE.",
        ),
        click.option(
            "--log-dir",
            type=DIR,
            envvar="SRUNDDP_LOG_DIR",
            show_envvar=True,
            help="Write each rank's output to a file.",
        ),
        click.option(
            "--show-ranks",
            metavar="RANKS",
            help="With --log-dir: the ranks that are also shown on the terminal (default: 0).",
        ),
        click.option(
            "--prefix", is_flag=True, help="Put node and rank before each line on the terminal."
        ),
        click.option("--quiet", is_flag=True, help="Do not print the summary line."),
        click.option(
            "--verbose", is_flag=True, help="Print one line per rank: [RANK r] WORLD_SIZE=w."
        ),
        monitor_option,
        click.option(
            "--monitor-dir",
            type=DIR,
            help="Where the readings go (default: --log-dir's folder, else logs).",
        ),
    ),
    "Environment": (
        module_option,
        click.option(
            "--offline",
            is_flag=True,
            help="Set HF_*_OFFLINE, cache folders and thread counts for Hugging Face.",
        ),
        click.option(
            "--staged",
            is_flag=True,
            help="Run in the copies that `srunddp stage push` made, on nodes that have them.",
        ),
        click.option(
            "--bind",
            type=click.Choice(("none", "auto")),
            default="none",
            help="auto: run on the CPUs next to the GPU.",
        ),
    ),
    "Other": (
        click.option(
            "--explain", is_flag=True, help="Print what decided each value, per rank, and exit."
        ),
    ),
}


def with_options(function: Any) -> Any:
    """Return a command's function with all options added, as if it were decorated with each."""
    in_order = [declare for declarations in _DECLARED.values() for declare in declarations]
    for declare in reversed(in_order):
        function = declare(function)
    return function


def _options_of(declarations: tuple[_Declaration, ...]) -> list[click.Option]:
    """Return the option that each of these decorators adds to a command."""

    @click.command
    def holder() -> None: ...

    for declare in declarations:
        declare(holder)
    return [option for option in holder.params if isinstance(option, click.Option)]


_BY_GROUP = {title: _options_of(declarations) for title, declarations in _DECLARED.items()}
# All options, by the name of their parameter, such as stall_timeout.
OPTIONS = {
    option.name: option for options in _BY_GROUP.values() for option in options if option.name
}
# The groups as GroupedCommand takes them. "Other" is left out, because GroupedCommand lists the
# options that are in no group under this heading.
GROUPS = {
    title: " ".join(option.name for option in options if option.name)
    for title, options in _BY_GROUP.items()
    if title != "Other"
}
