"""Provides ``srunddp.init()``, which joins the world from a script, supervised or not."""

from __future__ import annotations

import atexit
import contextlib
import logging
import multiprocessing
import os
import socket
import time
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING

from srunddp.bootstrap.environment import mpi
from srunddp.bootstrap.environment.detect import detect
from srunddp.bootstrap.process_group import store
from srunddp.bootstrap.process_group.device import idle_gpus
from srunddp.bootstrap.process_group.store import process_group_context
from srunddp.bootstrap.process_group.world import open_world, wait_for_gloo_threads
from srunddp.bootstrap.rendezvous.early_failure import report_early_failure
from srunddp.bootstrap.rendezvous.messages import Goodbye, RendezvousMessage
from srunddp.bootstrap.rendezvous.rank_setup import RendezvousOptions, bind, prepare
from srunddp.bootstrap.rendezvous.roles import rendezvous
from srunddp.errors import ConfigError, SrunddpError
from srunddp.telemetry import is_supervised
from srunddp.util.excepthook import install_excepthook
from srunddp.util.messages import receive, send

if TYPE_CHECKING:
    from srunddp.bootstrap.process_group.world import World

_log = logging.getLogger("srunddp")
# Seconds for which rank 0 waits for the goodbyes of all ranks together.
_GOODBYES_WITHIN = 30.0


def init(
    backend: str | None = None, *, timeout: timedelta | None = None, device_id: bool = False
) -> World:
    """Join the world: choose the device and initialise the default process group on the right
    interface.

    The script may have been started by ``srunddp``, or directly by srun or mpirun. Ranks that srun
    or mpirun started directly wait for each other for at most 300 s, and have no supervisor.

    The chosen device becomes torch's current one. It is the CPU if no GPU is visible. If several
    GPUs are visible, it is the one with number ``local_rank``, or the first if each rank sees other
    GPUs, as with ``--gpus-per-task=2``.

    Args:
        backend: ``nccl``, ``gloo`` or ``auto``; None for the value of ``--backend``, else ``auto``.
        timeout: the time limit of collectives and of the store, as in ``init_process_group``; None
            for torch's default.
        device_id: with NCCL, pass the device to ``init_process_group``. torch then makes the
            communicator at once, and splits the communicators of subgroups from it. All ranks must
            take part in making each subgroup, even a subgroup of Gloo, or the call hangs.

    Returns:
        The world, a context manager that destroys the process group when the ``with`` block ends
        without an error.

    Raises:
        SrunddpError: the environment or configuration is wrong, there are too few GPUs, two ranks
            of NCCL have the same GPU (allowed by ``NCCL_MULTI_RANK_GPU_ENABLE=1``), or the
            rendezvous failed.
    """
    if multiprocessing.parent_process() is not None:
        raise ConfigError(
            "srunddp.init() in a process that multiprocessing started",
            expected="one call per rank",
            hint='keep it below `if __name__ == "__main__":`',
        )
    if store.is_fork_of_rank():
        raise ConfigError(
            "srunddp.init() in a process that a rank has forked",
            expected="one call per rank",
            hint="call it in the rank, before the fork",
        )
    place = store.current_context() or _meet_in_process(
        RendezvousOptions(backend=backend or "auto")
    )
    world, warning = open_world(place, backend or place.backend, timeout, device_id=device_id)
    # A rank with a supervisor does not warn if the supervisor has already printed a note about the
    # idle GPUs.
    is_said = is_supervised() and world.rank == 0 and idle_gpus(place.environment, os.environ)
    if warning and world.local_rank == 0 and not is_said:
        _log.warning("srunddp: %s", warning)
    return world


def _meet_in_process(options: RendezvousOptions) -> store.ProcessGroupContext:
    install_excepthook()
    environment = detect(os.environ)
    if mpi.is_running() and (
        over_mpi := [each for each in environment.discoveries if each.starts_mpi]
    ):
        # MPI has already used the PMI socket, which can be used only once. So use only the way that
        # goes over MPI itself.
        environment = replace(environment, discoveries=tuple(over_mpi))
    if environment.rank == 0:
        for note in environment.notes:
            _log.warning("srunddp: %s", note)
    interface = None
    try:
        setup = prepare(options, environment)
        # Keep the interface for the report in case bind() fails.
        interface = setup.interface
        setup = bind(setup)
    except SrunddpError as error:
        report_early_failure(environment, options, error, interface)
        raise
    broadcast = partial(
        mpi.broadcast, world_size=environment.world_size, interface=setup.interface.name
    )
    result = rendezvous(setup, broadcast, partial(_log.warning, "srunddp: %s"))
    place = process_group_context(setup, result.meeting)
    store.install(place)
    if environment.rank == 0 and environment.world_size > 1:
        text = "srunddp: %d ranks without a supervisor; start with `srunddp SCRIPT` to have one"
        _log.warning(text, environment.world_size)
    # atexit calls the handlers in reverse order of their registration. So handlers that the script
    # registers later run before _leave(), and can still use the process group.
    atexit.register(_leave, os.getpid(), environment.rank, tuple(result.connections.values()))
    return place


def _leave(pid: int, rank: int, connections: tuple[socket.socket, ...]) -> None:
    """End a rank that has no supervisor: destroy its process group, and say goodbye to rank 0.

    Rank 0 waits for the goodbyes of the other ranks, because they may still need its store. It
    destroys its process group before it waits, so that the others notice if rank 0 ends early, and
    it waits for at most ``_GOODBYES_WITHIN`` seconds.

    Args:
        pid: the process id of the rank. In any other process the function does nothing.
        rank: this rank's number.
        connections: on rank 0 the connections to all other ranks; on another rank the connection to
            rank 0.
    """
    import torch.distributed as dist

    # A process that the script has forked inherits the handler and the connections, but is no rank.
    if os.getpid() != pid:
        return
    if dist.is_initialized():
        dist.destroy_process_group()
    wait_for_gloo_threads()
    deadline = time.monotonic() + _GOODBYES_WITHIN
    for connection in connections:
        if rank == 0:
            with contextlib.suppress(OSError):
                receive(connection, RendezvousMessage, deadline)
        else:
            send(connection, Goodbye())
