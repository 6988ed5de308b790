"""How many loader workers a rank has, and how they start."""

import multiprocessing
import os
import socket
import sys
import tempfile
from multiprocessing import util
from pathlib import Path

import torch

from srunddp.bootstrap.environment import cpus as of_rank
from srunddp.bootstrap.environment import mpi
from srunddp.train.data.fingerprint import hashed
from srunddp.train.data.script_text import uses_mpi_when_imported
from srunddp.train.world import World, all_gather_ints

_INFINIBAND = Path("/sys/class/infiniband")
_MOST = 8
_SOCKET = "/pymp-12345678/listener-12345678"  # as long as multiprocessing's, below its folder
_LONGEST_ADDRESS = 107  # bytes of a socket's path, by Linux


def default_workers(cpus: int) -> int:
    """Workers of one loader, of so many CPUs of its rank."""
    return min(_MOST, max(cpus - 1, 0))


def start_method(method: str | None, backend: str) -> str:
    """The ``method`` that the user wants, else ``fork`` or ``forkserver``; only for loaders that
    have workers.

    A fork of a process in which MPI runs, or which has memory registered for RDMA as NCCL has, may
    crash or hang. The fork server is started apart and has neither. As with spawn, each of its
    workers imports the script: one that would train or use MPI there too gets fork, and so does a
    script where the server's socket has no room.
    """
    room = make_room_for_sockets()
    if method is None:
        unsafe = mpi.is_running() or (backend == "nccl" and any(_INFINIBAND.glob("*")))
        if unsafe and room and _may_be_imported():
            method = "forkserver"
        else:
            method = "fork"
    if method == "forkserver":
        # Once in the server, rather than for two seconds in each worker.
        multiprocessing.set_forkserver_preload(["torch"])
    return method


def make_room_for_sockets() -> bool:
    """Have ``multiprocessing`` use a folder below /tmp if the one of TMPDIR is too long for its
    sockets, as from Python 3.14 on; returns whether they have room.

    The fork server has such a socket, and each worker that sends tensors, however it was started.
    """
    chosen = tempfile.tempdir
    if _has_room(tempfile.gettempdir()):
        return True
    tempfile.tempdir = "/tmp"
    try:
        # Made at the first call, which may have been the script's; used by all children from then
        # on, and removed when Python ends.
        folder = util.get_temp_dir()
    except OSError:
        return False
    finally:
        tempfile.tempdir = chosen
    return _has_room(str(Path(folder).parent))


def _has_room(folder: str) -> bool:
    return len(os.fsencode(folder + _SOCKET)) <= _LONGEST_ADDRESS


def _may_be_imported() -> bool:
    """Whether importing the script runs it no second time and uses no MPI, as far as its text
    tells.
    """
    script = getattr(sys.modules.get("__main__"), "__file__", None)
    if script is None:
        return True
    try:
        text = Path(script).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return True
    return "__name__" in text and not uses_mpi_when_imported(text)


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
