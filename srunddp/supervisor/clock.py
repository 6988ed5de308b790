"""Time as a process has lived it: what it slept against its will, suspended or starved, does not
count.
"""

import time
from collections.abc import Callable

from srunddp.supervisor.limits import DEFAULT_LIMITS, Limits

Clock = Callable[[], float]
"""The seconds on a clock that goes on while this process sleeps, as :func:`time.monotonic`."""


class ActiveClock:
    """Seconds from the start; all of a supervisor's time limits are of this clock.

    A job that ``scontrol suspend`` stopped for an hour must not find, when it goes on, that
    everybody was silent for an hour.
    """

    def __init__(self, clock: Clock = time.monotonic, limits: Limits = DEFAULT_LIMITS) -> None:
        self.now = 0.0
        self._clock = clock
        self._late = limits.late
        self._last = clock()

    def advance(self, asked: float) -> float:
        """After a wait of at most ``asked`` seconds: the time now."""
        before = self._last
        self._last = self._clock()
        self.now += min(self._last - before, asked + self._late)
        return self.now
