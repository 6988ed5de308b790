"""Errors that end a rank before its script runs. Exactly one rank prints each of them."""

from __future__ import annotations

import os
import sys
import time
from enum import Enum, auto
from typing import NoReturn

from srunddp.bootstrap.environment.detect import likely_ranks
from srunddp.bootstrap.environment.types import Environment
from srunddp.bootstrap.network.interface import SelectedInterface
from srunddp.bootstrap.rendezvous.early_failure import report_early_failure
from srunddp.bootstrap.rendezvous.rank_setup import Rejoin, RendezvousOptions
from srunddp.errors import RendezvousError, Scope, SrunddpError
from srunddp.util.console import write_stderr

_OTHERS_PRINT_WITHIN = 1.0  # seconds


class Printer(Enum):
    """Who prints an error that this rank ends with."""

    THIS_RANK = auto()
    # Another rank sees the same error and prints it, or rank 0 was told of this rank's error.
    ANOTHER_RANK = auto()
    NOBODY = auto()  # the error has been printed already


def leave_before_meeting(
    error: SrunddpError,
    environment: Environment,
    options: RendezvousOptions,
    interface: SelectedInterface | None,
) -> NoReturn:
    """End this process with an error that occurred before the rendezvous, after telling the other
    ranks of it.

    Args:
        error: The error on this rank.
        environment: This rank's environment.
        options: The options of the rendezvous.
        interface: This rank's interface; None if none was selected yet.
    """
    if environment.rank == 0:
        # Print first: a launcher kills all ranks as soon as one of them fails.
        write_stderr(f"srunddp: error: {error}\n")
        report_early_failure(environment, options, error, interface)
        leave(error, environment, options.rejoin, printer=Printer.NOBODY)
    # Rank 0 need not be told of an error with Scope.JOB: it sees the same error, and prints it.
    if error.scope is not Scope.JOB and report_early_failure(environment, options, error):
        _show(error, Printer.ANOTHER_RANK)
        sys.exit(error.exit_code)
    leave(error, environment, options.rejoin)


def leave(
    error: SrunddpError,
    environment: Environment | None,
    rejoin: Rejoin | None,
    *,
    printer: Printer | None = None,
) -> NoReturn:
    """Print an error if this rank is the one to do so; end this process with the error's exit code.

    Args:
        error: The error on this rank.
        environment: This rank's environment; None if the error is about the environment itself.
        rejoin: What the previous start has handed over; None in the first start.
        printer: Who prints the error; None to decide by the error's scope.
    """
    # After a restart with spare nodes, an error may mean that the network is split and this node is
    # cut off from rank 0. An error with Scope.JOB has another cause, because all ranks see it.
    replaces_lost_ranks = rejoin is not None and rejoin.spare_nodes is not None
    may_be_cut_off = replaces_lost_ranks and error.scope is not Scope.JOB
    if may_be_cut_off and environment and environment.rank:
        error = RendezvousError(
            f"{environment.node} did not rejoin the other ranks: {error.found}", scope=Scope.NODE
        )
    _show(error, printer or _printer(error, environment))
    if may_be_cut_off:
        from srunddp.spare_nodes.srun import await_srun

        await_srun()
    sys.exit(error.exit_code)


def _show(error: SrunddpError, printer: Printer) -> None:
    match printer:
        case Printer.THIS_RANK:
            write_stderr(f"srunddp: error: {error}\n")
        case Printer.ANOTHER_RANK:
            # Wait until the other rank has printed the error, because a launcher may kill all ranks
            # as soon as this one ends.
            time.sleep(_OTHERS_PRINT_WITHIN)
        case Printer.NOBODY:
            pass


def _printer(error: SrunddpError, environment: Environment | None) -> Printer:
    """Decide by the error's scope which rank prints it."""
    if error.said:
        return Printer.NOBODY
    if environment:
        rank = environment.rank
        local_rank = environment.local_rank
    else:
        # The error is about the environment, so the rank is not known for certain. The rank that
        # the launcher's variables suggest is good enough to choose who prints.
        rank, local_rank = likely_ranks(os.environ)
    match error.scope:
        case Scope.JOB:
            is_first = rank == 0
        case Scope.NODE:
            is_first = local_rank == 0
        case Scope.RANK:
            is_first = True
    return Printer.THIS_RANK if is_first else Printer.ANOTHER_RANK
