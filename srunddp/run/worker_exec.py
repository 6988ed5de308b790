"""``SRUNDDP_WORKER=exec``: the worker as a program of its own, for profilers that do not follow a
fork, such as nsys.

The program reads the state that a forked worker would inherit from a file in memory. It inherits
the sockets and files.
"""

import os
import pickle
import socket
import sys
from typing import Any, BinaryIO, NoReturn

from srunddp.errors import SrunddpError
from srunddp.run.worker import WorkerContext, run_worker
from srunddp.util.console import write_stderr
from srunddp.util.descriptors import fill_standard
from srunddp.util.kernel_file import memory_file


def become(context: WorkerContext) -> NoReturn:
    """Replace the forked process by a new Python with the same options, which calls ``main()``."""
    from subprocess import _args_from_interpreter_flags  # type: ignore[attr-defined]  # as multiprocessing does

    state, inherited = pack(context)
    # Python's descriptors are closed on exec unless they are set inheritable (PEP 446).
    for descriptor in (state, *inherited):
        os.set_inheritable(descriptor, True)
    # With -c Python puts the working directory first in sys.path, so the script might find other
    # modules than here. Pass sys.path on instead.
    code = (
        f"import sys; sys.path[:] = {sys.path}; from srunddp.run.worker_exec import main;"
        f" main({state}, {inherited})"
    )
    # In a C locale Python changes the locale variables to UTF-8, so the next Python could not see
    # that the locale was C. Pass the UTF-8 mode on.
    flags = [*_args_from_interpreter_flags(), f"-Xutf8={sys.flags.utf8_mode}"]
    os.execv(sys.executable, [sys.executable, *flags, "-c", code])


class _Pickler(pickle.Pickler):
    """Writes a socket as its descriptor, which the next program inherits.

    Attributes:
        descriptors: Those of the sockets that it has written.
    """

    def __init__(self, file: BinaryIO) -> None:
        super().__init__(file)
        self.descriptors = list[int]()

    def reducer_override(self, value: Any) -> Any:
        """Reduce a socket to the call that recreates it from its descriptor; leave the rest to
        pickle.
        """
        if isinstance(value, socket.socket):
            self.descriptors.append(value.fileno())
            return socket.socket, (value.family, value.type, value.proto, value.fileno())
        return NotImplemented


def pack(context: WorkerContext) -> tuple[int, list[int]]:
    """Write the worker's context and the environment variables to a file in memory.

    Returns:
        The file's descriptor, and the descriptors that the context refers to.
    """
    state = memory_file()
    # closefd=False leaves the descriptor open for the next program.
    with open(state, "wb", closefd=False) as file:
        pickler = _Pickler(file)
        pickler.dump((context, dict(os.environ)))
    files = [context.dump.descriptor, context.page.descriptor, *context.output.descriptors]
    return state, [*pickler.descriptors, *files]


def unpack(state: int) -> WorkerContext:
    """Read what :func:`pack` has written; the descriptors have the same numbers in this process.

    The environment variables are replaced by those from the file.
    """
    # The descriptor shares its offset with the writer, who has left it at the end.
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
        state: The descriptor of the file of :func:`pack`.
        inherited: The other descriptors, which the script's own children must not inherit.
    """
    for descriptor in inherited:
        os.set_inheritable(descriptor, False)
    try:
        # Do this before anything else is opened, which would get one of these numbers.
        filled = fill_standard()
        context = unpack(state)
        context.output.filled = filled
        sys.exit(run_worker(context))
    except SrunddpError as error:
        write_stderr(f"srunddp: error: {error}\n")
        sys.exit(error.exit_code)
