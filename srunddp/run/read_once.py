"""Input that can be read only once. A restart would find it empty: an empty script ends with 0, and
an empty configuration means the defaults.
"""

from __future__ import annotations

import fcntl
import os
import re
import stat
import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import NoReturn

from srunddp.errors import ConfigError, Scope
from srunddp.run.script import Script

# Names of this process's own descriptors: what a shell makes of <(...), and standard input. Any of
# them may be the value of an option, as in --config=/dev/stdin.
_DESCRIPTOR = re.compile(r"(?:.*=)?/(?:dev|proc/self)/(?:fd/(?P<number>\d+)|stdin)", re.DOTALL)


def check_readable_again(script: Script) -> None:
    """Refuse a run with ``--restarts`` whose next start could not read the same input again.

    A regular file is accepted, even as ``/dev/stdin``: Linux opens it again, at its beginning.

    Args:
        script: The script, with its path on this node.

    Raises:
        ConfigError: The script, one of its arguments or the program that called srunddp is read
            from a pipe.
    """
    program = _own_program()
    if program == "-" or _is_pipe(program):
        _refuse("srunddp is called by a program from standard input or a pipe")
    if not script.module and not _is_file_or_folder(script.name):
        _refuse(f"the script {script.name} is not a regular file")
    for argument in script.arguments:
        if _names_pipe_to_read(argument):
            _refuse(f"the script's argument {argument} is a pipe")


def position_of_stdin() -> int | None:
    """Return how far standard input has been read, for :func:`rewind_stdin`; None if it is not a
    regular file, or is closed.
    """
    with suppress(OSError):
        if stat.S_ISREG(os.fstat(0).st_mode):
            return os.lseek(0, 0, os.SEEK_CUR)
    return None


def rewind_stdin(position: int | None) -> None:
    """Let the next start read standard input from where the first one began.

    The position belongs to the open file, which this process may share with other ranks and with
    the shell that has started it. None of them reads now: the script of every rank has ended, and
    none begins before all ranks have met again.

    Args:
        position: From :func:`position_of_stdin`.
    """
    if position is None:
        return
    with suppress(OSError):
        os.lseek(0, position, os.SEEK_SET)


def _refuse(found: str) -> NoReturn:
    raise ConfigError(
        f"--restarts, and {found}",
        expected="input that each start can read again",
        hint="write it to a file that all nodes see, and name that",
        scope=Scope.NODE,
    )


def _own_program() -> str:
    """Return what Python runs: a file, ``-`` for standard input, or empty for ``-m`` and ``-c``."""
    words: Sequence[str] = sys.orig_argv[: len(sys.orig_argv) - len(sys.argv[1:])]
    if len(words) < 2 or words[-2] in ("-m", "-c"):
        return ""
    return words[-1]


def _is_pipe(path: str) -> bool:
    with suppress(OSError):
        return stat.S_ISFIFO(os.stat(path).st_mode)
    return False


def _is_file_or_folder(path: str) -> bool:
    return os.path.isfile(path) or os.path.isdir(path)


def _names_pipe_to_read(argument: str) -> bool:
    """Return whether an argument names a descriptor of this process from which a pipe can be read;
    a shell's ``>(...)`` can only be written.
    """
    found = _DESCRIPTOR.fullmatch(argument)
    if found is None:
        return False
    number = int(found["number"] or 0)
    try:
        is_pipe = stat.S_ISFIFO(os.fstat(number).st_mode)
        mode = fcntl.fcntl(number, fcntl.F_GETFL) & os.O_ACCMODE
    except (OSError, OverflowError):  # there is no such descriptor
        return False
    return is_pipe and mode != os.O_WRONLY
