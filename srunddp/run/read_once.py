"""Input that can be read only once. A restart would find it empty: an empty script ends with 0, and
an empty configuration means the defaults.
"""

from __future__ import annotations

import fcntl
import os
import re
import select
import stat
import sys
import termios
from collections.abc import Sequence
from contextlib import suppress
from typing import NoReturn

from srunddp.errors import ConfigError, Scope
from srunddp.run.script import Script

# Names of this process's own descriptors: what a shell makes of <(...), and standard input. Any of
# them may be the value of an option, as in --config=/dev/stdin.
_DESCRIPTOR = re.compile(r"(?:.*=)?/(?:dev|proc/self)/(?:fd/(?P<number>\d+)|stdin)", re.DOTALL)

_MOST_KEPT = 1 << 20  # bytes of standard input; Linux gives no larger pipe to users
_PART = 1 << 16
# Seconds. Slurm and mpirun pass on a file, and close the pipe, within milliseconds. Behind a
# terminal the pipe stays open, and each start at a terminal waits for this time.
_WRITTEN_WITHIN = 0.5


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


def keep_stdin() -> None:
    """Put a file in the place of a pipe on standard input, so that each start can read it again.

    If the pipe is empty, still open after a while, or holds too much, it is left as it is.

    Only launchers make a pipe for each rank alone, so call this only in a rank of a launcher. A
    shell may share its pipe with other commands, which would lose what they have to read.
    """
    try:
        if not stat.S_ISFIFO(os.fstat(0).st_mode):
            return
        # The writer cannot close the pipe before the last part fits into it.
        with suppress(OSError):
            fcntl.fcntl(0, fcntl.F_SETPIPE_SZ, _MOST_KEPT)
        if not (_is_written_within(_WRITTEN_WITHIN) and _is_waiting()):
            return
        file = os.memfd_create("stdin")
    except OSError:
        return
    with open(file, "wb", buffering=0) as kept:
        # All writers have closed it, so this takes no longer than to copy what is there.
        while part := os.read(0, _PART):
            kept.write(part)
        os.lseek(file, 0, os.SEEK_SET)
        os.dup2(file, 0)


def _is_written_within(seconds: float) -> bool:
    """Wait until all writers of standard input have closed it, and return whether they have."""
    closed = select.poll()
    closed.register(0, 0)  # POLLHUP is always reported
    return bool(closed.poll(1000 * seconds))


def _is_waiting() -> bool:
    """Return whether there is anything to read from the pipe that is standard input."""
    count = fcntl.ioctl(0, termios.FIONREAD, bytes(4))
    return any(count)


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
