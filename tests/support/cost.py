"""What a call or a process costs. That of a call is a ratio within one run: machines differ, and so
do minutes.
"""

from __future__ import annotations

import time
import timeit
from collections.abc import Callable

_CALLS = 20_000
_ROUNDS = 15


def cpu_of(process: int) -> float:
    """Seconds of CPU that a process has used; see clock_getcpuclockid(3)."""
    return time.clock_gettime((~process << 3) | 2)


def in_empty_calls(function: Callable[[], object]) -> float:
    """The CPU time of a call over that of one that does nothing; the least of rounds in turn."""

    def nothing() -> None: ...

    called = timeit.Timer(function, timer=time.process_time)
    empty = timeit.Timer(nothing, timer=time.process_time)
    rounds = [(called.timeit(_CALLS), empty.timeit(_CALLS)) for _ in range(_ROUNDS)]
    return min(cost for cost, _ in rounds) / min(least for _, least in rounds)
