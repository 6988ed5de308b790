"""With spare nodes: until when a worker may run without an answer of rank 0, or rank 0 without one
of the others.
"""

import time
from collections.abc import Mapping
from typing import Any

from srunddp.supervisor.clock import Clock
from srunddp.supervisor.limits import DEFAULT_LIMITS, Limits


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

    def stamp(self) -> dict[str, float]:
        """What a message carries."""
        return {"at": self._clock(), "echo": self._theirs}

    def note(self, message: Mapping[str, Any]) -> None:
        """A message has come."""
        sent = message.get("at")
        own = message.get("echo")
        if isinstance(sent, float) and isinstance(own, float):
            self._received = self._clock()
            self._theirs = sent
            self.ends = max(self.ends, min(own, self._received) + self._seconds)
