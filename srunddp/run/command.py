"""The command line of ``srunddp run`` as data."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import click
from click.core import ParameterSource

from srunddp.supervisor.limits import LOST_AFTER
from srunddp.util.quick_dataclass import dataclass

# The default of --lost-after, in seconds, if the run can go on without a node. It is shorter than
# LOST_AFTER, because giving up a node too early then costs little.
_LOST_AFTER_IF_NODES_CHANGE = 15.0
LOST_AFTER_HELP = (
    f"[default: {LOST_AFTER:.0f}s; with --spare-nodes or --min-nodes"
    f" {_LOST_AFTER_IF_NODES_CHANGE:.0f}s]"
)


def default_lost_after(spare_nodes: int, min_nodes: int = 0) -> float:
    """Return the default of ``--lost-after`` in seconds; it is shorter if the run can go on without
    a node.
    """
    if spare_nodes or min_nodes:
        return _LOST_AFTER_IF_NODES_CHANGE
    return LOST_AFTER


def is_chosen(parameter: str) -> bool:
    """Return whether the user has given a parameter of the running command, as an option or by an
    environment variable; False if no command runs. Call this in the thread in which the command
    began, because click knows the command only there.
    """
    context = click.get_current_context(silent=True)
    if context is None:
        return False
    source = context.get_parameter_source(parameter)
    return source in (ParameterSource.COMMANDLINE, ParameterSource.ENVIRONMENT)


@dataclass(frozen=True, kw_only=True, eq=False)
class RunCommand:
    """The options and arguments as given or by default; their meaning is not checked yet.

    Attributes:
        script: The name of a file or, with ``module``, of a module; None if none was given.
        arguments: The script's own arguments.
        module: Whether ``script`` is the name of a module.
        backend: The backend for ``srunddp.init()``; None for its own choice.
        ifaces: The path of an ifaces.conf; None to look for it in the default places.
        channel: How the ranks find rank 0; None for the first available way.
        port: The ports that a firewall leaves open, as ``N-M``; None for any.
        timeout: Seconds that the ranks wait for each other at the rendezvous.
        restarts: How often all ranks may be restarted.
        restart_grace: Seconds that all ranks may take to end before a restart.
        spare_nodes: The number of spare nodes.
        min_nodes: The least number of nodes with which the run goes on when no spare node is left;
            0 to go on only with all nodes.
        stall_timeout: Seconds without a step of any rank after which the run stops; 0 for no limit.
        lost_after: Seconds without an answer after which a node is lost.
        grace: Seconds that a script may take to end after it has failed or stopped, or if it
            handles SIGTERM.
        signal_grace: Seconds that the other ranks may continue to save when the launcher has sent
            a signal and one rank has ended by it.
        fast_exit: Whether to skip Python's teardown at the end of the script.
        result: The file to which the exit code and the number of restarts are written; None to
            write none.
        log_dir: The folder for the ranks' output; None to write no files.
        show_ranks: With ``log_dir``, the ranks that are also shown on the terminal; None for rank
            0.
        prefix: Whether to put node and rank before each line on the terminal.
        quiet: Whether to leave out the summary line.
        verbose: Whether to print a line for each rank.
        monitor: Seconds between readings; None for no monitoring.
        monitor_dir: The folder for the readings; None for the folder of the output.
        offline: Whether to set the variables of :func:`srunddp.stage.offline.offline`.
        staged: Whether to run in the copies that :mod:`srunddp.stage.paths` finds.
        bind: ``auto`` to run on the CPUs next to the GPU, or ``none`` to leave the affinity mask as
            it is.
        explain: Whether to print what decided each value of the environment and exit, without
            running the script.
    """

    script: str | None
    arguments: tuple[str, ...]
    module: bool
    backend: str | None
    ifaces: str | None
    channel: str | None
    port: str | None
    timeout: float
    restarts: int
    restart_grace: float
    spare_nodes: int
    min_nodes: int
    stall_timeout: float
    lost_after: float
    grace: float
    signal_grace: float
    fast_exit: bool
    result: str | None
    log_dir: str | None
    show_ranks: str | None
    prefix: bool
    quiet: bool
    verbose: bool
    monitor: float | None
    monitor_dir: str | None
    offline: bool
    staged: bool
    bind: str
    explain: bool

    @classmethod
    def from_click(cls, given: Mapping[str, Any]) -> RunCommand:
        """Return the command line as an instance of this class. No other code looks up click's
        parameters by name.

        Args:
            given: The parameters that click passes to the command, by name.
        """
        return cls(
            script=given["script"],
            arguments=given["arguments"],
            module=given["module"],
            backend=given["backend"],
            ifaces=given["ifaces"],
            channel=given["channel"],
            port=given["port"],
            timeout=given["timeout"],
            restarts=given["restarts"],
            restart_grace=given["restart_grace"],
            spare_nodes=given["spare_nodes"],
            min_nodes=given["min_nodes"],
            stall_timeout=given["stall_timeout"],
            # None means that the option was not given; 0 cannot be given (LOST_LEAST).
            lost_after=given["lost_after"]
            or default_lost_after(given["spare_nodes"], given["min_nodes"]),
            grace=given["grace"],
            signal_grace=given["signal_grace"],
            fast_exit=given["fast_exit"],
            result=given["result"],
            log_dir=given["log_dir"],
            show_ranks=given["show_ranks"],
            prefix=given["prefix"],
            quiet=given["quiet"],
            verbose=given["verbose"],
            monitor=given["monitor"],
            monitor_dir=given["monitor_dir"],
            offline=given["offline"],
            staged=given["staged"],
            bind=given["bind"],
            explain=given["explain"],
        )
