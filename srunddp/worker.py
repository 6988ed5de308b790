"""The process that the supervisor forked before any heavy import, and that becomes the user's script."""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import sys
import threading
from typing import Any, NoReturn

from srunddp.bootstrap import mpi, process_group, world
from srunddp.bootstrap.line import Meeting
from srunddp.errors import RendezvousError
from srunddp.meeting import Prepared, joined
from srunddp.run import script as user_script
from srunddp.run.supervisor import Pipe


def work(prepared: Prepared, script: user_script.Script, supervisor: Pipe, mask: set[signal.Signals]) -> int:
    """Meet over MPI where that is the channel, wait to be told, become the script.

    Args:
        prepared: by :func:`srunddp.meeting.bind`; script: the user's.
        supervisor: the pipe to it.
        mask: the signal mask from before the fork.

    Returns:
        The script's exit code.
    """
    environment, held = prepared.environment, prepared.held
    interrupt = _end_at(signal.SIGINT)  # Ctrl-C ends the wait for the others, and not with a traceback
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    if held:
        held.line.close()
    if environment.world_size > 1 and environment.channels[0] == "mpi":
        supervisor.send(_told_by_mpi(prepared))
    answer = supervisor.receive()
    if answer is None:
        os._exit(RendezvousError.exit_code)
    process_group.install(joined(prepared, Meeting(**answer)))
    signal.signal(signal.SIGINT, interrupt)
    code = user_script.run(script)
    world.settle()
    if code == 0:
        _wait_to_leave(supervisor)
    elif mpi.is_running():
        _leave_without_mpi(code)
    return code


def _wait_to_leave(supervisor: Pipe) -> None:
    """Rank 0 hosts the store: it leaves after the others, or they would miss it."""
    _end_at(signal.SIGINT)  # the script has ended, and its handlers have nothing left to end
    _end_at(signal.SIGTERM)
    supervisor.send({"done": True})
    supervisor.receive()


def _end_at(number: signal.Signals) -> Any:
    """Let a signal end this process, unless it is ignored; returns what it did before."""
    before = signal.getsignal(number)
    if before is not signal.SIG_IGN:
        signal.signal(number, signal.SIG_DFL)
    return before


def _leave_without_mpi(code: int) -> NoReturn:
    """End as Python does, except that MPI is not finalised: that waits for all ranks, and this one has failed."""
    threading._shutdown()  # type: ignore[attr-defined]  # private, as is the next; multiprocessing's children end so too
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)


def _told_by_mpi(prepared: Prepared) -> dict[str, str]:
    try:
        return {"told": mpi.broadcast(prepared.told, prepared.environment.world_size, prepared.interface.name)}
    except mpi.NoWorldError as reason:
        return {"no_world": str(reason)}
    except RendezvousError as error:
        return {"failed": str(error)}
