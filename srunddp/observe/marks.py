"""What a rank and its supervisor tell each other in shared memory: how many steps there were, and that all is over.

A mark is one write, no more.
"""

from __future__ import annotations

import mmap
import struct

_COUNT = struct.Struct("=Q")
_CONDEMNED = _COUNT.size  # where the next word begins


class Marks:
    """A page shared by a supervisor and the worker that it forks.

    Attributes:
        count: of this process's steps so far.
    """

    def __init__(self) -> None:
        self._page = mmap.mmap(-1, mmap.PAGESIZE)
        self.count = 0

    def mark(self) -> None:
        """In the worker: one step more."""
        self.count += 1
        _COUNT.pack_into(self._page, 0, self.count)

    def rest(self) -> None:
        """In the worker: no step is expected for now."""
        _COUNT.pack_into(self._page, 0, 0)

    def read(self) -> int:
        """In the supervisor: the steps so far; 0 where none is expected."""
        return int(_COUNT.unpack_from(self._page, 0)[0])

    def condemn(self) -> None:
        """In the supervisor: a verdict stands, and the worker is about to be ended for it."""
        _COUNT.pack_into(self._page, _CONDEMNED, 1)

    def is_condemned(self) -> bool:
        """In the worker: whether that was said."""
        return bool(_COUNT.unpack_from(self._page, _CONDEMNED)[0])


_marks: Marks | None = None


def install(marks: Marks) -> None:
    """In the worker: :func:`heartbeat` marks here from now on."""
    global _marks
    _marks = marks


def heartbeat(*, last: bool = False) -> None:
    """Say that this rank goes on; call it once a step.

    From the first call on the ranks are expected to go on calling it: when none has for ``--stall-timeout`` seconds,
    the run is ended and the rank that the others wait for is named. Without a supervisor nothing happens.

    Args:
        last: what follows may take as long as it likes, until the next call.
    """
    if _marks is None:
        return
    if last:
        _marks.rest()
    else:
        _marks.mark()


def is_guarded() -> bool:
    """Whether there is a supervisor, which says how the run ends."""
    return _marks is not None


def is_condemned() -> bool:
    """Whether a verdict stands, for which the supervisor ends this rank."""
    return _marks is not None and _marks.is_condemned()
