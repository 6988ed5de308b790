"""``SRUNDDP_WORKER=exec``: a worker that executes Python anew after the fork, for profilers that do
not follow a fork without an exec, such as nsys.

The new program inherits the sockets and open files. The rest of what a forked worker inherits, it
reads from a file in memory that the forked process has written.
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
    # Make the descriptors inheritable, because Python opens them with close-on-exec (PEP 446).
    for descriptor in (state, *inherited):
        os.set_inheritable(descriptor, True)
    # Pass sys.path on, because with -c Python would put the working directory first in it, and the
    # script could import different modules from there.
    code = (
        f"import sys; sys.path[:] = {sys.path}; from srunddp.run.worker_exec import main;"
        f" main({state}, {inherited})"
    )
    # Pass Python's UTF-8 mode on, because the new program could not find it out: in a C locale
    # Python changes the locale variables to UTF-8.
    flags = [*_args_from_interpreter_flags(), f"-Xutf8={sys.flags.utf8_mode}"]
    os.execv(sys.executable, [sys.executable, *flags, "-c", code])


class _Pickler(pickle.Pickler):
    """Writes a socket as its descriptor, which the next program inherits.

    Attributes:
        descriptors: The descriptors of the sockets that it has written.
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
    # With closefd=False the descriptor stays open for the new program.
    with open(state, "wb", closefd=False) as file:
        pickler = _Pickler(file)
        pickler.dump((context, dict(os.environ)))
    files = [context.dump.descriptor, context.page.descriptor, *context.output.descriptors]
    return state, [*pickler.descriptors, *files]


def unpack(state: int) -> WorkerContext:
    """Read and return the context that :func:`pack` has written, and replace the environment
    variables of this process by those in the file.

    The descriptors in the context are valid, because an executed program inherits them under the
    same numbers.
    """
    # Go back to the beginning of the file: its offset is still at the end, where pack() stopped
    # writing.
    os.lseek(state, 0, os.SEEK_SET)
    with open(state, "rb") as file:
        context, variables = pickle.load(file)
    os.environ.clear()
    os.environ.update(variables)
    assert isinstance(context, WorkerContext)
    return context


def main(state: int, inherited: list[int]) -> NoReturn:
    """Become the worker whose context :func:`become` has written before it executed this program.

    Args:
        state: The descriptor of the file that :func:`pack` has written.
        inherited: The other descriptors that were inherited. Processes that the script starts must
            not inherit them.
    """
    for descriptor in inherited:
        os.set_inheritable(descriptor, False)
    try:
        # Fill descriptors 0, 1 and 2 before anything else is opened, which could get one of these
        # numbers.
        filled = fill_standard()
        context = unpack(state)
        context.output.filled = filled
        sys.exit(run_worker(context))
    except SrunddpError as error:
        write_stderr(f"srunddp: error: {error}\n")
        sys.exit(error.exit_code)
