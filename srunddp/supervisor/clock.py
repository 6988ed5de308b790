"""Time as a process has lived it: what it slept against its will, suspended or starved, does not count. And limits."""

import time

STALL_TIMEOUT = 300.0  # seconds without a step of any rank
LOST_AFTER = 60.0  # seconds without an answer of a node
_LATE = 1.0


class ActiveClock:
    """Seconds from the start; all of a supervisor's time limits are of this clock.

    A job that ``scontrol suspend`` stopped for an hour must not find, when it goes on, that everybody was silent for
    an hour.
    """

    def __init__(self) -> None:
        self.now = 0.0
        self._last = time.monotonic()

    def advance(self, asked: float) -> float:
        """After a wait of at most ``asked`` seconds: the time now."""
        before, self._last = self._last, time.monotonic()
        self.now += min(self._last - before, asked + _LATE)
        return self.now
