"""The pipeline: who am I, which interface, where is rank 0, store and process group, the script, its end.

Every step returns a value that the next one takes; the steps do not know each other. :func:`launch` is the
way below a supervisor; ``inside`` goes the same way within a process that something else started.
"""

from __future__ import annotations

import os
import resource
import signal
from collections.abc import Callable
from dataclasses import asdict

from srunddp.bootstrap import channels, mpi, process_group, world
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
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        ours.end.close()
        return _work(prepared, script, theirs)
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


def _launcher(environment: Environment) -> int:
    if environment.launcher in ("none", "explicit variables"):
        return 0
    return signals.launcher(environment.sources["rank"].partition("=")[0])


def _told_by_worker(worker: Pipe, timeout: float) -> str:
    """In the supervisor: MPI is spoken by the worker, which then says what it was told."""
    worker.end.settimeout(timeout)
    answer = worker.receive()
    worker.end.settimeout(None)
    if answer is None:
        raise RendezvousError(
            "MPI did not start",
            expected="MPI_Init to return in every rank",
            cure="see MPI's own message, or use --channel slurm or pmi",
        )
    if "no_world" in answer:
        raise mpi.NoWorldError(answer["no_world"])
    if "failed" in answer:
        raise RendezvousError(answer["failed"], scope=Scope.JOB)
    return str(answer["told"])


def _work(prepared: Prepared, script: user_script.Script, supervisor: Pipe) -> int:
    """In the worker: meet over MPI where that is the channel, wait to be told, become the script."""
    environment, held = prepared.environment, prepared.held
    if held:
        held.line.close()
    if environment.world_size > 1 and environment.channels[0] == "mpi":
        message = f"{channels.token(environment)}@{held.line_address}" if held else None
        supervisor.send(_told_by_mpi(message, prepared))
    answer = supervisor.receive()
    if answer is None:
        os._exit(RendezvousError.exit_code)
    process_group.install(joined(prepared, Meeting(**answer)))
    code = user_script.run(script)
    world.settle()
    if code == 0:
        # Rank 0 hosts the store: it leaves after the others, or they would miss it.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        supervisor.send({"done": True})
        supervisor.receive()
    return code


def _told_by_mpi(message: str | None, prepared: Prepared) -> dict[str, str]:
    try:
        return {"told": mpi.broadcast(message, prepared.environment.world_size, prepared.interface.name)}
    except mpi.NoWorldError as reason:
        return {"no_world": str(reason)}
    except RendezvousError as error:
        return {"failed": str(error)}
