"""Decides how many loader workers a rank has, and how they start."""

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
# More workers per rank rarely read faster, and each takes memory for torch and its batches.
_MOST = 8
_SOCKET = "/pymp-12345678/listener-12345678"  # as long as multiprocessing's path within its folder
_LONGEST_ADDRESS = 107  # bytes of a socket's path in Linux


def default_workers(cpus: int) -> int:
    """Return the default number of workers for a loader.

    Args:
        cpus: The number of CPUs that the rank may use.
    """
    # Leave one CPU for the rank itself, which launches the GPU's kernels.
    return min(_MOST, max(cpus - 1, 0))


def start_method(method: str | None, backend: str) -> str:
    """Return how workers start: by the user's method, or else ``fork`` or ``forkserver``.

    Call this only for loaders that have workers.

    To fork a process may crash or hang if MPI runs in it, or if it has memory registered for RDMA,
    as NCCL does. In the fork server, a separate process, neither is so. But as with spawn, each of
    its workers imports the script. So the method is ``fork`` all the same if the script would train
    or use MPI when it is imported, or if the path of the server's socket would be too long.

    Args:
        method: The user's choice; None to choose a method here.
        backend: The backend of the default process group.
    """
    room = make_room_for_sockets()
    if method is None:
        unsafe = mpi.is_running() or (backend == "nccl" and any(_INFINIBAND.glob("*")))
        if unsafe and room and _may_be_imported():
            method = "forkserver"
        else:
            method = "fork"
    if method == "forkserver":
        # Import torch once in the fork server, which saves two seconds in each worker.
        multiprocessing.set_forkserver_preload(["torch"])
    return method


def make_room_for_sockets() -> bool:
    """Make ``multiprocessing`` use a folder under /tmp if TMPDIR is too long for its sockets.

    The fork server has such a socket, and so has each worker that sends tensors, however it was
    started. Python 3.14 and newer choose a shorter folder themselves.

    Returns:
        Whether the paths of the sockets are short enough now.
    """
    chosen = tempfile.tempdir
    if _has_room(tempfile.gettempdir()):
        return True
    tempfile.tempdir = "/tmp"
    try:
        # multiprocessing creates its folder at the first call of get_temp_dir(), and keeps it. So
        # tempdir has to be /tmp only during this call, and the script's own temporary files go to
        # TMPDIR as before. If the script has called it before, its folder stays.
        folder = util.get_temp_dir()
    except OSError:
        return False
    finally:
        tempfile.tempdir = chosen
    return _has_room(str(Path(folder).parent))


def _has_room(folder: str) -> bool:
    return len(os.fsencode(folder + _SOCKET)) <= _LONGEST_ADDRESS


def _may_be_imported() -> bool:
    """Return whether a worker may import the script, judged by the script's text.

    It may if the import would neither train a second time, because the text has ``__name__``, nor
    call MPI. A script that is not in a file, or cannot be read, may be imported.
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
    """Return how many CPUs this rank may use, at least 1; a collective.

    The CPUs of its affinity mask are divided among the ranks of its node that have the same mask,
    see :func:`srunddp.bootstrap.environment.cpus.share`.

    Args:
        world: The ranks, all of which call this.
    """
    own = [hashed(socket.gethostname()), hashed(of_rank.mask())]
    return of_rank.share(of_rank.usable(), all_gather_ints(world, own).count(own), os.environ)


def set_threads(cpus: int, wanted: int | None) -> None:
    """Set the number of threads with which torch computes on the CPU.

    Args:
        cpus: The number of CPUs that the rank may use.
        wanted: The number that the user has configured. None for at most ``cpus``, unless the
            environment sets a number.
    """
    if wanted is not None:
        torch.set_num_threads(wanted)
    elif not {*of_rank.THREADS} & os.environ.keys() and torch.get_num_threads() > cpus:
        torch.set_num_threads(cpus)
