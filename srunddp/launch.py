"""The pipeline: who am I, which interface, where is rank 0, store and process group, the script, its end.

Every step returns a value that the next one takes; the steps do not know each other. :func:`launch` is the
way below a supervisor; ``inside`` goes the same way within a process that something else started.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import resource
import select
import signal
import sys
import threading
from collections.abc import Callable
from dataclasses import asdict
from typing import Any, NoReturn

from srunddp.bootstrap import mpi, process_group, world
from srunddp.bootstrap.environment import Environment
from srunddp.bootstrap.line import Meeting
from srunddp.errors import RendezvousError, Scope
from srunddp.meeting import Prepared, bind, joined, meet
from srunddp.run import script as user_script
from srunddp.run import signals
from srunddp.run.supervisor import Met, Pipe, Supervisor, pipe


def launch(prepared: Prepared, script: user_script.Script, told: Callable[[Meeting], None]) -> int:
    """Run the script below a supervisor.

    Args:
        prepared: by :func:`prepare`.
        script: the user's.
        told: called in the supervisor when all have met.

    Returns:
        The exit code: in the worker the script's own, in the supervisor the one to leave with.

    Raises:
        SrunddpError: the ranks did not meet.
    """
    prepared = bind(prepared)
    ours, theirs = pipe()
    supervisor, mask = os.getpid(), signals.block()
    worker = os.fork()
    if worker == 0:
        signals.die_with_parent(supervisor)
        ours.end.close()
        return _work(prepared, script, theirs, mask)
    theirs.end.close()
    if prepared.held:
        prepared.held.store.close()
        _allow_many_lines()

    def meet_others() -> Met:
        meeting, lines = meet(prepared, lambda _: _told_by_worker(ours, prepared.options.timeout))
        return Met(asdict(meeting), lines)

    return Supervisor(
        worker=worker,
        pipe=ours,
        meet=meet_others,
        told=lambda met: told(Meeting(**met.message)),
        launcher=_launcher(prepared.environment),
        last=prepared.environment.rank == 0,
    ).run()


def _allow_many_lines() -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _launcher(environment: Environment) -> int | None:
    if environment.launcher in ("none", "explicit variables"):
        return None
    return signals.launcher(environment.sources["rank"].partition("=")[0])


def _told_by_worker(worker: Pipe, timeout: float) -> str:
    """In the supervisor: MPI is spoken by the worker, which then says what it was told."""
    if not select.select([worker.end], [], [], timeout)[0]:
        raise RendezvousError(
            f"MPI_Init did not return within {timeout:g} s",
            expected="all ranks to start",
            cure="see whether one did not start or ended before; raise --timeout",
        )
    answer = worker.receive()
    if answer is None:
        raise RendezvousError(
            "the worker ended in MPI_Init",
            expected="MPI to start in every rank",
            cure="see MPI's own message; mpi4py must be built for the launcher's MPI",
        )
    if "no_world" in answer:
        raise mpi.NoWorldError(answer["no_world"])
    if "failed" in answer:
        raise RendezvousError(answer["failed"], scope=Scope.JOB)
    return str(answer["told"])


def _work(prepared: Prepared, script: user_script.Script, supervisor: Pipe, mask: set[signal.Signals]) -> int:
    """In the worker: meet over MPI where that is the channel, wait to be told, become the script."""
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
