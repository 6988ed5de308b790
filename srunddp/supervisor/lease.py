"""With spare nodes: until when a worker may run without an answer of rank 0, or rank 0 without one of the others."""

import time
from collections.abc import Mapping
from typing import Any

END_WITHIN = 3.0  # seconds that a worker's end may take once a lease is over


class Lease:
    """What one end of a connection knows of the other's time, without comparing two clocks.

    Each message carries its sender's time, and the last time of the receiver's that the sender has seen. By the one
    that came back the receiver knows that it was heard of after it.

    Attributes:
        ends: when this side's lease ends, as :func:`time.monotonic`.
    """

    def __init__(self, seconds: float) -> None:
        """``seconds``: how long a lease lasts from the time that came back."""
        self._seconds, self._received, self._theirs = seconds, time.monotonic(), 0.0
        self.ends = self._received + seconds

    @property
    def other_ended(self) -> float:
        """When the other side's worker has ended, where no message of either side's has arrived since the last."""
        # Before a first message nothing is known of when the other side's has begun.
        return (self._received if self._theirs else time.monotonic()) + self._seconds + END_WITHIN

    def stamp(self) -> dict[str, float]:
        """What a message carries."""
        return {"at": time.monotonic(), "echo": self._theirs}

    def note(self, message: Mapping[str, Any]) -> None:
        """A message has come."""
        sent, own = message.get("at"), message.get("echo")
        if isinstance(sent, float) and isinstance(own, float):
            self._received, self._theirs = time.monotonic(), sent
            self.ends = max(self.ends, min(own, self._received) + self._seconds)
