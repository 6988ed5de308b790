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

_FORK_SERVER = "from multiprocessing.forkserver import"
# How the code begins that processes run which are to import the script: multiprocessing starts
# them as `python -c CODE`. The resource tracker's is not among them. Such a code is:
#   from multiprocessing.spawn import spawn_main; spawn_main(tracker_fd=5, pipe_handle=7)
_IMPORTERS = (_FORK_SERVER, "from multiprocessing.spawn import")

# Whether MPI belongs to another process: this one was started below a rank that has it.
_below_rank = False
_fork_server_calls: list[str] = []
_plain_start: Callable[[Any, Sequence[Any], Any], int] | None = None


def keep_mpi_out(util: ModuleType) -> None:
    """Have ``multiprocessing.util`` start processes that do not start MPI.

    As long as this process neither has MPI nor may not start it, they start as in plain Python: the
    script may mean to start MPI in one of them.
    """
    global _plain_start
    # A second replacement would take our own function for the plain one, which then calls itself
    # without end.
    if _plain_start is None:
        _plain_start = util.spawnv_passfds
        util.spawnv_passfds = _start  # type: ignore[attr-defined]  # not known of a module


def call_in_fork_server(module: str, function: str) -> None:
    """Have a fork server that starts from now on call a function before it imports the script.

    Args:
        module: the function's, which the server imports.
        function: its name; it is called without arguments.
    """
    from multiprocessing import util

    keep_mpi_out(util)
    call = f"import {module}; {module}.{function}()"
    # The server runs the code once, when it starts; what the call changes is inherited by all
    # processes that the server forks.
    if call not in _fork_server_calls:
        _fork_server_calls.append(call)


def _start(path: Any, command: Sequence[Any], descriptors: Any) -> int:
    assert _plain_start
    return _plain_start(path, [_prepared(word) for word in command], descriptors)


def _prepared(word: Any) -> Any:
    """Code of Python that does first what we want of the process; other words as they are."""
    if not isinstance(word, str) or not word.startswith(_IMPORTERS):
        return word
    first = []
    if _below_rank or mpi.was_started() or mpi.is_blocked():
        first.append(f"from {__name__} import enter; enter(mpi_blocked={mpi.is_blocked()})")
    if word.startswith(_FORK_SERVER):
        first += _fork_server_calls
    if not first:
        return word
    # `python -c` begins with the path of a fresh interpreter, in which srunddp need not be found.
    # It gets the rank's own path, which multiprocessing sets a moment later in any case.
    path = [str(folder) for folder in sys.path]
    return "; ".join(["import sys", f"sys.path[:] = {path}", *first, word])


def enter(*, mpi_blocked: bool) -> None:
    """Begin a process below a rank, before it imports the script: mpi4py starts no MPI in it, nor
    in what it starts itself.

    ``mpi_blocked`` says that the rank refuses the import; so does this process then.
    """
    # _prepared() goes by it: what this process starts keeps MPI out as well.
    global _below_rank
    _below_rank = True
    if mpi_blocked:
        mpi.block()
    else:
        mpi.do_not_start()
    from multiprocessing import util

    keep_mpi_out(util)
