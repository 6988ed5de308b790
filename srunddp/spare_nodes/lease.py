"""Until when a worker may run without an answer of rank 0, or rank 0 without one of the others."""

import time

from srunddp.supervisor.clock import Clock
from srunddp.supervisor.limits import DEFAULT_LIMITS, Limits
from srunddp.supervisor.node_replacement import LeaseTimes


class Lease:
    """What one end of a connection knows of the other's time, without comparing two clocks.

    Each message carries its sender's time, and the last time of the receiver's that the sender has
    seen. By the one that came back the receiver knows that it was heard of after it.

    Attributes:
        ends: when this side's lease ends, by its clock.
    """

    def __init__(
        self, seconds: float, clock: Clock = time.monotonic, limits: Limits = DEFAULT_LIMITS
    ) -> None:
        """``seconds``: how long a lease lasts from the time that came back."""
        self._seconds = seconds
        self._clock = clock
        self._limits = limits
        self._received = clock()
        self._theirs = 0.0
        self.ends = self._received + seconds

    @property
    def other_ended(self) -> float:
        """When the other side's worker has ended, where no message of either side's has arrived
        since the last.
        """
        # Before a first message nothing is known of when the other side's has begun.
        since = self._received if self._theirs else self._clock()
        return since + self._seconds + self._limits.lease_ends_within

    def stamp(self) -> LeaseTimes:
        """Return the times that a message to the other side carries."""
        return LeaseTimes(self._clock(), self._theirs)

    def note(self, sent_at: float | None, echo: float | None) -> None:
        """Take in the times of a message that has come from the other side.

        Args:
            sent_at: The other side's time when it sent the message.
            echo: The last time of this side's that it had seen. A message without both says
                nothing.
        """
        if sent_at is not None and echo is not None:
            self._received = self._clock()
            self._theirs = sent_at
            self.ends = max(self.ends, min(echo, self._received) + self._seconds)
