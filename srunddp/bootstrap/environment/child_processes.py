"""Keep MPI out of the processes that ``multiprocessing`` starts below a rank, by ``spawn`` or from
a fork server.

Such a process is not a rank of MPI, but it imports the script and has the rank's variables. If the
script has ``from mpi4py import MPI``, mpi4py would start MPI as that rank a second time: Open MPI
then ends the process, or the job hangs. So this module tells mpi4py not to start MPI there. The
launcher's variables stay, because a script may read its rank from them in these processes too.

Other modules may register functions that these processes call first, see
:func:`call_in_processes`.
"""

import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

from srunddp.bootstrap.environment import mpi

_FORK_SERVER = "from multiprocessing.forkserver import"
# multiprocessing starts a process as `python -c CODE`. If the process will import the script, CODE
# begins with one of these, as in
#   from multiprocessing.spawn import spawn_main; spawn_main(tracker_fd=5, pipe_handle=7)
# The resource tracker imports no script, and its CODE begins differently.
_IMPORTERS = (_FORK_SERVER, "from multiprocessing.spawn import")

# Whether this process is not a rank but was started by one, directly or through other processes.
# Then MPI must not start in this process, nor in those that it starts.
_below_rank = False
_calls: list[str] = []
_fork_server_calls: list[str] = []
_plain_start: Callable[[Any, Sequence[Any], Any], int] | None = None


def prepare_processes(util: ModuleType) -> None:
    """Make ``multiprocessing.util`` start processes in which mpi4py does not start MPI, and which
    first make the calls of :func:`call_in_processes`.

    A rank that has not started MPI, and still may, leaves mpi4py as it is in the processes that it
    starts: the script may intend to start MPI in one of them.

    Args:
        util: the module ``multiprocessing.util``. A second call changes nothing.
    """
    global _plain_start
    # A second replacement would make _plain_start refer to _start, which would then call itself
    # endlessly.
    if _plain_start is None:
        _plain_start = util.spawnv_passfds
        util.spawnv_passfds = _start  # type: ignore[attr-defined]  # not known of a module


def call_in_processes(module: str, function: str, *arguments: str) -> None:
    """Make every process that starts after this call, by ``spawn`` or from a fork server, run a
    function before it imports the script.

    Args:
        module: the module that has the function; the process imports it.
        function: the name of the function.
        arguments: the arguments of the function.
    """
    call = f"import {module}; {module}.{function}{arguments}"
    if call not in _calls:
        _calls.append(call)


def call_in_fork_server(module: str, function: str) -> None:
    """Make every fork server that starts after this call run a function before it imports the
    script.

    Args:
        module: the module that has the function; the fork server imports it.
        function: the name of the function, which takes no arguments.
    """
    from multiprocessing import util

    prepare_processes(util)
    call = f"import {module}; {module}.{function}()"
    # The server runs this code once, when it starts. All processes that it forks inherit what the
    # call has changed.
    if call not in _fork_server_calls:
        _fork_server_calls.append(call)


def _start(path: Any, command: Sequence[Any], descriptors: Any) -> int:
    assert _plain_start
    return _plain_start(path, [_prepared(word) for word in command], descriptors)


def _prepared(word: Any) -> Any:
    """Put srunddp's code in front of an argument of a command line, if the argument is Python code
    that will import the script and there are calls to make before that.

    Returns:
        The argument with srunddp's code in front, or the argument unchanged.
    """
    if not isinstance(word, str) or not word.startswith(_IMPORTERS):
        return word
    first = []
    if _below_rank or mpi.was_started() or mpi.is_blocked():
        first.append(f"from {__name__} import enter; enter(mpi_blocked={mpi.is_blocked()})")
    first += _calls
    if word.startswith(_FORK_SERVER):
        first += _fork_server_calls
    if not first:
        return word
    # The default sys.path of `python -c` may not contain srunddp. So set this process's own path,
    # which multiprocessing would set a moment later anyway.
    path = [str(folder) for folder in sys.path]
    return "; ".join(["import sys", f"sys.path[:] = {path}", *first, word])


def enter(*, mpi_blocked: bool) -> None:
    """Prepare a process below a rank before it imports the script: mpi4py does not start MPI in
    this process, nor in the processes that it starts.

    Args:
        mpi_blocked: whether the rank refuses the import of ``mpi4py.MPI``. If so, this process
            refuses the import too.
    """
    # This flag makes _prepared() keep MPI out of the processes that this one starts.
    global _below_rank
    _below_rank = True
    if mpi_blocked:
        mpi.block()
    else:
        mpi.do_not_start()
    from multiprocessing import util

    prepare_processes(util)
