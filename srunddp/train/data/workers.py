"""How many loader workers a rank has, and how they start."""

import multiprocessing
import os
import socket
import sys
from pathlib import Path

import torch

from srunddp.bootstrap.environment import cpus as of_rank
from srunddp.bootstrap.environment import mpi
from srunddp.train.data.fingerprint import hashed
from srunddp.train.world import World, all_gather_ints

_INFINIBAND = Path("/sys/class/infiniband")
_MOST = 8


def default_workers(cpus: int) -> int:
    """Workers of one loader, of so many CPUs of its rank."""
    return min(_MOST, max(cpus - 1, 0))


def start_method(method: str | None, backend: str) -> str:
    """The ``method`` that the user wants, else ``fork`` or ``forkserver``; only for loaders that
    have workers.

    A fork of a process in which MPI runs, or which has memory registered for RDMA as NCCL has, may
    crash or hang. The fork server is started apart and has neither. As with spawn, each of its
    workers imports the script: one that would train there too, since it does not ask for its
    ``__name__``, gets fork.
    """
    if method is None:
        unsafe = mpi.is_running() or (backend == "nccl" and any(_INFINIBAND.glob("*")))
        if unsafe and _may_be_imported():
            method = "forkserver"
        else:
            method = "fork"
    if method == "forkserver":
        # Once in the server, rather than for two seconds in each worker.
        multiprocessing.set_forkserver_preload(["torch"])
    return method


def _may_be_imported() -> bool:
    """Whether importing the script runs it no second time, as far as its text tells."""
    script = getattr(sys.modules.get("__main__"), "__file__", None)
    try:
        return script is None or "__name__" in Path(script).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return True


def share(world: World) -> int:
    """How many CPUs this rank may use for itself, at least 1; a collective.

    Those of its affinity mask, divided among the ranks of its node that have the same; see
    :func:`srunddp.bootstrap.environment.cpus.share`.
    """
    own = [hashed(socket.gethostname()), hashed(of_rank.mask())]
    return of_rank.share(of_rank.usable(), all_gather_ints(world, own).count(own), os.environ)


def set_threads(cpus: int, wanted: int | None) -> None:
    """Give torch ``wanted`` threads; where None, no more than ``cpus`` unless the user's
    environment says how many.
    """
    if wanted is not None:
        torch.set_num_threads(wanted)
    elif not {*of_rank.THREADS} & os.environ.keys() and torch.get_num_threads() > cpus:
        torch.set_num_threads(cpus)
