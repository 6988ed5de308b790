"""What the tests of preemption share."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest

from srunddp.train.preemption import signals


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    """Neither requests nor handlers for the next test: a rank that has stopped keeps its handlers
    until its end.
    """
    kept = {
        number: signal.getsignal(number)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
    }
    yield
    signals._pending_requests.clear()
    for number, handler in kept.items():
        signal.signal(number, handler)
