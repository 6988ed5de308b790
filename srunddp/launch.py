"""The pipeline: who am I, which interface, where is rank 0, store and process group, the script, its end.

Every step returns a value that the next one takes; the steps do not know each other. :func:`launch` is the
way below a supervisor; ``inside`` goes the same way within a process that something else started.
"""

from __future__ import annotations

import os
import resource
import select
from collections.abc import Callable
from dataclasses import asdict

from srunddp.bootstrap import mpi
from srunddp.bootstrap.environment import Environment
from srunddp.bootstrap.line import Meeting
from srunddp.errors import RendezvousError, Scope
from srunddp.meeting import Prepared, meet
from srunddp.run import signals
from srunddp.run.script import Script
from srunddp.run.supervisor import Met, Pipe, Supervisor, pipe
from srunddp.worker import work


def launch(
    prepared: Prepared, script: Script, told: Callable[[Meeting], None], say: Callable[[str], None] = lambda _: None
) -> int:
    """Run the script below a supervisor.

    Args:
        prepared: by :func:`bind`.
        script: the user's.
        told: called in the supervisor when all have met.
        say: takes rank 0's lines while it waits for the others.

    Returns:
        The exit code: in the worker the script's own, in the supervisor the one to leave with.

    Raises:
        SrunddpError: the ranks did not meet.
    """
    ours, theirs = pipe()
    supervisor, mask = os.getpid(), signals.block()
    worker = os.fork()
    if worker == 0:
        signals.die_with_parent(supervisor)
        ours.end.close()
        return work(prepared, script, theirs, mask)
    theirs.end.close()
    if prepared.held:
        prepared.held.store.close()
        _allow_many_lines()

    def meet_others() -> Met:
        company = meet(prepared, lambda _: _told_by_worker(ours, prepared.options.timeout), say)
        return Met(asdict(company.meeting), tuple(company.lines.values()))

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
