"""``SRUNDDP_WORKER=exec``: the worker as a program of its own, for profilers that do not follow a
fork, as nsys.

What a forked worker has in memory comes by a file in memory; sockets and files are inherited.
"""

import os
import pickle
import socket
import sys
from typing import Any, NoReturn

from srunddp.errors import SrunddpError
from srunddp.run.worker import WorkerContext, run_worker
from srunddp.util.console import write_stderr
from srunddp.util.kernel_file import memory_file


def become(context: WorkerContext) -> NoReturn:
    """Start Python again for :func:`main`, with its options, in the process forked for a worker."""
    from subprocess import _args_from_interpreter_flags  # type: ignore[attr-defined]  # as multiprocessing does

    state, inherited = pack(context)
    # An exec closes the descriptors that Python has made unless they are set inheritable (PEP 446).
    for descriptor in (state, *inherited):
        os.set_inheritable(descriptor, True)
    # With -c Python puts the working folder first in sys.path, where the script would find modules
    # that it does not find here.
    code = (
        f"import sys; sys.path[:] = {sys.path}; from srunddp.run.worker_exec import main;"
        f" main({state}, {inherited})"
    )
    # Of a C locale Python makes UTF-8 in the variables too, by which the next one no longer finds
    # that it was C.
    flags = [*_args_from_interpreter_flags(), f"-Xutf8={sys.flags.utf8_mode}"]
    os.execv(sys.executable, [sys.executable, *flags, "-c", code])


class _Pickler(pickle.Pickler):
    """Writes a socket as its descriptor, which the next program inherits."""

    def reducer_override(self, value: Any) -> Any:
        """Return how to make the value again; NotImplemented for pickle's own way."""
        if isinstance(value, socket.socket):
            return socket.socket, (value.family, value.type, value.proto, value.fileno())
        return NotImplemented


def pack(context: WorkerContext) -> tuple[int, list[int]]:
    """Write what the worker is to have to a file in memory, with the environment variables.

    Returns:
        The file's descriptor, and the descriptors of which it speaks.
    """
    state = memory_file()
    # The descriptor stays open for the next program.
    with open(state, "wb", closefd=False) as file:
        _Pickler(file).dump((context, dict(os.environ)))
    held = context.setup.held
    sockets = [context.supervisor.end, *((held.rendezvous, held.store) if held else ())]
    if context.setup.deputy:
        sockets.append(context.setup.deputy)
    files = [context.dump.descriptor, context.page.descriptor, *context.output.descriptors]
    return state, [*(each.fileno() for each in sockets), *files]


def unpack(state: int) -> WorkerContext:
    """Read what was packed, in a process where the descriptors have the same numbers.

    The environment variables of this process become those of the other one.
    """
    # The offset, which the writer has left at the end, comes with the descriptor.
    os.lseek(state, 0, os.SEEK_SET)
    with open(state, "rb") as file:
        context, variables = pickle.load(file)
    os.environ.clear()
    os.environ.update(variables)
    assert isinstance(context, WorkerContext)
    return context


def main(state: int, inherited: list[int]) -> NoReturn:
    """Become the worker that another process has prepared.

    Args:
        state: descriptor of the file of :func:`pack`.
        inherited: the other descriptors, which the script's own children are not to have.
    """
    for descriptor in inherited:
        os.set_inheritable(descriptor, False)
    try:
        sys.exit(run_worker(unpack(state)))
    except SrunddpError as error:
        write_stderr(f"srunddp: error: {error}\n")
        sys.exit(error.exit_code)
