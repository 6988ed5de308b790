"""What ``multiprocessing`` starts below a rank, by ``spawn`` or from a fork server, is no rank of
MPI.

Such a process imports the script. If ``from mpi4py import MPI`` is among its imports, mpi4py would
start MPI there, as the rank from which the process has the launcher's variables: Open MPI then ends
the process, or the job hangs. So mpi4py is told not to start MPI. The variables stay, as a script
may read its rank from them in these processes as well.
"""

import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

from srunddp.bootstrap.environment import mpi

# How the code begins that processes run which are to import the script. The resource tracker's is
# not among them.
_IMPORTERS = ("from multiprocessing.spawn import", "from multiprocessing.forkserver import")

# Whether MPI belongs to another process: this one was started below a rank that has it.
_below_rank = False


def keep_mpi_out(util: ModuleType) -> None:
    """Have ``multiprocessing.util`` start processes that do not start MPI.

    As long as this process neither has MPI nor may not start it, they start as in plain Python: the
    script may mean to start MPI in one of them.
    """
    start: Callable[[Any, Sequence[Any], Any], int] = util.spawnv_passfds

    def start_without_mpi(path: Any, command: Sequence[Any], descriptors: Any) -> int:
        if _below_rank or mpi.was_started() or mpi.is_blocked():
            command = [_entering_first(word) for word in command]
        return start(path, command, descriptors)

    util.spawnv_passfds = start_without_mpi  # type: ignore[attr-defined]  # not known of a module


def _entering_first(word: Any) -> Any:
    """Code of Python that calls :func:`enter` first; other words of a command as they are."""
    if not isinstance(word, str) or not word.startswith(_IMPORTERS):
        return word
    # From the rank's own path, which multiprocessing sets a moment later in any case.
    path = [str(folder) for folder in sys.path]
    call = f"enter(mpi_blocked={mpi.is_blocked()})"
    return f"import sys; sys.path[:] = {path}; from {__name__} import enter; {call}; {word}"


def enter(*, mpi_blocked: bool) -> None:
    """Begin a process below a rank, before it imports the script: mpi4py starts no MPI in it, nor
    in what it starts itself.

    ``mpi_blocked`` says that the rank refuses the import; so does this process then.
    """
    global _below_rank
    _below_rank = True
    if mpi_blocked:
        mpi.block()
    else:
        mpi.do_not_start()
    from multiprocessing import util

    keep_mpi_out(util)
