"""srunddp's file descriptors in a process in which the user's script opens and closes others."""

import contextlib
import fcntl
import os
import resource
from collections.abc import Iterator

_LOWEST = 600  # scripts that clean up often close all descriptors below 256 or 512
_ROOM = 16  # numbers to leave free between move_high()'s and the limit of open files
_ROOM_OF_A_LIBRARY = 256  # numbers from _LOWEST on that must be free for opening_high()


def move_high(descriptor: int) -> int:
    """Move a descriptor to a high number, set close-on-exec, and return the new number.

    Some scripts close all low descriptors that they may have inherited, as daemons do; a high
    descriptor stays open. If a script closes the high descriptor too, it takes long until a file of
    the script gets the same number, to which srunddp would then write by mistake. If the limit of
    open files is too low for such a number, the number is as high as the limit allows, or the
    descriptor stays as it is.
    """
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit == resource.RLIM_INFINITY:
        lowest = _LOWEST
    else:
        lowest = max(0, min(_LOWEST, limit - _ROOM))
    try:
        moved = fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, lowest)
    except OSError:
        return descriptor
    os.close(descriptor)
    return moved


@contextlib.contextmanager
def opening_high() -> Iterator[None]:
    """Make each descriptor that is opened inside the ``with`` block get a high number.

    This is for a library whose descriptors :func:`move_high` cannot move. If the limit of open
    files leaves the library too few high numbers, its descriptors get the lowest free numbers, as
    usual. Whether close-on-exec is set depends on the library.
    """
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    held: list[int] = []
    try:
        if limit == resource.RLIM_INFINITY or limit >= _LOWEST + _ROOM_OF_A_LIBRARY:
            held.append(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))
            while held[-1] < _LOWEST:
                held.append(fcntl.fcntl(held[0], fcntl.F_DUPFD_CLOEXEC, held[-1] + 1))
            os.close(held.pop())
        yield
    finally:
        close_all(held)


def fill_standard() -> list[int]:
    """Open ``/dev/null`` for each closed descriptor among 0, 1 and 2, and return their numbers.

    Otherwise the next file or socket that is opened would get one of these numbers, and the output
    of the process would go there. Close-on-exec is set, so that programs that the process starts
    still find these descriptors closed.
    """
    filled: list[int] = []
    for number in (0, 1, 2):
        try:
            os.fstat(number)
        except OSError:
            filled.append(os.open(os.devnull, os.O_RDWR))
    return filled


def opened() -> list[int]:
    """Return the open descriptors of this process. One of the numbers is that of the descriptor
    with which /proc/self/fd was read, which is closed again.
    """
    return [int(name) for name in os.listdir("/proc/self/fd")]


def close_all(descriptors: list[int]) -> None:
    """Close file descriptors, and ignore errors, as for a descriptor that is closed already."""
    for descriptor in descriptors:
        with contextlib.suppress(OSError):
            os.close(descriptor)
