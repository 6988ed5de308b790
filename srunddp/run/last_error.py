"""An error that ends a rank before its script ran: it is printed once, by the rank that is to."""

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
    """Who prints an error."""

    THIS_RANK = auto()
    ANOTHER_RANK = auto()  # all see the same error, or rank 0 has been told of this rank's
    NOBODY = auto()  # it has been printed


def leave_before_meeting(
    error: SrunddpError,
    environment: Environment,
    options: RendezvousOptions,
    interface: SelectedInterface | None,
) -> NoReturn:
    """Let the other ranks know of an error from before the rendezvous, and end this process.

    Args:
        error: this rank's.
        environment: this rank's.
        options: how the ranks were to meet.
        interface: this rank's, where that was chosen before.
    """
    if environment.rank == 0:
        # Before the others know: a launcher kills all ranks at the first bad end.
        write_stderr(f"srunddp: error: {error}\n")
        report_early_failure(environment, options, error, interface)
        leave(error, environment, options.rejoin, printer=Printer.NOBODY)
    # An error of the whole job is seen by all ranks, and rank 0 prints it without being told.
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
    """Print an error if this rank is the one to do so, and end this process.

    Args:
        error: this rank's.
        environment: this rank's; None where the error is about that.
        rejoin: what the start before has handed over; None in the first.
        printer: who prints the error; None to go by its scope.
    """
    # After a restart with spare nodes this side of a split network may be the one without a rank
    # 0. An error that all ranks see has another reason.
    replaces_lost_ranks = rejoin is not None and rejoin.spare_nodes is not None
    may_be_cut_off = replaces_lost_ranks and error.scope is not Scope.JOB
    if may_be_cut_off and environment and environment.rank:
        error = RendezvousError(
            f"{environment.node} has not met the others again: {error.found}", scope=Scope.NODE
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
            # A launcher kills all ranks at the first bad end: the one that prints comes first.
            time.sleep(_OTHERS_PRINT_WITHIN)
        case Printer.NOBODY:
            pass


def _printer(error: SrunddpError, environment: Environment | None) -> Printer:
    """Who prints an error, by who else sees it."""
    if error.said:
        return Printer.NOBODY
    if environment:
        rank = environment.rank
        local_rank = environment.local_rank
    else:
        # The environment itself is wrong, but the ranks that its variables name are good enough to
        # decide who speaks.
        rank, local_rank = likely_ranks(os.environ)
    match error.scope:
        case Scope.JOB:
            is_first = rank == 0
        case Scope.NODE:
            is_first = local_rank == 0
        case Scope.RANK:
            is_first = True
    return Printer.THIS_RANK if is_first else Printer.ANOTHER_RANK
