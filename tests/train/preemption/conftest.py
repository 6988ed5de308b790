"""What the tests of preemption share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from srunddp.train.preemption import signals


@pytest.fixture(autouse=True)
def no_pending_requests() -> Iterator[None]:
    """What a test leaves is not for the next one."""
    yield
    signals._pending_requests.clear()
