"""Input that can be read only once, such as a pipe. After a restart the script would find it empty,
and nobody would notice: an empty script ends with 0, and an empty configuration means the defaults.
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

# Matches a path that names one of this process's descriptors: a shell replaces <(...) by such a
# path, and /dev/stdin is one. The path may also be the value of an option, as in
# --config=/dev/stdin.
_DESCRIPTOR = re.compile(r"(?:.*=)?/(?:dev|proc/self)/(?:fd/(?P<number>\d+)|stdin)", re.DOTALL)

_MOST_KEPT = 1 << 20  # bytes of standard input; Linux gives no larger pipe to users
_PART = 1 << 16
# How many seconds keep_stdin() waits until the launcher closes the pipe. If srun or mpirun reads a
# file, it passes the file on and closes the pipe within milliseconds. If it reads a terminal, the
# pipe stays open, so a run from a terminal begins later by this time.
_WRITTEN_WITHIN = 0.5


def check_readable_again(script: Script) -> None:
    """Refuse a run with ``--restarts`` whose next start could not read the same input again.

    A regular file is accepted, even if it is named as ``/dev/stdin``, because Linux opens the file
    anew, at its beginning.

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
    """If standard input is a pipe, replace it by a file in memory with the same content, so that
    each start can read the input again.

    A pipe that is empty, that its writer has not closed after half a second, or whose content does
    not fit into it, is left as it is.

    Call this only in a rank that a launcher has started, because a launcher makes a separate pipe
    for each rank. A shell may give one pipe to several commands, and the other commands would miss
    what is read here.
    """
    try:
        if not stat.S_ISFIFO(os.fstat(0).st_mode):
            return
        # Enlarge the pipe, because its writer cannot close it until all of the input fits into it.
        with suppress(OSError):
            fcntl.fcntl(0, fcntl.F_SETPIPE_SZ, _MOST_KEPT)
        if not (_is_written_within(_WRITTEN_WITHIN) and _is_waiting()):
            return
        file = os.memfd_create("stdin")
    except OSError:
        return
    with open(file, "wb", buffering=0) as kept:
        # Reading does not wait, because all writers have closed the pipe.
        while part := os.read(0, _PART):
            kept.write(part)
        os.lseek(file, 0, os.SEEK_SET)
        os.dup2(file, 0)


def _is_written_within(seconds: float) -> bool:
    """Wait until all writers of the pipe on standard input have closed it, at most so many seconds;
    return whether they have.
    """
    closed = select.poll()
    closed.register(0, 0)  # poll() reports POLLHUP without being asked for it
    return bool(closed.poll(1000 * seconds))


def _is_waiting() -> bool:
    """Return whether there is anything to read from the pipe that is standard input."""
    count = fcntl.ioctl(0, termios.FIONREAD, bytes(4))
    return any(count)


def position_of_stdin() -> int | None:
    """Return the position in bytes up to which standard input has been read, for
    :func:`rewind_stdin`; None if standard input is closed or is not a regular file.
    """
    with suppress(OSError):
        if stat.S_ISREG(os.fstat(0).st_mode):
            return os.lseek(0, 0, os.SEEK_CUR)
    return None


def rewind_stdin(position: int | None) -> None:
    """Set standard input back, so that the next start reads it from the position at which the first
    start began.

    The position belongs to the open file, which this process may share with other ranks and with
    the shell that has started it. Changing it here disturbs no other rank: the scripts of all ranks
    have ended, and the next start's scripts do not begin before all ranks have met again.

    Args:
        position: What :func:`position_of_stdin` has returned; None to do nothing.
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
    """Return the program that this process's Python runs: the path of a file, or ``-`` for standard
    input; empty if it was given by ``-m`` or ``-c``.
    """
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
    """Return whether an argument names a descriptor of this process that is a pipe and can be read.
    A pipe that a shell makes of ``>(...)`` can only be written.
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
