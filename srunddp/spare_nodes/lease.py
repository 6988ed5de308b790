"""The leases of a run with spare nodes: for how long a worker may run without an answer from rank
0, and rank 0's worker without answers from the other tasks.
"""

import time

from srunddp.supervisor.clock import Clock
from srunddp.supervisor.limits import DEFAULT_LIMITS, Limits
from srunddp.supervisor.node_replacement import LeaseTimes


class Lease:
    """One side's lease on a connection, computed without comparing the clocks of two nodes.

    Each message carries the sender's time and, as an echo, the last time that the sender has
    received from the other side. An echo proves that the message which this side sent at that time
    has arrived. So the lease lasts a fixed number of seconds from the last echo.

    Attributes:
        ends: When this side's lease ends, by this side's clock.
    """

    def __init__(
        self, seconds: float, clock: Clock = time.monotonic, limits: Limits = DEFAULT_LIMITS
    ) -> None:
        """Begin a lease now.

        Args:
            seconds: How long the lease lasts, from now and then from each echo.
            clock: The clock of the lease, which must go on while this process is suspended.
            limits: The supervisor's times, such as how long a worker takes to end after its lease.
        """
        self._seconds = seconds
        self._clock = clock
        self._limits = limits
        self._received = clock()
        self._theirs = 0.0
        self.ends = self._received + seconds

    @property
    def other_ended(self) -> float:
        """The time, by this side's clock, by which the other side's worker has ended if no further
        message arrives from the other side.
        """
        # Before the first message this side does not know when the other side's lease began, so the
        # lease counts as if it began now.
        since = self._received if self._theirs else self._clock()
        return since + self._seconds + self._limits.lease_ends_within

    def stamp(self) -> LeaseTimes:
        """Return the times to send with the next message to the other side."""
        return LeaseTimes(self._clock(), self._theirs)

    def note(self, sent_at: float | None, echo: float | None) -> None:
        """Extend the lease by the times of a message from the other side.

        A message without both times changes nothing.

        Args:
            sent_at: When the other side sent the message, by its clock.
            echo: The last of this side's times that the other side had received by then.
        """
        if sent_at is not None and echo is not None:
            self._received = self._clock()
            self._theirs = sent_at
            self.ends = max(self.ends, min(echo, self._received) + self._seconds)
