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
# More workers of one rank rarely read faster, and each takes memory for torch and its batches.
_MOST = 8
_SOCKET = "/pymp-12345678/listener-12345678"  # as long as multiprocessing's, below its folder
_LONGEST_ADDRESS = 107  # bytes of a socket's path, by Linux


def default_workers(cpus: int) -> int:
    """Return the number of workers of one loader.

    Args:
        cpus: That the rank may use.
    """
    # One is left for the rank itself, which launches the GPU's kernels.
    return min(_MOST, max(cpus - 1, 0))


def start_method(method: str | None, backend: str) -> str:
    """Return how workers start: by the method that the user wants, else ``fork`` or ``forkserver``.

    Only for loaders that have workers.

    A fork of a process in which MPI runs, or which has memory registered for RDMA as NCCL has, may
    crash or hang. The fork server is started apart and has neither. As with spawn, each of its
    workers imports the script: one that would train or use MPI there too gets fork, and so does a
    script where the server's socket has no room.

    Args:
        method: The user's; None for one that is safe.
        backend: Of the default process group.
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
    """Have ``multiprocessing`` use a folder below /tmp if TMPDIR's is too long for its sockets.

    Python does so itself from 3.14 on. The fork server has such a socket, and each worker that
    sends tensors, however it was started.

    Returns:
        Whether the sockets have room.
    """
    chosen = tempfile.tempdir
    if _has_room(tempfile.gettempdir()):
        return True
    tempfile.tempdir = "/tmp"
    try:
        # multiprocessing makes its folder at the first call, which may have been the script's, and
        # keeps it: what matters is that tempdir is /tmp during this call. The script's own
        # temporary files go to TMPDIR as before.
        folder = util.get_temp_dir()
    except OSError:
        return False
    finally:
        tempfile.tempdir = chosen
    return _has_room(str(Path(folder).parent))


def _has_room(folder: str) -> bool:
    return len(os.fsencode(folder + _SOCKET)) <= _LONGEST_ADDRESS


def _may_be_imported() -> bool:
    """Return whether importing the script runs it no second time and uses no MPI.

    As far as its text tells: a worker that starts by forkserver imports it.
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
    """Return how many CPUs this rank may use for itself, at least 1; a collective.

    Those of its affinity mask, divided among the ranks of its node that have the same; see
    :func:`srunddp.bootstrap.environment.cpus.share`.

    Args:
        world: All of its ranks call this.
    """
    own = [hashed(socket.gethostname()), hashed(of_rank.mask())]
    return of_rank.share(of_rank.usable(), all_gather_ints(world, own).count(own), os.environ)


def set_threads(cpus: int, wanted: int | None) -> None:
    """Set how many threads torch computes with on the CPU.

    Args:
        cpus: That the rank may use.
        wanted: What the user has configured. Where None, no more than ``cpus``, unless the
            environment says how many.
    """
    if wanted is not None:
        torch.set_num_threads(wanted)
    elif not {*of_rank.THREADS} & os.environ.keys() and torch.get_num_threads() > cpus:
        torch.set_num_threads(cpus)
