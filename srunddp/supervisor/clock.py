"""A clock that does not count the time during which this process was suspended or starved."""

import time
from collections.abc import Callable

from srunddp.supervisor.limits import DEFAULT_LIMITS, Limits

Clock = Callable[[], float]
"""Returns the seconds of a clock that keeps running while this process is stopped, such as
:func:`time.monotonic`.
"""


class ActiveClock:
    """Counts seconds from its creation. Nearly all time limits of a supervisor use this clock.

    When a job continues after ``scontrol suspend`` has stopped it for an hour, no rank must count
    as silent for an hour.

    Attributes:
        now: The seconds that have counted so far, as of the last :meth:`advance`.
    """

    def __init__(self, clock: Clock = time.monotonic, limits: Limits = DEFAULT_LIMITS) -> None:
        self.now = 0.0
        self._clock = clock
        self._late = limits.late
        self._last = clock()

    def advance(self, asked: float) -> float:
        """Advance the clock by a wait that has just ended, and return the new time.

        Args:
            asked: The requested maximum length of the wait, in seconds. If the wait took longer, at
                most :attr:`srunddp.supervisor.limits.Limits.late` seconds of the excess count.
        """
        before = self._last
        self._last = self._clock()
        self.now += min(self._last - before, asked + self._late)
        return self.now
