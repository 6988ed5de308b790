"""Measures what a call or a process costs. The cost of a call is a ratio to an empty call, measured
at the same time, because the speed of machines differs, and changes from minute to minute.
"""

from __future__ import annotations

import time
import timeit
from collections.abc import Callable

_CALLS = 20_000
_ROUNDS = 15


def cpu_of(process: int) -> float:
    """Return the seconds of CPU time that a process has used; see clock_getcpuclockid(3)."""
    return time.clock_gettime((~process << 3) | 2)


def in_empty_calls(function: Callable[[], object]) -> float:
    """Return how many times as much CPU time a call takes as a call of an empty function. The two
    are measured in turn, and the shortest time of each counts.
    """

    def nothing() -> None: ...

    called = timeit.Timer(function, timer=time.process_time)
    empty = timeit.Timer(nothing, timer=time.process_time)
    rounds = [(called.timeit(_CALLS), empty.timeit(_CALLS)) for _ in range(_ROUNDS)]
    return min(cost for cost, _ in rounds) / min(least for _, least in rounds)
