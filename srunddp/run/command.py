"""What a command line of ``srunddp run`` says, as data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from srunddp.supervisor.limits import LOST_AFTER

# The defaults of options that no other command has; of others they stand beside their use.
GRACE = 30.0
RESTART_GRACE = 2.0
_LOST_AFTER_WITH_SPARES = 15.0  # where another node takes over, a loss costs little more than that
LOST_AFTER_HELP = f"[default: {LOST_AFTER:.0f}s; with --spare-nodes {_LOST_AFTER_WITH_SPARES:.0f}s]"


def default_lost_after(spare_nodes: int) -> float:
    """Return the default of ``--lost-after`` in seconds, which depends on ``--spare-nodes``."""
    if spare_nodes:
        return _LOST_AFTER_WITH_SPARES
    return LOST_AFTER


@dataclass(frozen=True, kw_only=True, eq=False)
class RunCommand:
    """The options and arguments, as they were given or by their defaults; nothing is looked at yet.

    Attributes:
        script: a file's name, or with ``module`` a module's; None where none was given.
        arguments: the script's own.
        module: whether ``script`` is a module's name.
        backend: for ``srunddp.init()``; None for its own choice.
        ifaces: the file of interface entries; None for those of default places.
        channel: the way to rank 0; None for the first that is there.
        port: the ports that a firewall leaves open, as ``N-M``; None for any.
        timeout: seconds that the ranks wait for each other.
        restarts: how often all ranks may start anew.
        restart_grace: seconds that all ranks may take to end before a restart.
        spare_nodes: how many nodes wait to take the ranks of others.
        stall_timeout: seconds without a step of any rank; 0 for no limit.
        lost_after: seconds without an answer after which a node is lost.
        grace: seconds that a failed or stopped script may take to end.
        fast_exit: end without taking Python's objects down.
        result: the file for exit code and restarts; None for none.
        log_dir: the folder for the ranks' output; None to write no files.
        show_ranks: with ``log_dir`` the ranks on the terminal too; None for rank 0.
        prefix: put node and rank before each line on the terminal.
        quiet: do not print the summary line.
        verbose: print a line for each rank.
        monitor: seconds between samples; None for no monitoring.
        monitor_dir: where the samples go; None for the folder of the output.
        offline: export what :func:`srunddp.stage.offline.offline` says.
        staged: run in the copies that :mod:`srunddp.stage.paths` reads of.
        bind: ``auto`` to run on the CPUs next to the GPU, or ``none``.
        explain: print what decided each value, and exit.
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
    stall_timeout: float
    lost_after: float
    grace: float
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
        """Take the parameters that click hands to the command.

        This is the one place where their names are texts.
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
            stall_timeout=given["stall_timeout"],
            # A given one is never 0, see LOST_LEAST.
            lost_after=given["lost_after"] or default_lost_after(given["spare_nodes"]),
            grace=given["grace"],
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
