"""File descriptors of srunddp in a process that belongs to the user's script."""

import contextlib
import fcntl
import os
import resource
from collections.abc import Iterator

_LOWEST = 600  # scripts that clean up often close all descriptors below 256 or 512
_ROOM = 16  # numbers that stay free below a small limit of open files
_ROOM_OF_A_LIBRARY = 256


def move_high(descriptor: int) -> int:
    """Give a descriptor a high number, and return it; close-on-exec is set.

    A script that closes the low descriptors it may have inherited, as daemons do, then leaves this
    one open. If a script closes it after all, it takes long until one of the script's own files
    gets the same number, so srunddp does not write to such a file. If the limit of open files is
    too small, the descriptor keeps its number.
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
    """Give all that is opened inside the block a high number, as :func:`move_high` does.

    This is for a library whose descriptors cannot be moved. If the limit of open files leaves the
    library too little room above, its descriptors get the lowest free numbers, as usual.
    Close-on-exec is the library's choice.
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

    Otherwise the next file or socket would get one of these numbers, and with it the output of the
    process. The descriptors are closed on exec, so programs that the process starts find them
    closed.
    """
    filled: list[int] = []
    for number in (0, 1, 2):
        try:
            os.fstat(number)
        except OSError:
            filled.append(os.open(os.devnull, os.O_RDWR))
    return filled


def opened() -> list[int]:
    """Return the descriptors that this process has open. The list also has the descriptor of the
    listing itself, which is closed again.
    """
    return [int(name) for name in os.listdir("/proc/self/fd")]


def close_all(descriptors: list[int]) -> None:
    """Close descriptors; ignore those that are closed already."""
    for descriptor in descriptors:
        with contextlib.suppress(OSError):
            os.close(descriptor)
